"""`tandem serve`, `pull` and `models` as processes of a new user, with a hub on loopback."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem_services.cli.flags import bundled_model
from tandem_testing.hub_server import HubServer, hub_server
from tandem_testing.waiting import wait_for

TOKEN = "hf_canary0123456789"
CLI = (sys.executable, "-m", "tandem_services.cli.main")


class User:
    """One with an empty home, a token and a hub."""

    def __init__(self, home: Path, hub: HubServer) -> None:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "XDG_", "TANDEM_"))}
        self.environment = kept | {"HOME": str(home), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        self.home = home

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`tandem` with these words; what it prints never has the token."""
        result = subprocess.run(
            [*CLI, *words], check=False, env=self.environment | variables, cwd=self.home, capture_output=True, text=True
        )
        assert TOKEN not in result.stdout + result.stderr
        return result

    def refusal(self, *words: str, **variables: str) -> str:
        """The one sentence of a command that ends with status 2 and starts nothing."""
        result = self.run(*words, **variables)
        assert (result.returncode, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert not (self.home / ".local").exists()
        return line.removeprefix("tandem: error: ")


@pytest.fixture
def hub():
    with hub_server() as hub:
        hub.add("org/mini", bundled_model())
        yield hub


@pytest.fixture
def user(tmp_path, hub):
    return User(tmp_path, hub)


def test_absent_model_offline_names_the_way_out(user, hub):
    sentence = user.refusal("serve", "Qwen/Qwen3-0.6B", "--offline")
    assert sentence.startswith("Qwen/Qwen3-0.6B is not in the cache")
    assert "`tandem pull Qwen/Qwen3-0.6B`" in sentence
    assert "HF_HUB_OFFLINE is set" in user.refusal("pull", "Qwen/Qwen3-0.6B", HF_HUB_OFFLINE="1")
    assert hub.requests == []


def test_model_that_cannot_be_fetched_starts_nothing(user, hub):
    hub.add("org/gated", bundled_model()).token = "another"
    assert "org/gated is gated" in user.refusal("serve", "org/gated")
    assert "there is no folder models/foo either" in user.refusal("up", "--model", "models/foo")


def test_gguf_file_starts_nothing(user):
    (user.home / "m.gguf").write_bytes(b"GGUF")
    assert "m.gguf is GGUF" in user.refusal("serve", "m.gguf")


def test_download_ends_by_ctrl_c(user, hub):
    hub.repos["org/mini"].held = threading.Event()
    command = (*CLI, "pull", "org/mini")
    with subprocess.Popen(command, env=user.environment, stderr=subprocess.PIPE, text=True) as pull:
        wait_for(lambda: hub.requests, timeout_s=60)
        pull.send_signal(signal.SIGINT)
        _, errors = pull.communicate()
    assert pull.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.xdist_group("system")
def test_pulled_model_serves_without_a_hub(user, hub):
    """Kernels come from the cache of the other tests: to compile them takes half a minute."""
    pulled = user.run("pull", "org/mini")
    commit = hub.repos["org/mini"].refs["main"]
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith(f"org/mini@{commit} is in {user.home}/.cache/huggingface/hub/")
    assert "org/mini: 8.7 of 8.7 MB downloaded" in pulled.stderr
    assert "\x1b" not in pulled.stderr
    assert {path.rpartition("/")[0] for path in hub.gets} == {f"/org/mini/resolve/{commit}"}
    listed = [request for request in hub.requests if request.startswith("GET /api")]
    assert listed == ["GET /api/models/org/mini/revision/main"]
    assert f"org/mini@{commit[:12]} (main)" in user.run("models").stdout
    hub.requests.clear()
    kernels = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    words = ("serve", "org/mini", "--port", "0", "--exit-when-ready", "--run-dir", "run")
    offline = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": kernels, "HF_HOME": f"{user.home}/.cache/huggingface"}
    served = user.run(*words, **offline)
    assert served.returncode == 0, served.stderr
    assert f"tandem: org/mini@{commit}" in served.stderr
    assert hub.requests == []
    document = json.loads((user.home / "run" / "run.json").read_text())
    assert "both-0.log" in document["files"]
    assert "prefill-0.log" not in document["files"]
