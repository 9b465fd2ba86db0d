"""A load test of a server: workloads with fixed concurrency or arrival times, and checks of every stream.

Workloads (prompts, output lengths, arrival times) are a function of the seed. Prompts are made of blocks of words, and
equal block numbers give equal text, so that prefix reuse in a trace (Mooncake's `hash_ids`) is real reuse. Lengths here
count words; the server's usage counts tokens.

Content: before the run the reference server answers every distinct (prompt, length) once, one at a time; in the run
each greedy stream must repeat that text exactly.

Shape: every chunk of a stream has the same id, exactly one chunk has a finish_reason, usage arrives once and agrees
with the request, and `[DONE]` ends it [stream-shape].
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tandem_engine.base.errors import ConfigError
from tandem_lab.bench.promises import OBJECTIVES, Ratios, Retries, predicted_ttft_s, ratios, retry_after_s
from tandem_lab.traces import TRACE_BLOCK, TraceRow, read_trace
from tandem_services.common.errors import RemoteError

WORDS = tuple(
    "the river fox lives near a quiet village and every morning it walks along old stone bridge to look for "
    "bread apples green garden tells friend about long winter night when snow fell on hills children sang small "
    "boat carried letters from island to harbour where baker waited with warm lamp".split()
)

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpec:
    """One request of the run."""

    prompt: Prompt
    max_tokens: int
    at: float = 0.0
    """Seconds after the start of the run; used by rate and trace, not by fixed concurrency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Words per prompt and tokens per answer, uniform in [(1 - spread) * n, n]."""

    prompt: int
    output: int
    spread: float = 0.0
    shared_prefix: int = 0
    """Leading words that all prompts have in common."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        low = 1.0 - self.spread
        return (
            max(1, round(self.prompt * rng.uniform(low, 1.0))),
            max(1, round(self.output * rng.uniform(low, 1.0))),
        )


def block_words(block: int, count: int) -> list[str]:
    """The words of one block: a function of its number alone."""
    rng = random.Random(block)
    return [rng.choice(WORDS) for _ in range(count)]


def fixed_workload(lengths: Lengths, count: int, *, rate: float | None, seed: int) -> list[RequestSpec]:
    """`count` requests; with `rate`, Poisson arrivals of that many per second."""
    rng = random.Random(seed)
    shared = block_words(-1, lengths.shared_prefix)
    at = 0.0
    specs = []
    for number in range(count):
        words, output = lengths.draw(rng)
        own = block_words(seed * 1_000_003 + number, max(1, words - len(shared)))
        if rate is not None:
            at += rng.expovariate(rate)
        specs.append(RequestSpec(prompt=" ".join([*shared, *own]), max_tokens=output, at=at))
    return specs


def trace_workload(path: Path, count: int, *, scale: float, speed: float) -> list[RequestSpec]:
    """The first `count` requests of a Mooncake (.jsonl) or Azure (.csv) trace.

    `scale` divides lengths (64 suits a small CPU model), `speed` divides the times between arrivals.
    Raises `ConfigError` naming the file and line that cannot be read, or the request with several choices.
    """
    chosen = list(islice(read_trace(path), count))
    if not chosen:
        raise ConfigError(f"--trace {path}: no requests in it")
    for number, row in enumerate(chosen, 1):
        if row.choices > 1:
            raise ConfigError(
                f"--trace {path}: request {number} has n = {row.choices}, must be 1 here: one choice is sent"
            )
    start = chosen[0].at
    return [
        RequestSpec(
            prompt=" ".join(_words(row, scale)),
            max_tokens=max(1, round(row.output_tokens / scale)),
            at=(row.at - start) / speed,
        )
        for row in chosen
    ]


def _words(row: TraceRow, scale: float) -> list[str]:
    total = max(1, round(row.prompt_tokens / scale))
    size = max(1, round(TRACE_BLOCK / scale))
    words = [word for block in row.blocks for word in block_words(block, size)]
    return words[:total]


