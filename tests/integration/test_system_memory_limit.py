"""A whole system in a control group with a memory limit, as in a small container."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

import httpx
import pytest

from tandem_testing.control_groups import ControlGroup, can_limit, new_group, system_within
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.system import System

LIMIT = 900 << 20
REQUESTS, AT_ONCE = 144, 48
KILLED = "the kernel killed the engine because the memory limit of"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
    pytest.mark.skipif(not can_limit("memory"), reason="NOT CHECKED: no memory control group can be made here"),
]


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    with new_group("memory") as group:
        yield group


@pytest.fixture
def system(group, tmp_path) -> Iterator[System]:
    group.limit(LIMIT)
    with system_within(group, tmp_path / "run") as system:
        yield system


async def answered(url: str, count: int, *, timeout_s: float = 300.0) -> list[int]:
    """Statuses of requests with logprobs, `AT_ONCE` of them at a time."""
    free = asyncio.Semaphore(AT_ONCE)

    async with httpx.AsyncClient(timeout=timeout_s, limits=httpx.Limits(max_connections=AT_ONCE)) as http:

        async def one(index: int) -> int:
            words = f"{index} " + "the fox and the river " * (index % 40)
            body = {"model": "tandem-mini", "prompt": words, "max_tokens": 8 + index % 40, "logprobs": 5}
            async with free:
                try:
                    return (await http.post(f"{url}/v1/completions", json=body)).status_code
                except httpx.HTTPError:
                    return 0

        return await asyncio.gather(*(one(index) for index in range(count)))


def test_small_container_serves_load_and_logs_oom_kill(system, group):
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
            asyncio.run(answered(system.url, AT_ONCE, timeout_s=10.0))
    finally:
        group.limit(LIMIT)
    assert KILLED in log.read_text()
