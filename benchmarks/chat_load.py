"""A load generator for gateways whose workers' answers are a function of the prompt: every token of every answer is
checked. Used by gateway_mock.py and gateway_peers.py; not a command.

It speaks just enough HTTP/1.1 to be cheap beside what it measures, keeps connections alive, and reads whole answers
with a length as well as streams in chunks.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import shake_128

import msgspec

LETTERS = "defghijklmnopqrstuvw"
"""Of which answers consist, one per token."""

PATH = "/v1/chat/completions"

ANSWER_S = 30.0
"""No answer of a mock worker takes longer, whatever else the machine does."""


def letters(seed: bytes, count: int) -> str:
    """The answer to a prompt: `count` letters."""
    return "".join([LETTERS[byte % len(LETTERS)] for byte in shake_128(seed).digest(count)])


def prompt_of(number: int) -> str:
    return f"hello world {number}, tell me about the quick brown fox"


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One request and what must come back."""

    body: bytes
    expected: str

    @classmethod
    def of(cls, number: int, *, tokens: int, stream: bool, expected: Callable[[str, int], str]) -> "Question":
        """`expected`: the answer to a prompt, with so many tokens."""
        text = prompt_of(number)
        messages = [{"role": "user", "content": text}]
        body = {"model": "mock", "messages": messages, "max_tokens": tokens, "stream": stream}
        return cls(body=json.dumps(body).encode(), expected=expected(text, tokens))


@dataclass(kw_only=True, slots=True)
class Timings:
    """Seconds from request to first byte of content, and to the last byte."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "first_p50_ms": percentile_ms(self.first, 0.50),
            "first_p99_ms": percentile_ms(self.first, 0.99),
            "whole_p50_ms": percentile_ms(self.whole, 0.50),
            "whole_p99_ms": percentile_ms(self.whole, 0.99),
        }


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    return round(sorted(seconds)[int(share * (len(seconds) - 1))] * 1000, 2)


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int, timings: Timings) -> None:
        self._port = port
        self._timings = timings
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, question: Question) -> None:
        """Raises `AssertionError` for an answer that is not the expected one."""
        async with asyncio.timeout(ANSWER_S):
            await self._ask(question)

    async def _ask(self, question: Question) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        began = time.perf_counter()
        fields = "Host: 127.0.0.1\r\nAuthorization: Bearer sk-x\r\nContent-Type: application/json"
        head = f"POST {PATH} HTTP/1.1\r\n{fields}\r\nContent-Length: {len(question.body)}\r\n\r\n"
        writer.write(head.encode() + question.body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length:" in answer:
            body = await reader.readexactly(int(answer.partition(b"content-length:")[2].split(b"\r\n")[0]))
            first = time.perf_counter()
        else:
            body, first = await _chunks(reader)
        assert answer.startswith(b"http/1.1 200"), (answer, body)
        ended = time.perf_counter()
        content = _streamed(body) if b"text/event-stream" in answer else _decode(body).choices[0].message
        text = content if isinstance(content, str) else content.content if content else None
        assert text == question.expected, (text, question.expected)
        self._timings.first.append(first - began)
        self._timings.whole.append(ended - began)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def _chunks(reader: asyncio.StreamReader) -> tuple[bytes, float]:
    """A chunked body, and when the first chunk with content came."""
    parts, first = [], 0.0
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return b"".join(parts), first
        if not first and b'"content":"' in data.replace(b'"content": "', b'"content":"').replace(b'"content":""', b""):
            first = time.perf_counter()
        parts.append(data[:-2])


def _streamed(body: bytes) -> str:
    """The text of a stream of chat chunks."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert body.rstrip().endswith(b"data: [DONE]"), body[-200:]
    choices = [choice for line in lines[:-1] for choice in _decode(line).choices]
    return "".join([choice.delta.content or "" for choice in choices if choice.delta is not None])


async def closed_loop(port: int, questions: Sequence[Question], *, at_once: int) -> Timings:
    """`at_once` connections, each with its share of the questions, one after the other."""
    timings = Timings()

    async def client(mine: Sequence[Question]) -> None:
        connection = Connection(port, timings)
        for question in mine:
            await connection.ask(question)
        connection.close()

    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(client(questions[number::at_once]))
    return timings


async def open_loop(port: int, questions: Sequence[Question], *, rate: float) -> Timings:
    """`rate` questions a second, whether earlier ones have been answered or not."""
    timings, idle = Timings(), []
    clock = asyncio.get_running_loop().time
    began = clock()

    async def one(question: Question) -> None:
        connection = idle.pop() if idle else Connection(port, timings)
        await connection.ask(question)
        idle.append(connection)

    async with asyncio.TaskGroup() as group:
        for number, question in enumerate(questions):
            await asyncio.sleep(max(0.0, began + number / rate - clock()))
            group.create_task(one(question))
    for connection in idle:
        connection.close()
    return timings
