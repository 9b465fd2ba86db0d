"""A whole system in a control group with a memory limit, as in a small container."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.system import System
from tandem_testing.waiting import wait_for

LIMIT = 700 << 20
REQUESTS, AT_ONCE = 192, 64
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

    def used(self) -> int:
        name = "memory.current" if self.limit_file.name == VERSION_2 else "memory.usage_in_bytes"
        return int((self.folder / name).read_text())

    def kills(self) -> int:
        name = "memory.events" if self.limit_file.name == VERSION_2 else "memory.oom_control"
        counts = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(counts["oom_kill"])

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


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


GROUP = _made()
if GROUP is not None:
    GROUP.folder.rmdir()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
    pytest.mark.skipif(GROUP is None, reason="NOT CHECKED: no memory control group can be made here"),
]


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    made = _made()
    assert made is not None
    yield made
    wait_for(lambda: not (made.folder / "cgroup.procs").read_text(), 60.0)
    made.folder.rmdir()


@pytest.fixture
def system(group, tmp_path) -> Iterator[System]:
    """Its processes inherit the group."""
    group.limit(LIMIT)
    home = MemoryGroup(group.folder.parent)
    group.enter()
    try:
        system = System.launch(tmp_path / "run", "--prefill", "0", "--decode", "0", "--both", "1")
    finally:
        home.enter()
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
    deadline = time.monotonic() + 60.0
    while KILLED not in log.read_text() and time.monotonic() < deadline:
        group.limit(group.used() + (2 << 20))
        asyncio.run(answered(system.url, AT_ONCE, patience_s=10.0))
    assert KILLED in log.read_text()
    group.limit(LIMIT)
