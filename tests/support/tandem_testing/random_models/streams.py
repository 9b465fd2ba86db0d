"""Random checkpoints on a fleet of two prefill and two decode workers, of which some are killed in the middle.

    streams speak        ─▶ kill -9 of the decode worker that has most of them
    pushes are held up   ─▶ kill -9 of the prefill worker that has some
    all workers are back ─▶ a decode worker serves as a prefill worker, and as a decode worker again

No stream may fail. Each token must be the likeliest after the tokens before it, by transformers, with its logprob.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx

from tandem_lab.verify.reference import TransformersReference
from tandem_testing.chaos.compare import LOGPROB_TOLERANCE
from tandem_testing.chaos.fleet import Fleet, Shape
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, SETTLE_TIMEOUT_S, leaked_pages, lost_attempts
from tandem_testing.mutated_configs.comparison import Comparison, Outcome
from tandem_testing.random_models.forms import Written
from tandem_testing.tiny_checkpoints import VOCAB_SIZE
from tandem_testing.waiting import until

STREAMS = 12
"""Of each wave."""
PROMPTS = (5, 40, 90, 130, 180, 230)
"""Tokens: within a page, beyond windows and chunks, and two and three blocks at which a state may be kept."""
TOKENS = 200
HELD_S = 1.0
READ_TIMEOUT_S = 120.0
END_TOKENS = 3
"""Highest ids of the tokenizer, which no prompt has."""


class NothingHappenedError(AssertionError):
    """A fault that no stream met: equal tokens prove nothing."""


@dataclass(kw_only=True, slots=True)
class Stream:
    """One request and what its client has received."""

    prompt: tuple[int, ...]
    gateway: str
    id: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    ended: bool = False

    @property
    def speaks(self) -> bool:
        return bool(self.tokens) and not self.ended


Fault = Callable[[Fleet, Sequence[Stream]], Awaitable[None]]


def by_streams(written: Written) -> Comparison:
    """All streams of a fleet that serves the checkpoint."""
    try:
        streams, leaked = asyncio.run(_all_streams(written))
    except AssertionError as error:
        return Comparison(outcome=Outcome.CRASHED, detail=str(error))
    if leaked:
        return Comparison(outcome=Outcome.DIFFERENT, detail="; ".join(leaked))
    reference = TransformersReference(str(written.worth or written.checkpoint))
    wrong = next(filter(None, (_difference(reference, stream) for stream in streams)), None)
    if wrong is not None:
        return Comparison(outcome=Outcome.DIFFERENT, detail=wrong)
    return Comparison(outcome=Outcome.EQUAL, detail=f"{len(streams)} streams of {TOKENS} tokens")


def _difference(reference: TransformersReference, stream: Stream) -> str | None:
    name = f"stream of {len(stream.prompt)} prompt tokens"
    if stream.error is not None or len(stream.tokens) != TOKENS:
        return f"{name}: {stream.error or f'{len(stream.tokens)} of {TOKENS} tokens'}"
    scored = reference.score(stream.prompt, stream.tokens)
    for place, (behind, theirs, ours) in enumerate(zip(scored.behind, scored.logprobs, stream.logprobs, strict=True)):
        if behind > LOGPROB_TOLERANCE:
            return f"{name}: token {place} is {stream.tokens[place]}, and another is likelier by {behind:.2g}"
        if abs(theirs - ours) > LOGPROB_TOLERANCE:
            return f"{name}: logprob of token {place} is {ours:.6f}, and that of transformers {theirs:.6f}"
    return None


async def _all_streams(written: Written) -> tuple[list[Stream], list[str]]:
    """Of all waves, and what workers have not given back."""
    dice, shape = Random(written.seed), Shape(prefill=2, decode=2, gateways=2)
    with TemporaryDirectory(prefix="tandem-random-fleet-") as folder:
        async with Fleet.running(Path(folder), shape, checkpoint=written.checkpoint) as fleet:
            spoken = await _wave(fleet, dice, _kill_busiest_decode, lossy=True)
            await fleet.all_ready(READY_TIMEOUT_S)
            spoken += await _with_held_pushes(fleet, dice)
            await fleet.all_ready(READY_TIMEOUT_S)
            spoken += await _wave(fleet, dice, _change_roles, lossy=False)
            return spoken, [text async for text in _not_given_back(fleet)]


async def _wave(fleet: Fleet, dice: Random, fault: Fault, *, lossy: bool) -> list[Stream]:
    """Streams in whose middle `fault` happens. `lossy`: attempts of some must be lost by it."""
    lost = await lost_attempts(fleet)
    async with _client() as http:
        streams, tasks = _send(fleet, dice, http)
        await until(lambda: sum(stream.speaks for stream in streams) >= STREAMS // 2, PATIENCE_S, "streams speak")
        await fault(fleet, streams)
        await asyncio.gather(*tasks)
    if lossy and await lost_attempts(fleet) <= lost:
        raise NothingHappenedError("no stream was on the worker that was killed")
    return streams


async def _with_held_pushes(fleet: Fleet, dice: Random) -> list[Stream]:
    """A prefill worker dies that has computed prompts and not sent them."""
    lost = await lost_attempts(fleet)
    victim = fleet.of_role("prefill")[0]
    victim.knobs.turn(hold_push_s=HELD_S)
    async with _client() as http:
        streams, tasks = _send(fleet, dice, http)

        async def holds() -> bool:
            report = await fleet.audit(victim)
            return report is not None and report["private_pages"] > 0

        await until(holds, PATIENCE_S, "a prefill worker holds pages")
        victim.kill()
        victim.knobs.turn()
        await asyncio.gather(*tasks)
    if await lost_attempts(fleet) <= lost:
        raise NothingHappenedError("no prompt was on the worker that was killed")
    return streams


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        timeout=httpx.Timeout(READ_TIMEOUT_S, pool=None),
    )


def _send(fleet: Fleet, dice: Random, http: httpx.AsyncClient) -> "tuple[list[Stream], list[asyncio.Task[None]]]":
    """A wave of streams to all gateways in turn. Half of them begin as another one does."""
    begin = tuple(dice.randrange(VOCAB_SIZE - END_TOKENS) for _ in range(max(PROMPTS)))
    streams = []
    for number in range(STREAMS):
        length = PROMPTS[number % len(PROMPTS)]
        own = tuple(dice.randrange(VOCAB_SIZE - END_TOKENS) for _ in range(length))
        shared = length * 2 // 3 if number % 2 else 0
        gateway = fleet.gateways[number % len(fleet.gateways)]
        streams.append(Stream(prompt=(*begin[:shared], *own[shared:]), gateway=gateway.url))
    return streams, [asyncio.create_task(_listen(stream, http, fleet.model)) for stream in streams]


async def _listen(stream: Stream, http: httpx.AsyncClient, model: str) -> None:
    body = {
        "model": model,
        "prompt": list(stream.prompt),
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with http.stream("POST", f"{stream.gateway}/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                stream.error = f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}"
                return
            async for line in response.aiter_lines():
                _take(stream, line.removeprefix("data: "))
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    finally:
        stream.ended = True


def _take(stream: Stream, data: str) -> None:
    if not data.startswith("{"):
        return
    event = json.loads(data)
    if "error" in event:
        stream.error = str(event["error"])
        return
    stream.id = stream.id or event["id"]
    for choice in event["choices"]:
        stream.tokens += choice["token_ids"]
        stream.logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]


async def _kill_busiest_decode(fleet: Fleet, streams: Sequence[Stream]) -> None:
    (await _busiest_decode(fleet, streams)).kill()


async def _busiest_decode(fleet: Fleet, streams: Sequence[Stream]) -> Worker:
    """As the gateways know it now: what workers report of themselves is half a second old."""
    homes: Counter[str] = Counter()
    youngest = sorted((stream for stream in streams if stream.speaks), key=lambda stream: len(stream.tokens))
    for stream in youngest[: STREAMS // 2]:
        answer = await fleet.http.get(f"{stream.gateway}/v1/requests/{stream.id}/explain")
        if answer.status_code == httpx.codes.OK:
            attempts = [attempt for choice in answer.json()["choices"] for attempt in choice["attempts"]]
            homes[str(attempts[-1]["decode"]).partition("@")[0]] += 1
    return max(fleet.of_role("decode"), key=lambda worker: homes[worker.id])


async def _change_roles(fleet: Fleet, streams: Sequence[Stream]) -> None:
    worker = await _busiest_decode(fleet, streams)
    for role in ("prefill", "decode"):
        answer = await fleet.http.post(f"{worker.url}/role", json={"role": role})
        assert answer.status_code == httpx.codes.OK, answer.text
        await asyncio.sleep(0.1)


async def _not_given_back(fleet: Fleet) -> AsyncIterator[str]:
    """What is wrong with the memory of each worker after all streams have ended."""
    for worker in fleet.workers:
        pages, problems = await leaked_pages(fleet, worker, SETTLE_TIMEOUT_S)
        if pages or problems:
            yield f"{worker.id}: {pages} pages are not free: {problems}"
