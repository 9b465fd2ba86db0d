"""One streamed completion, measured and checked for the shape of its stream.

A stream is sound when every chunk has the same id, exactly one chunk carries a finish_reason, usage
arrives once and agrees with what was asked, and `[DONE]` ends it [stream-shape].
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tandem_services.loadgen.workload import RequestSpec


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
    """Keeps what is asked out of the prefix caches that all others share."""

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
        measurement = Measurement(spec=spec, began=time.perf_counter())
        try:
            async with self.client.stream("POST", "/v1/completions", json=self.body(spec)) as response:
                if response.status_code != 200:
                    await response.aread()
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
    """Collects what makes a stream unsound."""

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
