"""Connections to pods over the API server's WebSockets, against a server that forwards to real ports."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tandem_services.cli.k8s.cluster import access_of, pod_client, port_number
from tandem_testing.forwarding_api_server import SILENT, ForwardingApiServer
from tandem_testing.kubernetes_objects import pod
from tandem_testing.waiting import wait_for

WORKER = pod("w", role="decode")
BIG = bytes(range(256)) * 8192


class PodServer(BaseHTTPRequestHandler):
    """What runs in the pod."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/broken":
            self.send_response(200)
            self.send_header("content-length", "100")
            self.end_headers()
            self.wfile.write(b"less")
            self.close_connection = True
            return
        body = {"/big": BIG, "/from": self.client_address[0].encode()}.get(self.path, b"hello")
        self._say(body)

    def do_POST(self):
        self._say(self.rfile.read(int(self.headers["content-length"])))

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), PodServer)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def connect(tmp_path, port):
    @contextmanager
    def connect(target: int = port, **state):
        with ForwardingApiServer(ports={("w", 9090): target}, **state) as api:
            access = access_of(api.kubeconfig(tmp_path), None, None)
            with pod_client(access, WORKER, "health") as client:
                yield api, client

    return connect


def test_requests_of_any_size_go_both_ways_over_one_connection(connect):
    with connect() as (api, client):
        assert client.get("/").text == "hello"
        assert client.get("/big").content == BIG
        assert client.post("/", content=BIG).content == BIG
        assert client.get("/from").text == "127.0.0.1"
        assert api.open == 1
        client.close()
        wait_for(lambda: api.open == 0, 20.0, lambda: "the connection is still open")


def test_answers_can_be_read_piece_by_piece(connect):
    with connect() as (_, client), client.stream("GET", "/big") as response:
        pieces = list(response.iter_raw())
    assert len(pieces) > 1
    assert b"".join(pieces) == BIG


def test_kubelet_error_is_reported(connect):
    error_message = "the kubelet reports: connection refused: 9090"
    with (
        connect(error_message="connection refused: 9090") as (_, client),
        pytest.raises(httpx.ReadError, match=error_message),
    ):
        client.get("/")


@pytest.mark.parametrize(
    ("status", "error_message"), [(403, "grant `get` and `create` on `pods/portforward`"), (404, "refuses.*404")]
)
def test_refused_port_forward_names_missing_permission(connect, status, error_message):
    with connect(refusal=status) as (_, client), pytest.raises(httpx.ConnectError, match=error_message):
        client.get("/")


def test_forward_to_silent_pod_times_out(connect):
    with connect(SILENT) as (api, client):
        with pytest.raises(httpx.ReadTimeout):
            client.get("/", timeout=httpx.Timeout(60.0, read=0.2))
        wait_for(lambda: api.open == 0, 20.0, lambda: "the connection is still open")


def test_answer_that_breaks_off_is_no_answer(connect):
    with connect() as (_, client), pytest.raises(httpx.RemoteProtocolError):
        client.get("/broken")


def test_missing_api_server_is_a_connection_error(tmp_path, port):
    with ForwardingApiServer() as api:
        access = access_of(api.kubeconfig(tmp_path), None, None)
    with pod_client(access, WORKER, "health") as client, pytest.raises(httpx.ConnectError):
        client.get("/")


def test_ports_are_found_by_name():
    assert port_number(WORKER, "health") == 9090
    with pytest.raises(LookupError, match="pod w has no port 'admin'"):
        port_number(WORKER, "admin")
