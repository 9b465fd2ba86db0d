"""What this worker takes for prompts and decode steps, measured with requests of its own.

    prefill  prompts of `PROMPTS` lengths, each alone and new to the prefix cache: from the request to its only token
    decode   for `BATCHES` numbers of sequences and `CONTEXTS` lengths: when all decode, the mean time of `STEPS` steps;
             then they are aborted

Lengths and numbers are geometric, up to what the worker takes. Combinations whose sequences do not fit into half of the
KV pool, or whose prompts would exceed the time, are left out, so a measurement ends within `MAX_S`.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import ceil
from random import Random
from statistics import median
from typing import NamedTuple

import msgspec

from tandem_engine.base.errors import WireError
from tandem_engine.base.release import RELEASE
from tandem_engine.ipc.async_channels import AsyncDealerChannel
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.control import EngineReady, OrderRefused
from tandem_engine.messages.outputs import EngineReply, OutputBatch, TokenOutput
from tandem_engine.messages.requests import AbortRequest, EngineRequest, GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.worker.engine_process import OrderRefusedError
from tandem_services.worker.registration import LoadMonitor

PROMPTS, BATCHES, CONTEXTS = 5, 6, 3
MAX_PROMPT = 16_384
MAX_CONTEXT = 8192
SHORTEST = 64
STEPS = 16
"""Of a decode measurement."""
MIN_STEPS = 4
MAX_S = 270.0
REQUEST_S = 120.0
"""Silence of the engine after which a measurement fails."""
PROMPT_TOKENS_A_STEP = 256
"""At least, of the prompts of a decode measurement."""
ABORTS_S = 1.0
"""For aborts to leave, when the client has gone: no other process ends what the engine has."""
TOKEN_IDS = 200
"""Every vocabulary has as many."""


class MeasurementError(Exception):
    """It ended without figures; the sentence says why."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt alone."""

    tokens: int
    seconds: float


class DecodeStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `batch` sequences of `context` tokens each."""

    batch: int
    context: int
    seconds: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker. `tandem size --rates` reads it."""

    version: int = 1
    device: str
    tensor_parallel_size: int
    pool_tokens: int
    token_bytes: float
    """KV of one token, on all ranks."""
    transfer_bytes_per_s: float
    """0: no link was measured yet."""
    prefill: tuple[Prompt, ...]
    decode: tuple[DecodeStep, ...]


