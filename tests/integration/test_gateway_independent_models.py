"""A gateway process with `--independent-models`: models come and go, and usage of keys is counted at its home."""

import contextlib
import json
import subprocess
from pathlib import Path

import httpx
import pytest
import redis

from tandem_services.common.sockets import free_port
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.model_files import replace_file
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.system import tandem_command
from tandem_testing.tokenizer_builders import write_tokenizer
from tandem_testing.waiting import wait_for

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PATIENCE_S = 120.0


def names(url: str) -> list[str]:
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.get(f"{url}/v1/models", headers=bearer("a"), timeout=PATIENCE_S)
        return [card["id"] for card in answer.json()["data"]]
    return ["nothing answers"]


def usage_keys(server: RedisServer) -> set[str]:
    """Fleets that have counted the usage of a key."""
    with redis.Redis.from_url(server.url) as client:
        return {key.decode() for key in client.scan_iter("*usage*")}


def test_models_are_added_and_removed_with_separate_usage(server: RedisServer, tmp_path: Path):
    server.wipe()
    model, file, port = write_tokenizer(tmp_path), tmp_path / "models.json", free_port()
    url = f"http://127.0.0.1:{port}"

    def write(*clusters: str) -> None:
        entries = [{"model": str(model), "served_model_name": one, "cluster": one} for one in clusters]
        replace_file(file, json.dumps({"models": entries}))

    write()
    keys = write_keys(tmp_path, a={"requests_per_minute": 100})
    command = tandem_command(
        *("gateway", "--models", str(file), "--independent-models", "--port", str(port), "--api-keys", str(keys)),
        *("--redis-url", server.url, "--cluster", "home"),
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    explain = (tmp_path / "log").read_text
    try:
        wait_for(lambda: names(url) == [], PATIENCE_S, explain)
        assert httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200
        for clusters in (("one",), ("two", "one"), ("two",)):
            write(*clusters)
            wait_for(lambda clusters=clusters: names(url) == [*clusters], PATIENCE_S, explain)
        body = {"model": "two", "prompt": "hi"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=bearer("a"), timeout=PATIENCE_S)
        assert answer.status_code == 503, "no worker"
        used = usage_keys(server)
        assert used
        assert all("home" in key for key in used)
        process.terminate()
        assert process.wait(60) == 0
        assert "Traceback" not in explain()
    finally:
        process.kill()
        process.communicate()
