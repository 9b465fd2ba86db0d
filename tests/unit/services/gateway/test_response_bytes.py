"""Head and body in one write are the bytes that uvicorn writes for the same messages."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tandem_services.gateway.http.response_bytes import ResponseBytes


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Response:
    """One cycle of uvicorn with a transport that only keeps what is written."""

    def __init__(self, *, method: str = "POST", keep_alive: bool = True) -> None:
        self.transport, self.completed = Transport(), 0
        self.flow = FlowControl(self.transport)
        self.cycle: Any = RequestResponseCycle(
            scope={"type": "http", "method": method},  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=None,  # type: ignore[arg-type]
            access_logger=None,  # type: ignore[arg-type]
            access_log=False,
            default_headers=[(b"date", b"now")],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keep_alive,
            on_response=self.complete,
        )

    def complete(self) -> None:
        self.completed += 1

    @property
    def outcome(self) -> tuple[object, ...]:
        cycle = self.cycle
        state = (cycle.response_started, cycle.response_complete, cycle.chunked_encoding, cycle.keep_alive)
        return (b"".join(self.transport.writes), self.transport.closed, self.completed, *state)


async def by_uvicorn(response: Response, status: int, headers: Any, parts: list[bytes]) -> None:
    await response.cycle.send({"type": "http.response.start", "status": status, "headers": headers})
    for number, part in enumerate(parts, 1):
        await response.cycle.send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})


async def at_once(response: Response, status: int, headers: Any, parts: list[bytes]) -> None:
    first, *rest = parts
    assert ResponseBytes(response.cycle).begin(status, headers, first, more=bool(rest))
    for number, part in enumerate(rest, 1):
        await response.cycle.send({"type": "http.response.body", "body": part, "more_body": number < len(rest)})


@given(
    status=st.sampled_from([200, 400, 429, 503]),
    parts=st.lists(st.binary(max_size=8), min_size=1, max_size=3),
    length=st.booleans(),
    closing=st.booleans(),
    keep_alive=st.booleans(),
)
def test_bytes_and_state_are_those_of_uvicorn(status, parts, length, closing, keep_alive):
    headers = [(b"content-type", b"text/plain"), (b"x-request-id", b"a")]
    if length:
        headers.append((b"content-length", str(sum(map(len, parts))).encode()))
    if closing:
        headers.append((b"connection", b"close"))
    outcomes = []
    for write in (by_uvicorn, at_once):
        response = Response(keep_alive=keep_alive)
        asyncio.run(write(response, status, headers, [*parts] if not length else [b"".join(parts)]))
        outcomes.append(response.outcome)
    assert outcomes[0] == outcomes[1]


def test_whole_response_is_one_write():
    response = Response()
    assert ResponseBytes(response.cycle).begin(200, [(b"content-length", b"2")], b"{}", more=False)
    assert len(response.transport.writes) == 1


def test_head_of_a_stream_leaves_with_its_first_event():
    response = Response()
    writer = ResponseBytes(response.cycle)
    assert writer.begin(200, [], b"first", more=True)
    assert writer.is_ready()
    writer.write(b"second")
    assert [part.partition(b"\r\n\r\n")[2] for part in response.transport.writes[:1]] == [b"5\r\nfirst\r\n"]
    assert response.transport.writes[1:] == [b"6\r\nsecond\r\n"]


def paused(response: Response) -> None:
    response.flow.pause_writing()


def gone(response: Response) -> None:
    response.cycle.disconnected = True


def closing(response: Response) -> None:
    response.transport.close()


def begun(response: Response) -> None:
    response.cycle.response_started = True


@pytest.mark.parametrize("happen", [paused, gone, closing, begun])
def test_nothing_is_written_when_only_uvicorn_can(happen):
    response = Response()
    happen(response)
    assert not ResponseBytes(response.cycle).begin(200, [], b"x", more=False)
    assert not response.transport.writes


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("POST", 204), ("POST", 304)])
def test_answer_without_a_body_is_left_to_uvicorn(method, status):
    response = Response(method=method)
    assert not ResponseBytes(response.cycle).begin(status, [], b"", more=False)


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nb", b"a\x00"], ids=["CRLF", "LF", "NUL"])
def test_value_that_would_end_its_header_is_refused(value):
    response = Response()
    with pytest.raises(ValueError, match="control characters"):
        ResponseBytes(response.cycle).begin(200, [(b"x-request-id", value)], b"", more=False)
    assert not response.transport.writes
    assert not response.cycle.response_started
