"""A redis-server of our own for one machine: loopback, a free port, nothing written to disk."""

import asyncio
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_engine.addresses import LOOPBACK, Address
from tandem_services.cli.processes import Child, Supervisor
from tandem_services.common.errors import StartupError
from tandem_services.common.ports import free_port

if TYPE_CHECKING:
    from tandem_services.common.redis_client import RedisAddress

START_TIMEOUT = 10.0


def start_redis(supervisor: Supervisor, run_dir: Path) -> str:
    """Start redis-server and return its URL. Raises `StartupError` when it is not installed or does not answer."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise StartupError(
            "redis-server is not installed: run 'apt-get install redis-server', or name a running one with --redis-url"
        )
    port = free_port()
    argv = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    argv += [
        "--dir",
        str(run_dir),
        "--daemonize",
        "no",
        "--maxmemory",
        "256mb",
        "--maxmemory-policy",
        "volatile-ttl",
    ]
    supervisor.start(Child(name="redis", argv=argv, log=run_dir / "redis.log", outlives_others=True))
    _wait_for_port(supervisor, port)
    return Address(LOOPBACK, port).url("/0", scheme="redis")


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


def _wait_for_port(supervisor: Supervisor, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        supervisor.require_alive()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise StartupError(f"redis-server did not listen on port {port} within {START_TIMEOUT:g} s")


def python_command(*args: str) -> list[str]:
    """A `tandem` subcommand as a process of this interpreter."""
    return [sys.executable, "-m", "tandem_services.cli.main", *args]
