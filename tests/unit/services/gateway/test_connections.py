"""Connections that send no request, half of one, or none that is HTTP."""

import asyncio
import itertools
import json
import signal
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from tandem_services.common.health import Health
from tandem_services.common.sockets import listen
from tandem_services.gateway.http.connection import GatewayConnection
from tandem_services.gateway.serve import http_server
from tandem_testing.gateway_builders import config_of, live_gateway
from tandem_testing.loop_time import set_forward
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until

LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HEAD_S = 8.0
"""For a head; more than a machine stands still for, and less than `connection` waits for everything."""
BODY = b'{"model": "mock", "prompt": "a", "max_tokens": 1}'


@asynccontextmanager
async def connection(gateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


async def response_to(gateway, *parts: bytes) -> bytes:
    """Everything that is answered until the gateway closes the connection."""
    async with connection(gateway) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()


def check_refusal(answer: bytes, status: int) -> str:
    """One answer with this status in OpenAI's shape, after which the connection closes. Returns its message."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("ascii").lower().split("\r\n")
    assert int(lines[0].split()[1]) == status, answer
    assert "connection: close" in lines or status in (414, 505)
    assert any(line.startswith("x-request-id: ") for line in lines)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error["message"]


NO_HTTP = {
    "random bytes": bytes(range(256)),
    "h2c preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS ClientHello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "NUL in a header": b"GET /live HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n",
    "CR in a header": b"GET /live HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n\r\n",
    "no ASCII in the URL": "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "length of 30 digits": POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    "length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk without a size": POST + b"Transfer-Encoding: chunked\r\n\r\nx\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP.keys())
async def test_non_http_bytes_get_a_400_and_close(gateway, rack, caplog, sent):  # [one-reading] [heads-bounded]
    check_refusal(await response_to(gateway, sent), 400)
    assert not rack.engines[0].received
    assert not [record for record in caplog.records if record.exc_info]
    assert (await gateway.http.get("/live")).status_code == 200


HOSTS = {
    "none": b"",
    "two": b"Host: a\r\nHost: b\r\n",
    "two alike": b"Host: a\r\nHost: a\r\n",
    "a path": b"Host: x/y?z#\r\n",
    "a user": b"Host: a@b\r\n",
    "long": b"Host: " + b"x" * 300 + b"\r\n",
}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS.keys())
@pytest.mark.parametrize("path", [b"/live", b"/nope"])
async def test_request_has_one_host_that_is_a_host(gateway, host, path):  # [one-host], Starlette CVE-2026-48710
    answer = await response_to(gateway, b"GET " + path + b" HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n")
    assert "Host" in check_refusal(answer, 400)


@pytest.mark.parametrize("host", [b"gateway", b"a-b.c_d:8000", b"[::1]:80", b"127.0.0.1"])
async def test_names_and_addresses_are_hosts(gateway, host):  # [one-host]
    answer = await response_to(gateway, b"GET /live HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_old_clients_need_no_host_and_older_ones_are_refused(gateway):  # [one-reading]
    assert (await response_to(gateway, b"GET /live HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    check_refusal(await response_to(gateway, b"GET /live\r\n\r\n"), 505)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET", b"GET /live HTTP/1.1\r\nHo"])
async def test_head_that_never_ends_is_answered_408(gateway, monkeypatch, sent):  # [slow-request-ends]
    monkeypatch.setattr("tandem_services.gateway.http.connection.HEAD_TIMEOUT_S", 0.05)
    assert "did not arrive" in check_refusal(await response_to(gateway, sent), 408)


async def test_nor_is_one_behind_a_request_waited_for(gateway, monkeypatch):  # [slow-request-ends]
    monkeypatch.setattr("tandem_services.gateway.http.connection.HEAD_TIMEOUT_S", HEAD_S)
    async with connection(gateway) as (reader, writer):
        writer.write(LIVE + b"GE")
        await reader.readuntil(b'"ok"}')
        set_forward(HEAD_S)
        assert "did not arrive" in check_refusal(await reader.read(), 408)


async def test_idle_connection_between_requests_owes_no_head(gateway, monkeypatch):  # [slow-request-ends]
    monkeypatch.setattr("tandem_services.gateway.http.connection.HEAD_TIMEOUT_S", HEAD_S)
    async with connection(gateway) as (silent, _), connection(gateway) as (reader, writer):
        writer.write(LIVE)
        await reader.readuntil(b'"ok"}')
        set_forward(HEAD_S)
        check_refusal(await silent.read(), 408)
        writer.write(LAST)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_oversized_head_is_refused_before_it_ends(gateway, monkeypatch):  # [heads-bounded], vLLM CVE-2025-48956
    monkeypatch.setattr("tandem_services.gateway.http.connection.MAX_HEAD_BYTES", 1000)
    async with connection(gateway) as (reader, writer):
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nX: ")
        answer = asyncio.ensure_future(reader.read())
        while not answer.done():
            writer.write(b"y" * 100)
            await asyncio.wait([answer], timeout=0.001)
        assert "limited to 1000 bytes" in check_refusal(await answer, 431)


@pytest.mark.parametrize("size", [9_000, 30_000])
async def test_url_that_is_too_long_is_a_414(gateway, size):  # [heads-bounded]
    answer = await response_to(
        gateway, b"GET /live?%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % (b"x" * size)
    )
    assert "URL is limited to" in check_refusal(answer, 414)


async def test_url_without_end_is_a_414_as_well(gateway):  # [heads-bounded]
    async with connection(gateway) as (reader, writer):
        writer.write(b"GET /live?")
        answer = asyncio.ensure_future(reader.read())
        while not answer.done():
            writer.write(b"x" * 1000)
            await asyncio.wait([answer], timeout=0.001)
        assert "URL is limited to" in check_refusal(await answer, 414)


async def test_pipelined_requests_are_answered_in_order(gateway, rack):  # [slow-request-ends]
    answer = await response_to(gateway, LIVE * 50 + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" + LIVE * 48 + LAST)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert len(bodies) == 100
    assert [i for i, body in enumerate(bodies) if b'"version"' in body] == [50]


@pytest.mark.parametrize("head", [b"Expect: 100-continue\r\nContent-Length: 2\r\n", b"Content-Length: 5000\r\n"])
async def test_body_that_was_promised_and_never_sent_is_a_408(gateway, rack, monkeypatch, head):  # [one-reading]
    monkeypatch.setattr("tandem_services.gateway.http.body.BODY_TIMEOUT_S", 0.05)
    answer = await response_to(gateway, POST + b"Connection: close\r\n" + head + b"\r\n")
    check_refusal(answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"), 408)
    assert not rack.engines[0].received


async def test_body_longer_than_it_says_is_no_request(gateway, rack):  # [one-reading]
    check_refusal(await response_to(gateway, POST + b"Connection: close\r\nContent-Length: 5\r\n\r\n" + BODY), 400)
    # What follows is the next request, which is none: it must not be the answer of the one that runs.
    answer = await response_to(gateway, POST + b"Content-Length: 5\r\n\r\n" + BODY)
    first, last = answer.split(b"HTTP/1.1 ")[1:]
    assert b"not valid JSON" in first
    assert "not a valid HTTP request" in check_refusal(b"HTTP/1.1 " + last, 400)
    assert not rack.engines[0].received


@pytest.mark.parametrize("before", [1, 3])
async def test_running_request_is_answered_before_invalid_bytes(gateway, rack, before):  # [one-reading]
    request = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    answers = (await response_to(gateway, request * before + b"rubbish\r\n\r\n", b"more of it")).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * before + [b"400"]
    assert len(rack.engines[0].received) == before
    assert not rack.engines[0].aborted


async def test_body_of_one_byte_chunks_is_a_body(gateway, rack):  # [body-bounded]
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in BODY)
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert (await response_to(gateway, head + chunks + b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_one_byte_chunks_count_as_bytes(gateway, rack, monkeypatch):  # [body-bounded]
    monkeypatch.setattr("tandem_services.gateway.limits.MAX_BODY_BYTES", 1000)
    answer = await response_to(
        gateway, POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 2000
    )
    check_refusal(answer, 413)


async def test_body_in_very_many_very_small_pieces_is_refused(gateway, rack, monkeypatch):  # [body-bounded]
    monkeypatch.setattr("tandem_services.gateway.http.connection.MAX_BODY_PIECES", 1000)
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert "pieces" in check_refusal(await response_to(gateway, head + b"1\r\n \r\n" * 1001), 400)
    large = b"20\r\n" + b" " * 32 + b"\r\n"
    end = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    assert (await response_to(gateway, head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + large * 1001 + end))[
        :12
    ] == b"HTTP/1.1 200"
    assert len(rack.engines[0].received) == 1


async def test_disconnect_within_a_body_affects_no_other_client(gateway, rack, caplog):  # [client-leaves-aborts]
    async with connection(gateway) as (_, writer):
        writer.write(POST + b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
    assert (await gateway.complete(max_tokens=1)).status_code == 200
    assert len(rack.engines[0].received) == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_half_closed_connection_counts_as_disconnected(gateway, rack):  # [client-leaves-aborts]
    rack.engines[0].behavior.mute = True
    async with connection(gateway) as (reader, writer):
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert await asyncio.to_thread(rack.engines[0].wait_until, lambda: len(rack.engines[0].received) == 1)
        writer.write_eof()
        assert await reader.read() == b""
    assert await asyncio.to_thread(rack.engines[0].wait_until, lambda: bool(rack.engines[0].aborted))


async def test_connections_are_bounded_and_idle_ones_make_room(gateway, monkeypatch):  # [connections-bounded]
    monkeypatch.setattr("tandem_services.gateway.http.connection.MAX_CONNECTIONS", 3)
    async with AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connection(gateway)) for _ in range(6)]
        assert (await response_to(gateway, LAST)).startswith(b"HTTP/1.1 200 ")
        reads = [asyncio.ensure_future(reader.read()) for reader, _ in idle]
        ended, others = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        assert {read.result() for read in ended} == {b""}
        for read in others:
            read.cancel()
    assert (await gateway.http.get("/live")).status_code == 200


async def test_connection_beyond_busy_limit_gets_a_503(gateway, rack, monkeypatch):  # [connections-bounded]
    rack.engines[0].behavior.mute = True
    busy = asyncio.ensure_future(gateway.complete(max_tokens=1))
    await asyncio.to_thread(rack.engines[0].wait_until, lambda: len(rack.engines[0].received) == 1)
    monkeypatch.setattr("tandem_services.gateway.http.connection.MAX_CONNECTIONS", 1)
    answer = await response_to(gateway, LAST)
    assert "at most 1 connections" in check_refusal(answer, 503)
    assert b"retry-after: 1" in answer
    busy.cancel()


async def test_refusal_is_never_written_into_anothers_answer(gateway, rack):  # [one-reading]: smuggling
    rack.engines[0].behavior.mute = True
    async with connection(gateway) as (reader, writer):
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        await asyncio.to_thread(rack.engines[0].wait_until, lambda: len(rack.engines[0].received) == 1)
        writer.write(b"\x00\x01 no request\r\n\r\n")
        # It has been read by the time another connection is answered.
        assert (await gateway.http.get("/live")).status_code == 200
        rack.engines[0].behavior.mute = False
        own, refusal = (await reader.read()).split(b"HTTP/1.1 ")[1:]
    assert own.startswith(b"200 ")
    check_refusal(b"HTTP/1.1 " + refusal, 400)
    assert not rack.engines[0].aborted


# Exceptions


def fail_at(monkeypatch, name: str, *, call: int) -> None:
    """This call of the method raises."""
    calls, method = itertools.count(1), getattr(GatewayConnection, name)

    def failing(self, *given):
        if next(calls) == call:
            raise RuntimeError("planted")
        return method(self, *given)

    monkeypatch.setattr(GatewayConnection, name, failing)


@pytest.mark.parametrize("name", ["on_message_begin", "on_url", "on_headers_complete", "on_body"])
async def test_exception_of_a_parser_callback_is_a_500(gateway, monkeypatch, caplog, name):
    fail_at(monkeypatch, name, call=1)
    answer = await response_to(gateway, POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    assert "The gateway failed" in check_refusal(answer, 500)
    assert "planted" in caplog.text
    assert (await gateway.http.get("/live")).status_code == 200


@pytest.mark.parametrize("name", ["on_url", "on_headers_complete"])
async def test_exception_is_not_written_into_anothers_answer(gateway, rack, monkeypatch, name):
    rack.engines[0].behavior.mute = True
    fail_at(monkeypatch, name, call=2)
    async with connection(gateway) as (reader, writer):
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        await asyncio.to_thread(rack.engines[0].wait_until, lambda: len(rack.engines[0].received) == 1)
        writer.write(LIVE)
        # It has been read by the time another connection is answered.
        assert (await gateway.http.get("/live")).status_code == 200
        rack.engines[0].behavior.mute = False
        own, refusal = (await reader.read()).split(b"HTTP/1.1 ")[1:]
    assert own.startswith(b"200 ")
    check_refusal(b"HTTP/1.1 " + refusal, 500)


# Shutdown


async def test_request_sent_as_shutdown_begins_is_answered(monkeypatch):  # [drain-loses-nothing]
    monkeypatch.setattr("tandem_services.gateway.http.connection.LINGER_S", HEAD_S)
    app = FastAPI(routes=[Route("/live", lambda _: JSONResponse({"status": "ok"}))])
    server = http_server(app, config_of(drain_notice_s=0.0), Health())
    with listen("127.0.0.1", 0) as listener:
        served = SimpleNamespace(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with connection(served) as (reader, writer), connection(served) as (idle, other):
            for each, to in ((reader, writer), (idle, other)):
                to.write(LIVE)
                await each.readuntil(b'"ok"}')
            server.end(signal.SIGTERM)
            await until(lambda: all(each._lingers for each in server.server_state.connections), 20.0, "shutdown began")
            writer.write(LIVE)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert (head.split()[1], body) == (b"200", b'{"status":"ok"}')
            assert b"connection: close" in head
            set_forward(HEAD_S)
            assert await idle.read() == b""
        await serving


# Clients that do not read


def small_buffers(host: str, port: int) -> socket.socket:
    """As `listen`, but connections hold little that has not been read."""
    listener = listen(host, port)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return listener


async def test_client_that_reads_nothing_is_given_up(rack, tokenizer, monkeypatch):  # [slow-reader-bounded]
    monkeypatch.setattr("tandem_testing.gateway_builders.listen", small_buffers)
    monkeypatch.setattr("tandem_services.gateway.http.connection.SEND_STALL_S", 0.2)
    engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS, step_s=0.0005))
    engine.context_length = 1 << 17
    body = {"model": "mock", "prompt": "a", "max_tokens": 100_000, "logprobs": 5, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect((host, int(port)))
            head = b"Content-Length: %d\r\n\r\n" % len(content)
            client.sendall(POST + head + content)

            assert await asyncio.to_thread(engine.wait_until, lambda: bool(engine.aborted))
            # The client that reads metrics has small buffers, too, and may have to wait for a processor.
            monkeypatch.setattr("tandem_services.gateway.http.connection.SEND_STALL_S", 60.0)

            async def has_left() -> bool:
                metrics = (await gateway.http.get("/metrics")).text
                return 'tandem_gateway_client_disconnects_total{model_name="mock"} 1.0' in metrics

            await until(has_left, 30.0, "the client counts as gone")
        assert engine.running == 0
        await until(lambda: gateway.chooser.open == 0, 20.0, "its reservation is given back")
        metrics = (await gateway.http.get("/metrics")).text
        assert 'tandem_gateway_num_requests_running{model_name="mock"} 0.0' in metrics


class Wire(asyncio.Transport):
    """Records calls."""

    unsent = 0
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


async def test_client_that_reads_slowly_is_not():  # [slow-reader-bounded]
    connection = GatewayConnection(uvicorn.Config(lambda: None), ServerState(), {}, asyncio.get_running_loop())
    wire = connection.transport = Wire()
    connection.flow = FlowControl(wire)
    for wire.unsent in (9, 8, 7):
        if connection._stalled is None:
            connection.pause_writing()
        else:
            connection._is_not_read()
        assert not wire.aborted
    connection.resume_writing()
    assert connection._stalled is None
    connection.pause_writing()
    connection._is_not_read()
    assert wire.aborted