class Progress(NamedTuple):
    """Before each part."""

    done: int
    total: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of the worker."""

    context_length: int
    max_running: int
    pool_tokens: int


def geometric(least: int, most: int, count: int) -> tuple[int, ...]:
    """`count` numbers from `least` to `most`, fewer where they would be equal."""
    if most <= least:
        return (most,)
    ratio = (most / least) ** (1 / (count - 1))
    return tuple(sorted({round(least * ratio**step) for step in range(count)}))


def output_tokens(batch: int, context: int) -> int:
    """Of each sequence: it decodes while the prompts of the others are computed, and then for `STEPS`."""
    return 4 * STEPS + ceil(batch * context / PROMPT_TOKENS_A_STEP)


def prompt_lengths(limits: Limits) -> tuple[int, ...]:
    longest = min(MAX_PROMPT, limits.context_length - 2, limits.pool_tokens // 2)
    return geometric(min(SHORTEST, longest), longest, PROMPTS)


def decode_points(limits: Limits) -> list[tuple[int, int]]:
    """(Sequences, context), the cheapest first."""
    longest = min(MAX_CONTEXT, limits.context_length // 2, limits.pool_tokens // 4)
    contexts = geometric(min(SHORTEST, longest), longest, CONTEXTS)
    batches = geometric(1, limits.max_running, BATCHES)
    points = itertools.product(batches, contexts)
    fitting = [
        (batch, context)
        for batch, context in points
        if 2 * batch * (context + output_tokens(batch, context)) <= limits.pool_tokens
    ]
    return sorted(fitting, key=lambda point: point[0] * point[1])


Channel = AsyncDealerChannel[EngineReply, EngineRequest]


@dataclass(kw_only=True)
class Measurement:
    """One run over one connection. `run` once."""

    send: Callable[[EngineRequest], bool]
    receive: Callable[[], Awaitable[EngineReply]]
    limits: Limits
    now: Callable[[], float] = time.monotonic
    _random: Random = field(default_factory=lambda: Random(0))
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    prefill: list[Prompt] = field(default_factory=list)
    decode: list[DecodeStep] = field(default_factory=list)

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Fills `prefill` and `decode`. Raises `MeasurementError`, `TimeoutError` and `WireError`."""
        began, lengths, points = self.now(), prompt_lengths(self.limits), decode_points(self.limits)
        total = len(lengths) + len(points)
        # The first request of an engine pays for what is made once.
        await self._prompt(lengths[0])
        for done, tokens in enumerate(lengths):
            if len(self.prefill) > 1 and 3.0 * tokens * self._token_s > MAX_S - (self.now() - began):
                break
            yield Progress(done, total, f"prompt of {tokens} tokens")
            seconds = min([await self._prompt(tokens), await self._prompt(tokens)])
            self.prefill.append(Prompt(tokens=tokens, seconds=seconds))
        for done, (batch, context) in enumerate(points, len(lengths)):
            left = MAX_S - (self.now() - began)
            if 1.5 * batch * context * self._token_s > left:
                continue
            yield Progress(done, total, f"{batch} sequences of {context} tokens")
            step_s = await self._steps(batch, context)
            if step_s is not None:
                self.decode.append(DecodeStep(batch=batch, context=context, seconds=step_s))
        if not self.decode:
            raise MeasurementError(f"no decode step was measured within {MAX_S:.0f} s: the KV pool is too small")

    @property
    def _token_s(self) -> float:
        """Seconds for a token of the longest prompt so far."""
        return self.prefill[-1].seconds / self.prefill[-1].tokens

    async def _prompt(self, tokens: int) -> float:
        """Seconds until its only token."""
        began = self.now()
        rid, ended = self._ask(tokens, max_tokens=1), False
        try:
            while not ended:
                ended = any(output.rid == rid and output.token_ids for output in await self._outputs())
        finally:
            if not ended:
                self.send(AbortRequest(rid=rid))
        return self.now() - began

    async def _steps(self, batch: int, context: int) -> float | None:
        """Seconds of a step in which all sequences get a token; None if they did not decode together for long enough.

        Steps are counted by the tokens of one sequence: their messages may be delayed and then come together.
        """
        most = min(output_tokens(batch, context), self.limits.context_length - context)
        running: set[str] = set()
        first: tuple[float, int] | None = None
        step_s, steps = 0.0, 0
        try:
            for _ in range(batch):
                running.add(self._ask(context, max_tokens=most))
            counted, waiting = min(running), set(running)
            while steps < STEPS and len(running) == batch:
                outputs = [output for output in await self._outputs() if output.rid in running]
                last = next((output for output in outputs if output.rid == counted and output.token_ids), None)
                if last is not None and not waiting:
                    now, tokens = self.now(), last.index + len(last.token_ids)
                    first = first or (now, tokens)
                    steps = tokens - first[1]
                    step_s = (now - first[0]) / steps if steps else 0.0
                waiting -= {output.rid for output in outputs if output.token_ids}
                running -= {output.rid for output in outputs if output.finish is not None}
        finally:
            for rid in running:
                self.send(AbortRequest(rid=rid))
        await self._settle(running)
        return step_s if steps >= MIN_STEPS and step_s > 0.0 else None

    async def _settle(self, rids: set[str]) -> None:
        """Until the aborted ones have ended: they would slow down what comes next."""
        while rids:
            rids -= {output.rid for output in await self._outputs(failures=False) if output.finish is not None}

    def _ask(self, tokens: int, *, max_tokens: int) -> str:
        rid = f"rates-{next(self._numbers)}-0-0"
        prompt = tuple(self._random.randrange(1, TOKEN_IDS) for _ in range(tokens))
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        # A cache of its own: nothing that it leaves can be found by others.
        request = GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling, cache_salt=rid, release=RELEASE)
        if not self.send(request):
            raise MeasurementError("the engine takes no requests: its queue is full")
        return rid

    async def _outputs(self, *, failures: bool = True) -> Sequence[TokenOutput]:
        while True:
            reply = await self.receive()
            if not isinstance(reply, OutputBatch):
                continue
            failed = next((each.finish for each in reply.outputs if each.finish and each.finish.error), None)
            if failures and failed is not None:
                raise MeasurementError(f"the engine ended a request of the measurement: {failed.error}")
            return reply.outputs


