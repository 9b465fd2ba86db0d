"""A light HTTP client: batches of requests at once, and streamed completions with the time of every token.

The one that measures shares the cores with what it measures, so a stream may cost it tens of microseconds a token:
bytes are kept with their times and read when the stream is over.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from peers.jobs import Job
from peers.processes import PeerError

_LIMIT_BYTES = 1 << 24
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One streamed completion. Times are seconds of `time.perf_counter`."""

    sent: float
    times: tuple[float, ...]
    """Of each event that brought tokens."""
    ended: float
    tokens: int
    """As the server's usage says."""
    cached_tokens: int

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between events: the latency of each token but the first."""
        return [after - before for before, after in pairwise(self.times)]


async def complete(port: int, model: str, job: Job) -> Stream:
    """Stream one completion to its end. Raises `PeerError` for a failed or incomplete one."""
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    status, chunks = await _post(port, "/v1/completions", body)
    ended = time.perf_counter()
    if status != 200:
        raise PeerError(f"HTTP {status}: {b''.join(data for _, data in chunks)[:300]!r}")
    return read_stream(sent, chunks, ended)


def read_stream(sent: float, chunks: Sequence[tuple[float, bytes]], ended: float) -> Stream:
    """What the chunks of an event stream say; an event came when its last byte did. Raises `PeerError`."""
    times, usage, done, rest = [], {}, False, b""
    for at, data in chunks:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise PeerError(f"the stream failed: {event['error']}")
            usage = event.get("usage") or usage
            if event.get("choices") and event["choices"][0].get("text") is not None and not event.get("usage"):
                times.append(at)
    if not done or not usage or not times:
        raise PeerError(f"a stream ended early: done {done}, usage {usage}, {len(times)} events")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    count = usage["completion_tokens"]
    return Stream(sent=sent, times=tuple(times[:count]), ended=ended, tokens=count, cached_tokens=cached)


async def _post(port: int, path: str, body: Mapping[str, Any]) -> tuple[int, list[tuple[float, bytes]]]:
    """The status, and the pieces of the body with the times they came."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LIMIT_BYTES)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(answer.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in answer:
            return status, await _chunks(reader)
        return status, [(time.perf_counter(), await reader.read())]
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> list[tuple[float, bytes]]:
    chunks = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        data = await reader.readexactly(size + 2)
        chunks.append((time.perf_counter(), data[:-2]))
    return chunks


async def all_within(limit_s: float, waiting: Iterable[Awaitable[T]]) -> list[T]:
    """What all of them give. Raises `PeerError` when one takes longer, or a server cannot be talked to."""
    try:
        async with asyncio.timeout(limit_s):
            return list(await asyncio.gather(*waiting))
    except TimeoutError:
        raise PeerError(f"no answer within {limit_s:.0f} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise PeerError(f"a connection failed: {error!r}") from error


def complete_all(port: int, model: str, jobs: Sequence[Job], *, limit_s: float) -> tuple[float, list[Stream]]:
    """Seconds until all of them, sent at once, had ended. Raises `PeerError`."""
    began = time.perf_counter()
    streams = asyncio.run(all_within(limit_s, (complete(port, model, job) for job in jobs)))
    return time.perf_counter() - began, streams


def ask_all(
    port: int, path: str, bodies: Sequence[Mapping[str, Any]], *, limit_s: float
) -> tuple[float, list[dict[str, Any]]]:
    """Whole answers, asked for at once, and the seconds until all had come. Raises `PeerError` for a failed one."""

    async def one(body: Mapping[str, Any]) -> dict[str, Any]:
        status, chunks = await _post(port, path, body)
        text = b"".join(data for _, data in chunks)
        if status != 200:
            raise PeerError(f"HTTP {status}: {text[:300]!r}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    began = time.perf_counter()
    answers = asyncio.run(all_within(limit_s, (one(body) for body in bodies)))
    return time.perf_counter() - began, answers