@dataclass(kw_only=True, slots=True)
class Measurement:
    """Times are seconds on this process's monotonic clock."""

    spec: RequestSpec
    began: float
    first: float | None = None
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Between chunks with text: inter-token latency when each chunk carries one token."""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    predicted_s: float | None = None
    """Time to the first token, as the server predicted it."""
    retry_after_s: float | None = None
    """When the server that rejected it will serve it."""
    is_retry: bool = False
    """It was rejected before, and sent again at the time that the server gave."""

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where requests go and with which sampling."""

    client: httpx.AsyncClient
    model: str
    temperature: float
    seed: int | None
    ignore_eos: bool
    cache_salt: str | None = None
    """Keeps these prompts out of the prefix caches that other requests share."""
    objectives: Mapping[str, str] = field(default_factory=dict)
    """Headers with the latency objectives of each request."""
    retry_within_s: float = 0.0
    """A request that is rejected with a Retry-After of at most this is sent again then, once; 0: never."""

    def body(self, spec: RequestSpec) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": spec.prompt,
            "max_tokens": spec.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.cache_salt is not None:
            body["cache_salt"] = self.cache_salt
        return body

    async def send(self, spec: RequestSpec) -> Measurement:
        """Stream one completion to its end. Failures are recorded, never raised."""
        measurement = await self._send(spec)
        wait_s = measurement.retry_after_s
        if wait_s is None or self.retry_within_s <= 0.0 or wait_s > self.retry_within_s:
            return measurement
        await asyncio.sleep(wait_s)
        again = await self._send(spec)
        again.is_retry = True
        return again

    async def _send(self, spec: RequestSpec) -> Measurement:
        measurement = Measurement(spec=spec, began=time.perf_counter())
        try:
            async with self.client.stream(
                "POST", "/v1/completions", json=self.body(spec), headers=self.objectives
            ) as response:
                measurement.predicted_s = predicted_ttft_s(response.headers)
                if response.status_code != 200:
                    await response.aread()
                    measurement.retry_after_s = retry_after_s(response.headers)
                    measurement.error = f"HTTP {response.status_code}: {response.text[:200]}"
                else:
                    await _read(response, measurement)
        except httpx.HTTPError as error:
            measurement.error = f"{type(error).__name__}: {error}"
        measurement.ended = time.perf_counter()
        return measurement


async def _read(response: httpx.Response, measurement: Measurement) -> None:
    checker = StreamCheck()
    last = None
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        chunk = checker.take(line.removeprefix("data: "))
        text = chunk["choices"][0]["text"] if chunk and chunk.get("choices") else ""
        if text:
            now = time.perf_counter()
            if last is None:
                measurement.first = now
            else:
                measurement.gaps.append(now - last)
            last = now
            measurement.text += text
    usage = checker.usage
    measurement.prompt_tokens = usage.get("prompt_tokens", 0)
    measurement.output_tokens = usage.get("completion_tokens", 0)
    measurement.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    measurement.error = checker.verdict(measurement.spec.max_tokens)


@dataclass(kw_only=True, slots=True)
class StreamCheck:
    """Collects the errors of a stream."""

    ids: set[str] = field(default_factory=set)
    finishes: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    error: str | None = None

    def take(self, data: str) -> dict[str, Any] | None:
        if data == "[DONE]":
            self.done = True
            return None
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            self.error = f"error event: {chunk['error'].get('message')}"
            return None
        if self.done:
            self.error = "a chunk came after [DONE]"
        self.ids.add(chunk["id"])
        self.finishes += [c["finish_reason"] for c in chunk["choices"] if c["finish_reason"]]
        self.usage = chunk.get("usage") or self.usage
        return chunk

    def verdict(self, max_tokens: int) -> str | None:
        """The first fault, None for a sound stream."""
        if self.error is not None:
            return self.error
        faults = (
            (not self.done, "the stream ended without [DONE]"),
            (len(self.ids) != 1, f"{len(self.ids)} response ids in one stream"),
            (len(self.finishes) != 1, f"{len(self.finishes)} finish reasons in one stream"),
            (not self.usage, "no usage, although it was requested"),
            (self.usage.get("completion_tokens", 0) > max_tokens, "more tokens than max_tokens"),
            (
                self.finishes == ["length"] and self.usage.get("completion_tokens") != max_tokens,
                "finish_reason length before max_tokens",
            ),
        )
        return next((text for wrong, text in faults if wrong), None)


Progress = Callable[[Measurement], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    measurements: list[Measurement]
    seconds: float


async def at_concurrency(target: Target, specs: Sequence[RequestSpec], concurrency: int, done: Progress) -> RunResult:
    """`concurrency` clients take the next request as soon as their last one ends."""
    waiting = iter(specs)
    measurements: list[Measurement] = []

    async def client() -> None:
        for spec in waiting:
            measurement = await target.send(spec)
            measurements.append(measurement)
            done(measurement)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(specs))):
            group.create_task(client())
    return RunResult(measurements=measurements, seconds=time.perf_counter() - began)


