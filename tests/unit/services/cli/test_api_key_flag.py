"""The key that `tandem chat` and `tandem bench serve` send, and where it is visible."""

import subprocess
import sys
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.flags import hide_argument, key_headers
from tandem_testing.system import tandem_command

SECRET = "tdm-not-for-everybody"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("TANDEM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def headers(flag: str | None = None) -> dict[str, str]:
    return key_headers(Namespace(api_key=flag))


def test_flag_wins_over_the_environment(monkeypatch):
    assert headers() == {}
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert headers() == {"Authorization": "Bearer theirs"}
    monkeypatch.setenv("TANDEM_API_KEY", "ours")
    assert headers() == {"Authorization": "Bearer ours"}
    assert headers("flag") == {"Authorization": "Bearer flag"}


@pytest.mark.parametrize("key", ["a b", "a\r\nX: y", "ä", "x" * 513])
def test_key_that_cannot_be_sent_is_refused_without_being_shown(key):
    with pytest.raises(ConfigError, match="visible ASCII") as caught:
        headers(key)
    assert key not in str(caught.value)


class _Once(BaseHTTPRequestHandler):
    """Holds the first request until the test has looked at the command."""

    asked = threading.Event()
    answer = threading.Event()
    sent: str | None = None

    def do_GET(self) -> None:
        type(self).sent = self.headers["Authorization"]
        self.asked.set()
        self.answer.wait(30)
        self.send_error(401, "no")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no /proc")
@pytest.mark.parametrize(
    ("command", "form"),
    [(["chat"], ["--api-key", SECRET]), (["bench", "serve", "--json"], [f"--api-key={SECRET}"])],
    ids=["chat", "bench"],
)
def test_api_key_is_sent_but_hidden_in_process_list_and_output(command, form):
    handler = type("Handler", (_Once,), {"asked": threading.Event(), "answer": threading.Event()})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        argv = tandem_command(*command, "--url", f"http://127.0.0.1:{server.server_port}", *form)
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert handler.asked.wait(60)
            title = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            handler.answer.set()
            output, _ = process.communicate(timeout=60)
        finally:
            handler.answer.set()
            process.kill()
            process.wait()
            serving.join(30)
    assert handler.sent == f"Bearer {SECRET}"
    assert SECRET.encode() not in title
    assert b"--api-key" in title
    assert SECRET not in output


def test_hiding_absent_argument_changes_nothing():
    before = Path("/proc/self/cmdline").read_bytes() if sys.platform.startswith("linux") else b""
    hide_argument("nowhere-to-be-found")
    if before:
        assert Path("/proc/self/cmdline").read_bytes() == before
