"""The Redis of one machine: a server of our own, or the one that the user names.

Ours is redis-server or valkey-server of PATH, else valkey-server of the distribution `tandem-llm-valkey`. It has a
socket that only this user can open, and writes nothing to disk. It has no port, so no other user of the machine and no
page in a browser reaches it, and no password that could be seen.
"""

import asyncio
import importlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING
from urllib.parse import quote

from tandem_engine.base.release import install_hint
from tandem_services.cli.processes import POLL_SECONDS, Child, Supervisor
from tandem_services.common.errors import StartupError
from tandem_services.common.private_folder import private_folder, write_private

if TYPE_CHECKING:
    from tandem_services.common.redis_client import RedisAddress

START_TIMEOUT = 120.0
"""It takes milliseconds; on a machine that is overloaded, seconds."""

MIN_VERSION = 7
"""The first with FUNCTION. Valkey continues the numbers of Redis, from 7.2 on."""

PROGRAMS = ("redis-server", "valkey-server")
BUNDLED_PACKAGE = "tandem_llm_valkey"
"""Of the distribution; it has `server_path()` and the program."""

SOCKET_FILE, CONFIG_FILE = "redis.sock", "redis.conf"

MAX_SOCKET_BYTES = 100
"""Of a path; Linux takes 107."""

CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 600
dir {folder}
daemonize no
save ""
appendonly no
maxmemory 256mb
maxmemory-policy volatile-ttl
"""

_VERSION = re.compile(rb"\bserver v=(\d+(?:\.\d+)*)")
"""In what `--version` prints: `Redis server v=7.0.15 sha=…`."""


def start_redis(supervisor: Supervisor, run_dir: Path) -> str:
    """Start a server and return its URL. Raises `StartupError` when none is installed or it does not answer."""
    program = server_program()
    door = _socket_path(run_dir)
    config = run_dir / CONFIG_FILE
    write_private(config, CONFIG.format(socket=_quoted(door), folder=_quoted(run_dir)))
    supervisor.start(Child(name="redis", argv=[program, str(config)], log=run_dir / "redis.log", outlives_others=True))
    _wait_for_socket(supervisor, door)
    return f"unix://{quote(str(door))}"


def server_program() -> str:
    """Path of the first server that is new enough. Raises `StartupError` with the commands that install one."""
    unusable = []
    for path in _servers():
        version = server_version(path)
        if version is not None and int(version.partition(".")[0]) >= MIN_VERSION:
            return path
        unusable.append(f"{path} is of version {version}" if version else f"{path} does not print its version")
    found = ", ".join(unusable) or f"neither {' nor '.join(PROGRAMS)} is installed"
    raise StartupError(
        f"{found}; Tandem needs Redis or Valkey of version {MIN_VERSION} or later: run 'apt-get install redis-server' "
        f"or {install_hint('valkey')}, or name a running one with --redis-url"
    )


def _servers() -> Iterator[str]:
    """Paths, the user's own first."""
    for name in PROGRAMS:
        path = shutil.which(name)
        if path is not None:
            yield path
    bundled = bundled_server()
    if bundled is not None:
        yield bundled


def bundled_server() -> str | None:
    """Path of the one in `tandem-llm-valkey`; None where that is not installed."""
    try:
        package = importlib.import_module(BUNDLED_PACKAGE)
    except ModuleNotFoundError:
        return None
    return str(package.server_path())


def server_version(path: str) -> str | None:
    """Such as `7.0.15`; None for a program that cannot run here, or prints none."""
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, check=False, timeout=START_TIMEOUT).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(printed)
    return None if found is None else found[1].decode()


def _socket_path(run_dir: Path) -> Path:
    """In the run directory. In another folder of this user where that path is too long for the kernel, or where a file
    of another program has the name, which redis-server would remove.
    """
    path = run_dir / SOCKET_FILE
    if len(os.fsencode(path)) <= MAX_SOCKET_BYTES and (path.is_socket() or not os.path.lexists(path)):
        return path
    try:
        return private_folder("redis") / f"{token_hex(8)}.sock"
    except OSError as error:
        raise StartupError(f"no folder for the socket of Redis: {error}; choose a shorter --run-dir") from error


def _quoted(path: Path) -> str:
    """As the configuration of Redis takes it."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def require_redis(address: "RedisAddress") -> None:
    """Raise `StartupError` when the Redis that the user named does not answer, `ConfigError` when it is no URL."""
    from tandem_services.common.redis_client import BACKGROUND_TIMEOUT_S, RedisClient, RedisUnavailableError

    async def ask() -> None:
        redis = RedisClient(address, timeout_s=BACKGROUND_TIMEOUT_S)
        try:
            await redis.require(wait_s=0.0)
        finally:
            await redis.close()

    try:
        asyncio.run(ask())
    except RedisUnavailableError as error:
        raise StartupError(str(error)) from error


def _wait_for_socket(supervisor: Supervisor, path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        supervisor.require_alive()
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(POLL_SECONDS)
    raise StartupError(f"the Redis server did not listen on {path} within {START_TIMEOUT:g} s")
