"""Streams on which nothing is written for a while get comments; a gateway that ends gives each its error."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from tandem_services.common.errors import ApiError
from tandem_services.gateway.http.interruption import Closing, Limit
from tandem_services.gateway.http.sse import WAITING_S, EventStream
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy
from tandem_testing.gateway_builders import config_of, live_gateway
from tandem_testing.loop_time import TURNS, set_forward
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.waiting import until

HI = [{"role": "user", "content": "hi"}]
STREAMS = {
    "/v1/chat/completions": ({"messages": HI, "max_tokens": 3}, "data: [DONE]"),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 3}, "data: [DONE]"),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 3}, "event: response.incomplete"),
    "/v1/messages": ({"messages": HI, "max_tokens": 3}, "event: message_stop"),
}


@asynccontextmanager
async def streamed(gateway, path: str, body: dict):
    """The lines of a streamed answer; the time-outs of HTTP clients go by the clock that these tests set forward."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({"model": "mock", "stream": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    try:
        yield reader
    finally:
        writer.close()


async def line_of(reader) -> str:
    """The next one with text that is no part of HTTP's chunks."""
    while True:
        line = (await reader.readline()).decode().strip()
        if line.startswith((":", "data:", "event:", "HTTP/")):
            return line


@pytest.mark.parametrize("path", STREAMS)
async def test_stream_without_room_gets_comments_until_served(rack, tokenizer, path):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    body, end = STREAMS[path]
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        live.chooser.room = 0
        async with streamed(live, path, body) as reader:
            await until(lambda: bool(live.chooser.queries), 60, "it waits")
            for number in range(4):
                set_forward(WAITING_S)
                lines = [await line_of(reader)] if number else [await line_of(reader), await line_of(reader)]
                assert lines == ([": waiting"] if number else ["HTTP/1.1 200 OK", ": waiting"])
            live.chooser.room = 1
            line = await line_of(reader)
            while not line.startswith(end):
                assert not line.startswith("event: error")
                line = await line_of(reader)


async def test_stream_without_workers_is_refused_with_a_status():
    """Comments begin later than a refusal for want of any worker: until then the status is not out."""
    [model] = config_of().models
    assert model.queue_s == AdmissionPolicy().worker_s
    assert model.queue_s + AdmissionPolicy().poll_s < WAITING_S < 10.0


async def test_stream_that_flows_gets_no_comment():
    sent: list[bytes] = []

    async def send(message):
        sent.append(message.get("body", b""))

    async with EventStream(send) as events:
        for number in range(20):
            set_forward(WAITING_S * 0.7)
            await turns()
            await events.write(b"data: %d\n\n" % number)
        await events.finish(b"data: [DONE]\n\n")
    assert not any(b"waiting" in body for body in sent)


async def test_stream_comment_never_splits_an_event():
    """A client that reads slowly: writes and comments wait for it, one after the other."""
    sent: list[bytes] = []
    reading = asyncio.Event()

    async def send(message):
        await reading.wait()
        sent.append(message.get("body", b"head"))

    async with EventStream(send) as events:
        set_forward(WAITING_S)
        await turns()
        writing = asyncio.create_task(events.write(b"data: 1\n\n"))
        for _ in range(3):
            set_forward(WAITING_S)
            await turns()
        reading.set()
        await writing
        await events.finish(b"data: [DONE]\n\n")
        set_forward(WAITING_S)
        await turns()
    assert sent == [b"head", b": waiting\n\n", b"data: 1\n\n", b"data: [DONE]\n\n"]


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_closing_ends_answers_with_an_error():
    closing = Closing()

    async def answer():
        limit = Limit(closing, 600.0)
        try:
            with limit:
                await asyncio.Event().wait()
        finally:
            limit.stop()

    answers = [asyncio.create_task(answer()) for _ in range(3)]
    await turns()
    left = answers.pop()
    left.cancel()
    await turns()
    assert left.cancelled(), "a client that leaves is none of it"
    closing.end()
    ended = await asyncio.gather(*answers, answer(), return_exceptions=True)
    assert [(type(error), error.status) for error in ended] == [(ApiError, 503)] * 3