async def at_arrival_times(target: Target, specs: Sequence[RequestSpec], done: Progress) -> RunResult:
    """Each request is sent at its own time, whatever became of the ones before (open loop)."""
    measurements: list[Measurement] = []
    began = time.perf_counter()

    async def one(spec: RequestSpec) -> None:
        await asyncio.sleep(max(0.0, began + spec.at - time.perf_counter()))
        measurement = await target.send(spec)
        measurements.append(measurement)
        done(measurement)

    async with asyncio.TaskGroup() as group:
        for spec in specs:
            group.create_task(one(spec))
    return RunResult(measurements=measurements, seconds=time.perf_counter() - began)


async def reference_texts(target: Target, specs: Sequence[RequestSpec], done: Progress) -> dict[Prompt, str]:
    """The text for each distinct prompt, requested one at a time. Raises `RemoteError` if one fails."""
    texts: dict[Prompt, str] = {}
    for spec in specs:
        if spec.prompt in texts:
            continue
        measurement = await target.send(spec)
        if measurement.error is not None:
            raise RemoteError(f"the reference run failed: {measurement.error}")
        texts[spec.prompt] = measurement.text
        done(measurement)
    return texts


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """A request is good when it meets every bound that is set (milliseconds)."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Bound on a request's mean inter-token latency."""
    e2e_ms: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    requests: int
    failed: int
    mismatched: int
    """Streams whose text differs from the reference for the same prompt."""
    checked: int
    """Streams compared with a reference."""
    seconds: float
    requests_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    goodput_requests_per_s: float | None
    """None when no SLO was given."""
    ttft_over_predicted: Ratios | None
    """None of a server that predicts nothing."""
    retries: Retries | None
    """None where no request was sent again."""
    errors: dict[str, int]
    """Message → how often."""


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Nearest-rank percentiles; None without samples."""
    if not seconds:
        return None
    ranked = sorted(value * 1e3 for value in seconds)

    def rank(share: float) -> float:
        return ranked[math.ceil(share * len(ranked)) - 1]

    return Percentiles(mean=sum(ranked) / len(ranked), p50=rank(0.5), p90=rank(0.9), p99=rank(0.99), max=ranked[-1])


def is_good(m: Measurement, slo: Slo) -> bool:
    """Whether a request succeeded within every bound."""
    if not m.ok or m.first is None or m.ended is None:
        return False
    itl = sum(m.gaps) / len(m.gaps) if m.gaps else 0.0
    bounds = ((slo.ttft_ms, m.first - m.began), (slo.itl_ms, itl), (slo.e2e_ms, m.ended - m.began))
    return all(limit is None or value * 1e3 <= limit for limit, value in bounds)


def objectives_of(slo: Slo) -> dict[str, str]:
    """Headers that make the bounds those of each request; there is none for the whole request."""
    bounds = {name: getattr(slo, name) for name in OBJECTIVES}
    return {OBJECTIVES[name]: f"{bound:g}" for name, bound in bounds.items() if bound is not None}


def _retries(again: Sequence[Measurement], slo: Slo) -> Retries | None:
    return Retries(sent=len(again), good=sum(is_good(m, slo) for m in again)) if again else None


def summarize(
    measurements: Sequence[Measurement], seconds: float, *, slo: Slo | None, references: dict[Prompt, str]
) -> Summary:
    """`references` maps a prompt to the text that greedy decoding must give for it."""
    good = [m for m in measurements if m.ok]
    compared = [m for m in good if m.spec.prompt in references]
    errors: dict[str, int] = {}
    for m in measurements:
        if m.error is not None:
            errors[m.error] = errors.get(m.error, 0) + 1
    output_tokens = sum(m.output_tokens for m in good)
    return Summary(
        requests=len(measurements),
        failed=len(measurements) - len(good),
        mismatched=sum(m.text != references[m.spec.prompt] for m in compared),
        checked=len(compared),
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        prompt_tokens=sum(m.prompt_tokens for m in good),
        cached_tokens=sum(m.cached_tokens for m in good),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds,
        ttft_ms=percentiles([m.first - m.began for m in good if m.first is not None]),
        itl_ms=percentiles([gap for m in good for gap in m.gaps]),
        e2e_ms=percentiles([m.ended - m.began for m in good if m.ended is not None]),
        goodput_requests_per_s=None if slo is None else sum(is_good(m, slo) for m in measurements) / seconds,
        ttft_over_predicted=ratios(
            (m.first - m.began, m.predicted_s) for m in good if m.first is not None and m.predicted_s is not None
        ),
        retries=_retries([m for m in measurements if m.is_retry], slo or Slo()),
        errors=errors,
    )
