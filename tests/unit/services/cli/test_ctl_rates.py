"""`tandem ctl HOST:PORT rates`: figures into a file, a refusal with its remedy."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tandem_services.cli.main import main

RATES = {"version": 1, "prefill": [{"tokens": 64, "seconds": 0.1}]}
PROGRESS = {"done": 0, "total": 2, "what": "prompt of 64 tokens"}


class Worker(HTTPServer):
    """Gives scripted answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.lines: list[dict] = [PROGRESS, {"rates": RATES}]
        self.bodies: list[dict] = []


class Handler(BaseHTTPRequestHandler):
    server: Worker

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        body = b"".join(json.dumps(line).encode() + b"\n" for line in self.server.lines)
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def worker() -> Iterator[Worker]:
    server = Worker()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ctl(worker: Worker, *flags: str) -> int:
    return main(["ctl", f"127.0.0.1:{worker.server_port}", "rates", *flags])


def test_rates_are_written_to_the_file(worker, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert ctl(worker, "--out", str(out)) == 0
    assert json.loads(out.read_text()) == RATES
    assert worker.bodies == [{"force": False}]
    assert capsys.readouterr().out == ""


def test_rates_without_a_file_are_printed(worker, capsys):
    assert ctl(worker, "--force") == 0
    assert json.loads(capsys.readouterr().out) == RATES
    assert worker.bodies == [{"force": True}]


def test_refusal_of_a_busy_worker_names_the_flag(worker, tmp_path, capsys):
    worker.status, worker.lines = 409, [{"code": "busy", "message": "3 requests run here"}]
    assert ctl(worker, "--out", str(tmp_path / "r.json")) == 1
    assert "3 requests run here; --force measures all the same" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("lines", "error_message"),
    [([PROGRESS, {"error": "the engine was silent"}], "the engine was silent"), ([PROGRESS], "without figures")],
)
def test_measurement_that_ends_early_writes_nothing(worker, tmp_path, capsys, lines, error_message):
    worker.lines = lines
    assert ctl(worker, "--out", str(tmp_path / "r.json")) == 1
    assert error_message in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_missing_folder_is_reported_before_worker_call(worker, tmp_path, capsys):
    assert ctl(worker, "--out", str(tmp_path / "none" / "r.json")) != 0
    assert "does not exist" in capsys.readouterr().err
    assert worker.bodies == []
