"""A redis-server of our own for one machine: a socket that only this user can open, and nothing written to disk.

It has no port, so no other user of the machine and no page in a browser reaches it, and no password that could be seen.
"""

import asyncio
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING
from urllib.parse import quote

from tandem_services.cli.processes import Child, Supervisor
from tandem_services.common.errors import StartupError
from tandem_services.common.private_folder import private_folder

if TYPE_CHECKING:
    from tandem_services.common.redis_client import RedisAddress

START_TIMEOUT = 10.0
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


def start_redis(supervisor: Supervisor, run_dir: Path) -> str:
    """Start redis-server and return its URL. Raises `StartupError` when it is not installed or does not answer."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise StartupError(
            "redis-server is not installed: run 'apt-get install redis-server', or name a running one with --redis-url"
        )
    from tandem_services.common.redis_client import write_private

    door = _socket_path(run_dir)
    config = run_dir / CONFIG_FILE
    write_private(config, CONFIG.format(socket=_quoted(door), folder=_quoted(run_dir)))
    supervisor.start(Child(name="redis", argv=[binary, str(config)], log=run_dir / "redis.log", outlives_others=True))
    _wait_for_socket(supervisor, door)
    return f"unix://{quote(str(door))}"


def _socket_path(run_dir: Path) -> Path:
    """In the run directory. In another folder of this user where that path is too long for the kernel or somebody
    else's file has the name, which redis-server would remove.
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
        time.sleep(0.02)
    raise StartupError(f"redis-server did not listen on {path} within {START_TIMEOUT:g} s")


def python_command(*args: str) -> list[str]:
    """A `tandem` subcommand as a process of this interpreter."""
    return [sys.executable, "-m", "tandem_services.cli.main", *args]
