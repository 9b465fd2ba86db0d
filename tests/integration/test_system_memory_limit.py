"""A whole system in a control group with a memory limit, as in a small container."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tandem_engine.base.cgroups import own_groups, read_text
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.system import System
from tandem_testing.waiting import wait_for

LIMIT = 900 << 20
REQUESTS, AT_ONCE = 144, 48
KILLED = "the kernel killed the engine because the memory limit of"

ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
VERSION_2, VERSION_1 = "memory.max", "memory.limit_in_bytes"


class MemoryGroup:
    """A control group below this process's, of either version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limit_file = folder / (VERSION_2 if (folder / VERSION_2).exists() else VERSION_1)

    def limit(self, size: int) -> None:
        self.limit_file.write_text(str(size))

    def without_swap(self) -> None:
        """A group that may swap is slow at its limit instead of killed."""
        for name, most in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
            if (self.folder / name).exists():
                (self.folder / name).write_text(most)

    def processes(self) -> set[int]:
        """Of this group, those of other process namespaces excepted."""
        return {int(pid) for pid in read_text(self.folder / "cgroup.procs").split()} - {0}

    def used(self) -> int:
        name = "memory.current" if self.limit_file.name == VERSION_2 else "memory.usage_in_bytes"
        return int((self.folder / name).read_text())

    def kills(self) -> int:
        name = "memory.events" if self.limit_file.name == VERSION_2 else "memory.oom_control"
        counts = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(counts["oom_kill"])

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


def _home() -> MemoryGroup | None:
    """The group of this process; None where it is not visible, or nothing may be moved into it."""
    for folder in own_groups("memory"):
        home = MemoryGroup(folder)
        if os.getpid() in home.processes():
            try:
                home.enter()
            except OSError:
                return None
            return home
    return None


def _made() -> MemoryGroup | None:
    """None where this user may not make groups, or the memory controller is elsewhere."""
    for root in ROOTS:
        folder = root / f"tandem-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / VERSION_2).exists() or (folder / VERSION_1).exists():
            return MemoryGroup(folder)
        folder.rmdir()
    return None


HOME = _home()
GROUP = None if HOME is None else _made()
if GROUP is not None:
    GROUP.folder.rmdir()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
    pytest.mark.skipif(GROUP is None, reason="NOT CHECKED: no memory control group can be made and left here"),
]


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    made = _made()
    assert made is not None
    made.without_swap()
    try:
        yield made
    finally:
        for pid in made.processes() - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not made.processes(), 60.0)
        made.folder.rmdir()


@pytest.fixture
def system(group, tmp_path) -> Iterator[System]:
    """Its processes inherit the group."""
    assert HOME is not None
    group.limit(LIMIT)
    group.enter()
    try:
        system = System.launch(tmp_path / "run", "--prefill", "0", "--decode", "0", "--both", "1")
    finally:
        HOME.enter()
    try:
        system.wait_until_up()
        yield system
    finally:
        system.close()


async def answered(url: str, count: int, *, patience_s: float = 300.0) -> list[int]:
    """Statuses of requests with logprobs, `AT_ONCE` of them at a time."""
    free = asyncio.Semaphore(AT_ONCE)

    async with httpx.AsyncClient(timeout=patience_s, limits=httpx.Limits(max_connections=AT_ONCE)) as http:

        async def one(index: int) -> int:
            words = f"{index} " + "the fox and the river " * (index % 40)
            body = {"model": "tandem-mini", "prompt": words, "max_tokens": 8 + index % 40, "logprobs": 5}
            async with free:
                try:
                    return (await http.post(f"{url}/v1/completions", json=body)).status_code
                except httpx.HTTPError:
                    return 0

        return await asyncio.gather(*(one(index) for index in range(count)))


def test_small_container_serves_a_crowd_and_names_a_kill_for_memory(system, group):
    assert asyncio.run(answered(system.url, REQUESTS)) == [200] * REQUESTS
    assert group.kills() == 0
    log = system.run_dir / "both-0.log"
    # Less than the next batch takes, so that the kernel has to choose the largest process.
    deadline = time.monotonic() + 150.0
    try:
        while KILLED not in log.read_text() and time.monotonic() < deadline:
            # Version 1 rejects a limit that the use has passed since it was read.
            with contextlib.suppress(OSError):
                group.limit(group.used() + (2 << 20))
            asyncio.run(answered(system.url, AT_ONCE, patience_s=10.0))
    finally:
        group.limit(LIMIT)
    assert KILLED in log.read_text()