async def measure(
    context: IpcContext, ready: EngineReady, *, transfer_rate: float
) -> AsyncGenerator[Progress | Rates, None]:
    """Progress, and at the end the rates of the engine. Raises `MeasurementError`."""
    page = ready.geometry.page_size
    limits = Limits(
        context_length=ready.context_length,
        max_running=ready.max_running_requests,
        pool_tokens=ready.total_pages * page,
    )
    channel: Channel = AsyncDealerChannel(context, ready.request_endpoint, inbound=EngineReply, outbound=EngineRequest)

    async def receive() -> EngineReply:
        async with asyncio.timeout(REQUEST_S):
            return await channel.receive()

    measurement = Measurement(send=channel.send, receive=receive, limits=limits)
    try:
        async for progress in measurement.run():
            yield progress
    except TimeoutError as error:
        raise MeasurementError(f"the engine was silent for {REQUEST_S:.0f} s") from error
    except WireError as error:
        raise MeasurementError(f"the engine cannot be reached: {error}") from error
    finally:
        channel.close(linger_s=ABORTS_S)
    yield Rates(
        device=ready.device,
        tensor_parallel_size=ready.geometry.tp_size,
        pool_tokens=limits.pool_tokens,
        token_bytes=ready.geometry.page_bytes * ready.geometry.tp_size / page,
        transfer_bytes_per_s=transfer_rate,
        prefill=tuple(measurement.prefill),
        decode=tuple(measurement.decode),
    )


BUSY = "busy"
"""Requests run here; an order with `force` is carried out all the same."""
UNAVAILABLE = "unavailable"


@dataclass(kw_only=True, slots=True)
class RatesOrder:
    """Measures on demand, one at a time. The router sends the worker no requests in that time."""

    context: IpcContext
    monitor: LoadMonitor
    ready: Callable[[], EngineReady | None]
    state_changed: Callable[[], None]
    """The registry should get the state of the monitor at once."""

    async def measure(self, force: bool) -> AsyncGenerator[Progress | Rates, None]:
        """Progress, and at the end the rates.

        Raises:
            OrderRefusedError: before anything else, when it cannot be done now; with `force` not because of requests.
            MeasurementError: it ended without figures.
        """
        ready = self.ready()
        reason = self._in_the_way(ready)
        if ready is None or reason is not None:
            raise OrderRefusedError(OrderRefused(nonce=0, code=UNAVAILABLE, message=reason or ""))
        requests = self._requests()
        if requests and not force:
            message = f"{requests} requests run here and would wait for the measurement, which they would falsify"
            raise OrderRefusedError(OrderRefused(nonce=0, code=BUSY, message=message))
        self.monitor.measuring = True
        self.state_changed()
        try:
            links = () if self.monitor.stats is None else self.monitor.stats.links
            rates = [link.bytes_per_s for link in links if link.bytes_per_s > 0.0]
            async with aclosing(measure(self.context, ready, transfer_rate=median(rates) if rates else 0.0)) as items:
                async for item in items:
                    if self.monitor.draining:
                        raise MeasurementError("this worker drains")
                    yield item
        finally:
            self.monitor.measuring = False
            self.state_changed()

    def _in_the_way(self, ready: EngineReady | None) -> str | None:
        """Why it cannot be measured at all."""
        if ready is None:
            return "the engine loads the model; there is nothing to measure yet"
        if self.monitor.draining:
            return "this worker drains"
        if self.monitor.measuring:
            return "its rates are being measured already"
        if self.monitor.stats is not None and self.monitor.stats.paused:
            return "generation is paused; resume it first (tandem ctl HOST:PORT resume)"
        return None

    def _requests(self) -> int:
        stats = self.monitor.stats
        return 0 if stats is None else stats.running + stats.waiting + stats.transferring
