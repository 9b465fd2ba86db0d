"""`tandem ctl HOST:PORT adapters`: of a worker, of a gateway, and of what is neither."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tandem_services.cli.main import main

WORKER = {"adapters": [], "memory": {"limit": 2, "resident": [], "failed": []}}


class Handler(BaseHTTPRequestHandler):
    server: "Server"

    def do_GET(self) -> None:
        found = self.path in self.server.answers
        body = json.dumps(self.server.answers[self.path]).encode() if found else b"Not Found"
        self.send_response(200 if found else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, object] = {}

    def adapters(self) -> int:
        return main(["ctl", f"127.0.0.1:{self.server_port}", "adapters"])


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("path", "answer"), [("/adapters", WORKER), ("/v1/adapters", {"data": []})])
def test_adapters_of_workers_and_gateways_are_printed(server, capsys, path, answer):
    server.answers[path] = answer
    assert server.adapters() == 0
    assert capsys.readouterr().out == "no adapters\n"


def test_process_without_the_list_is_answered_with_a_fix(server, capsys):
    assert server.adapters() == 3
    error = capsys.readouterr().err
    assert "HTTP 404" in error
    assert "--health-port" in error
    assert "--admin-port" in error


def listed(name: str, **facts: object) -> dict[str, object]:
    """An adapter of a gateway's page."""
    shown = {"name": name, "digest": "0" * 32, "rank": 4, "requested": True, "registered": True}
    return {**shown, "workers": ["w1"], "num_workers": 1, "failed": {}, "num_failed": 0, **facts}


def test_all_pages_of_a_gateway_are_printed(server, capsys):
    server.answers["/v1/adapters"] = {"data": [listed("law", num_workers=3)], "has_more": True, "last_id": "m:law@0"}
    second = listed("sql", failed={"w1": "no folder"}, num_failed=2)
    server.answers["/v1/adapters?after=m%3Alaw%400"] = {"data": [second], "has_more": False, "last_id": "m:sql@0"}
    assert server.adapters() == 0
    law, sql = capsys.readouterr().out.splitlines()[-2:]
    assert law.endswith("w1, 2 more")
    assert sql.endswith("w1: no folder; 1 more")
