"""Mock workers that speak OpenAI's API over HTTP, for gateways that forward bytes: `chat_load.letters` as answers.

    python benchmarks/http_worker.py [--workers 4] [--step-ms 10]

All in one process, each on a free port of its own; prints the ports and ends with its input. Hand-written HTTP/1.1, an
event per token and write, so that they are cheap beside what is measured.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import uvloop  # noqa: E402
from chat_load import letters  # noqa: E402

MODEL = "mock"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
COMMON = {"id": "c", "created": 1, "model": MODEL}
INFO = {"model_path": MODEL, "model_id": MODEL, "served_model_name": MODEL, "is_generation": True, "version": "0"}
ANSWERS = {
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "mock"}]},
    "/model_info": INFO,
    "/get_model_info": INFO,
    "/server_info": INFO,
    "/get_server_info": INFO,
}


def whole(document: object) -> bytes:
    body = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    document = {**COMMON, "object": "chat.completion.chunk", "choices": [choice]}
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


EVENTS = {letter: event({"content": letter}, None) for letter in set(letters(b"any", 1000))}
END = event({}, "length") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def answer_to(messages: list[dict[str, str]], tokens: int) -> str:
    return letters("\n".join(message["content"] for message in messages).encode(), tokens)


class NotHttpError(ValueError):
    """What came is no request of HTTP/1.1."""


class RequestReader(asyncio.Protocol):
    """One connection: each whole request goes to `handle`. A client with another protocol is disconnected, as by real
    workers: gateways try HTTP/2 on a worker to find out whether it speaks gRPC."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while (parsed := read_request(self._received)) is not None:
                path, body, self._received = parsed
                self.handle(path, body)
        except NotHttpError:
            self._transport.close()

    def handle(self, path: str, body: bytes) -> None:
        raise NotImplementedError


class WorkerConnection(RequestReader):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s

    def handle(self, path: str, body: bytes) -> None:
        if not path.endswith("/completions"):
            self._transport.write(whole(ANSWERS.get(path, {"status": "ok"})))
            return
        request = json.loads(body)
        tokens = request.get("max_tokens") or request.get("max_completion_tokens")
        text = answer_to(request["messages"], tokens)
        if request.get("stream"):
            self._transport.write(HEAD)
            self._next(iter(text))
            return
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        choices = [{"index": 0, "message": message, "finish_reason": "length"}]
        self._transport.write(whole({**COMMON, "object": "chat.completion", "choices": choices, "usage": usage}))

    def _next(self, left: Iterator[str]) -> None:
        letter = next(left, None)
        if self._transport.is_closing():
            return
        self._transport.write(END if letter is None else EVENTS[letter])
        if letter is not None:
            asyncio.get_running_loop().call_later(self._step_s, self._next, left)


def read_request(data: bytes) -> tuple[str, bytes, bytes] | None:
    """Path, body and what comes after the first whole request; None: there is more to come. Raises `NotHttpError`."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    first = head.split(b"\r\n")[0].split(b" ")
    if len(first) != 3 or first[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise NotHttpError(f"{first!r} does not begin a request of HTTP/1.1")
    path = first[1].split(b"?")[0].decode()
    fields = head.lower()
    if b"transfer-encoding: chunked" in fields:
        parts = []
        while True:
            size, found, rest = rest.partition(b"\r\n")
            length = int(size, 16) if found else 0
            if not found or len(rest) < length + 2:
                return None
            if not length:
                return path, b"".join(parts), rest[2:]
            parts.append(rest[:length])
            rest = rest[length + 2 :]
    _, found, value = fields.partition(b"content-length:")
    length = int(value.split(b"\r\n")[0]) if found else 0
    return (path, rest[:length], rest[length:]) if len(rest) >= length else None


async def serve(workers: int, step_s: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: WorkerConnection(step_s), "127.0.0.1", 0) for _ in range(workers)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=0.0)
    options = parser.parse_args()
    uvloop.run(serve(options.workers, options.step_ms / 1000))


if __name__ == "__main__":
    main()
