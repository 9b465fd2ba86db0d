"""What Tandem connects to: Redis, NIXL, the port of the API, the model hub's cache."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_engine.base.addresses import Address
from tandem_engine.base.errors import ConfigError
from tandem_services.cli.doctor.finding import LIMIT_S, Check, Finding, Machine, fail, ok, warn
from tandem_services.cli.redis_process import server_program, server_version
from tandem_services.common.errors import StartupError
from tandem_services.common.sockets import listen

if TYPE_CHECKING:
    from tandem_services.common.redis_client import RedisAddress

LOOPBACK_MODULE = "tandem_engine.disaggregation.nixl.loopback"
LOOPBACK_LIMIT_S = 30.0
"""Its process imports torch, which takes two seconds on an idle machine."""


def checks(machine: Machine, *, host: str, port: int, redis: "RedisAddress | None") -> Iterator[Check]:
    yield Check(name="redis", probe=redis_program if redis is None else partial(redis_server, redis))
    yield Check(name="nixl", probe=nixl_loopback, limit_s=LOOPBACK_LIMIT_S + LIMIT_S)
    yield Check(name="port", probe=partial(api_port, host, port))
    yield Check(name="hub cache", probe=partial(hub_cache, machine))
    yield Check(name="hub token", probe=partial(hub_token, machine))


def redis_program(find: Callable[[], str] = server_program) -> Finding:
    """The one that `tandem up` would start."""
    try:
        path = find()
    except StartupError as error:
        fact, _, fix = str(error).partition("; ")
        return fail(fact, fix)
    return ok(f"{path} {server_version(path)}")


def redis_server(address: "RedisAddress") -> Finding:
    """The one that the user names: answers, and has functions."""
    from tandem_services.common.redis_client import FunctionMissingError, RedisClient, RedisUnavailableError

    async def ask() -> None:
        client = RedisClient(address, timeout_s=LIMIT_S)
        try:
            # A user with the documented rights may call functions, and not list them.
            with contextlib.suppress(FunctionMissingError):
                await client.command("FCALL", "tandem_doctor", 0)
        finally:
            await client.close()

    try:
        asyncio.run(ask())
    except (RedisUnavailableError, ConfigError) as error:
        return fail(
            str(error), "start Redis 7 or later there, or correct --redis-url; without it `tandem up` starts one"
        )
    return ok("Redis answers and has functions")


def nixl_loopback(command: tuple[str, ...] = (sys.executable, "-m", LOOPBACK_MODULE)) -> Finding:
    """Moves a page between two agents, in a process of its own."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOOPBACK_LIMIT_S)
    except subprocess.TimeoutExpired:
        return warn(f"no transfer within {LOOPBACK_LIMIT_S:g} s", "try again when the machine is idle; check UCX_TLS")
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
    if done.returncode != 0:
        return fail(f"NIXL moves no memory: {last}", "pip install nixl, check UCX_TLS, or serve with --transport none")
    return ok(done.stdout.strip())


def api_port(host: str, port: int) -> Finding:
    try:
        listen(host, port).close()
    except StartupError as error:
        return fail(str(error), "--port 0 picks a free one; `tandem ps` lists what runs")
    return ok(f"{Address(host, port)} is free")


def hub_folder(machine: Machine) -> Path:
    """As huggingface_hub finds its own folder, with tokens and, below, the cache."""
    cache = machine.variables.get("XDG_CACHE_HOME") or str(Path(machine.variables.get("HOME", "/")) / ".cache")
    return Path(machine.variables.get("HF_HOME") or Path(cache) / "huggingface")


def hub_cache(machine: Machine) -> Finding:
    folder = Path(machine.variables.get("HF_HUB_CACHE") or hub_folder(machine) / "hub")
    there = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return warn(f"{folder}: this user may not write to {there}", "HF_HOME=DIR with a folder of this user")
    models = len([*folder.glob("models--*")])
    offline = ", offline" if machine.variables.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    return ok(f"{models} models in {folder}{offline}")


def hub_token(machine: Machine) -> Finding:
    """Whether there is one, never what it is."""
    if machine.variables.get("HF_TOKEN"):
        return ok("a token in HF_TOKEN")
    file = Path(machine.variables.get("HF_TOKEN_PATH") or hub_folder(machine) / "token")
    if not file.exists():
        return ok("no token; models that are open to all need none")
    if file.stat().st_mode & 0o077:
        return warn(f"other users may read {file}", f"chmod 600 {file}")
    return ok(f"a token in {file}")
