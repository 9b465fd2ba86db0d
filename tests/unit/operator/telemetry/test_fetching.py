"""Asking pods over real sockets: what they say, and what those say that misbehave."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tandem_operator.telemetry import pods as fetching
from tandem_operator.telemetry.exposition import Exposition
from tandem_operator.telemetry.pod_metrics import GatewayFigures, WorkerFigures
from tandem_operator.telemetry.pods import fetch_figures, pod_client
from tandem_operator.telemetry.samples import LoadReader
from tandem_testing.exported_metrics import exposition_of, gateway_metrics, worker_metrics
from tandem_testing.pod_builders import pod


class Responder(ThreadingHTTPServer):
    """Answers every GET with `body`, or never while `hangs` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.body = 200, b""
        self.hangs: threading.Event | None = None

    @property
    def ports(self) -> dict[str, int]:
        return {"health": self.server_port, "admin": self.server_port}


class Handler(BaseHTTPRequestHandler):
    server: Responder

    def do_GET(self) -> None:
        if self.server.hangs is not None:
            self.server.hangs.wait(30)
            return
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("location", "http://127.0.0.1:1/")
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    monkeypatch.setattr(fetching, "ANSWER_S", 60.0)


@pytest.fixture
def responder() -> Iterator[Responder]:
    server = Responder()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    if server.hangs is not None:
        server.hangs.set()
    server.shutdown()
    server.server_close()


async def fetched(responder, role="decode"):
    one = pod("x", role, ip="127.0.0.1", ports=responder.ports)
    async with pod_client() as client:
        return (await fetch_figures(client, [one]))["x"]


async def test_worker_metrics_are_read(responder):
    responder.body = exposition_of(worker_metrics())
    figures = await fetched(responder)
    assert isinstance(figures, WorkerFigures)
    assert figures.places == 8


async def test_gateway_metrics_are_read(responder):
    responder.body = exposition_of(gateway_metrics())
    assert isinstance(await fetched(responder, "gateway"), GatewayFigures)


async def test_exposition_of_another_service_lacks_metrics(responder):
    responder.body = exposition_of(gateway_metrics())
    assert "it has no metric tandem_worker_" in await fetched(responder)


@pytest.mark.parametrize(
    ("status", "body", "error_message"),
    [
        (503, b"", "status 503"),
        (302, b"", "status 302"),
        (200, b"\xff\xfe", "not UTF-8"),
        (200, b"tandem_worker_role{", "cannot be read"),
        (200, b"x" * (fetching.MAX_BYTES + 1), "more than 4 MiB"),
    ],
)
async def test_malformed_exposition_is_reported(responder, status, body, error_message):
    responder.status, responder.body = status, body
    assert error_message in await fetched(responder)


async def test_pod_that_hangs_is_given_up_and_the_others_are_read(responder, monkeypatch):
    responder.hangs = threading.Event()
    other = Responder()
    other.body = exposition_of(worker_metrics())
    threading.Thread(target=other.serve_forever, args=(0.05,), daemon=True).start()
    pods = [pod("hangs", ip="127.0.0.1", ports=responder.ports), pod("well", ip="127.0.0.1", ports=other.ports)]
    loop = asyncio.get_running_loop()
    now, read = loop.time, WorkerFigures.of

    def read_and_wait(exposition: Exposition) -> WorkerFigures:
        """From then on it is much later."""
        monkeypatch.setattr(loop, "time", lambda: now() + fetching.ANSWER_S)
        return read(exposition)

    monkeypatch.setattr(WorkerFigures, "of", read_and_wait)
    try:
        # The client has limits of its own, which are longer here.
        async with httpx.AsyncClient(trust_env=False, timeout=2 * fetching.ANSWER_S) as client:
            answers = await fetch_figures(client, pods)
    finally:
        await asyncio.to_thread(other.shutdown)
        other.server_close()
    assert "does not answer within" in answers["hangs"]
    assert isinstance(answers["well"], WorkerFigures)


async def test_refused_connection_is_reported(responder):
    gone = pod("x", ip="127.0.0.1", ports={"health": 1})
    async with pod_client() as client:
        assert "cannot be reached" in (await fetch_figures(client, [gone]))["x"]


async def test_pods_without_an_address_are_not_polled():
    async with pod_client() as client:
        assert await fetch_figures(client, [pod("x", ip="")]) == {}


async def test_two_samples_give_a_load(responder):
    worker_port, gateway = responder, Responder()
    worker_port.body, gateway.body = exposition_of(worker_metrics()), exposition_of(gateway_metrics())
    threading.Thread(target=gateway.serve_forever, args=(0.05,), daemon=True).start()
    now = iter((100.0, 105.0))
    pods = [
        pod("d0", ip="127.0.0.1", ports=worker_port.ports),
        pod("g0", "gateway", ip="127.0.0.1", ports=gateway.ports, revision=""),
    ]
    try:
        async with pod_client() as client:
            reader = LoadReader(client=client, now=lambda: next(now))
            assert (await reader.read(pods)).load is None
            seen = await reader.read(pods)
    finally:
        await asyncio.to_thread(gateway.shutdown)
        gateway.server_close()
    assert seen.load is not None
    assert (seen.load.at, seen.load.decode.waiting, seen.load.decode.arrived_per_s) == (105.0, 2, 0.0)
