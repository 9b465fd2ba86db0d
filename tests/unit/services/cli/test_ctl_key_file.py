"""`tandem ctl --curve-keys`: orders to workers of other machines bring the deployment's token."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tandem_engine.ipc.keys import KeyPair
from tandem_services.cli.main import main
from tandem_services.common.tokens import order_token


class Worker(HTTPServer):
    """Takes any order and keeps what it was brought."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.brought: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    server: Worker

    def do_POST(self) -> None:
        self.server.brought.append(self.headers.get("authorization"))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def worker() -> Iterator[Worker]:
    server = Worker()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_order_is_sent_with_token_of_key_file(worker, tmp_path):
    keys = KeyPair.generate()
    keys.save(tmp_path / "keys.json")
    address = f"127.0.0.1:{worker.server_port}"
    assert main(["ctl", address, "drain"]) == 0
    assert main(["ctl", "--curve-keys", str(tmp_path / "keys.json"), address, "drain"]) == 0
    assert worker.brought == [None, f"Bearer {order_token(keys)}"]


def test_file_that_is_none_is_named(worker, tmp_path, capsys):
    assert main(["ctl", "--curve-keys", str(tmp_path / "none"), f"127.0.0.1:{worker.server_port}", "drain"]) != 0
    assert "--curve-keys" in capsys.readouterr().err
    assert worker.brought == []
