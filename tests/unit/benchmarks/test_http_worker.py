"""The HTTP side of the mock workers that other gateways are measured with."""

import importlib

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable


@pytest.fixture(scope="module")
def http_worker():
    pytest.importorskip("uvloop")
    with benchmarks_importable():
        yield importlib.import_module("http_worker")


class Connection:
    """What a protocol writes to, and whether it hung up."""

    def __init__(self):
        self.written = b""
        self.closed = False

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True


def connected(http_worker):
    worker, connection = http_worker.WorkerConnection(0.0), Connection()
    worker.connection_made(connection)
    return worker, connection


def test_request_is_answered_for_any_split_of_bytes(http_worker):
    worker, connection = connected(http_worker)
    for byte in b"GET /v1/models?x=1 HTTP/1.1\r\nhost: a\r\n\r\n":
        assert connection.written == b""
        worker.data_received(bytes([byte]))
    assert connection.written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"mock"' in connection.written


def test_requests_follow_one_another_on_a_connection(http_worker):
    chunked = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    sized = b"POST /b HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi"
    path, body, rest = http_worker.read_request(chunked + sized)
    assert (path, body) == ("/a", b"abcde")
    assert http_worker.read_request(rest) == ("/b", b"hi", b"")


def test_mock_worker_closes_http2_connections(http_worker):
    worker, connection = connected(http_worker)
    worker.data_received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    assert connection.closed
    assert connection.written == b""


def test_data_without_request_line_is_no_request(http_worker):
    with pytest.raises(http_worker.NotHttpError):
        http_worker.read_request(b"SM\r\n\r\n")
