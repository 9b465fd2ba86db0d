"""Threads are taken before there is work for them, and a limit is a sentence at start."""

import asyncio
import threading
from pathlib import Path

import pytest

from tandem_engine.base import thread_pools
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.thread_pools import require_threads, start_background_threads, started_pool


@pytest.fixture
def three_threads(monkeypatch):
    """No more than three threads start."""
    started = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_pool_needs_no_thread_for_its_work(three_threads):
    pool = started_pool(3, name="p")
    meeting = threading.Barrier(3, timeout=60.0)
    # All three run at once.
    for future in [pool.submit(meeting.wait) for _ in range(3)]:
        future.result(60.0)
    pool.shutdown()


def test_pool_beyond_the_limit_is_refused_by_name(three_threads, monkeypatch):
    monkeypatch.setattr(thread_pools, "describe_process_limit", lambda: "this container runs 9 of 9")
    with pytest.raises(ConfigError, match=r"cannot start 4 threads \(p\): this container runs 9 of 9"):
        started_pool(4, name="p")


def test_event_loop_needs_no_further_thread_for_files_and_names(three_threads, monkeypatch):
    monkeypatch.setattr(thread_pools, "BACKGROUND_THREADS", 2)
    monkeypatch.setattr(thread_pools, "NATIVE_THREADS", 1)

    async def work() -> int:
        await start_background_threads()
        return await asyncio.to_thread(sum, (1, 2))

    runner = asyncio.Runner()
    try:
        assert runner.run(work()) == 3
    finally:
        # Closing a runner needs a thread.
        pytest.MonkeyPatch.undo(monkeypatch)
        runner.close()


@pytest.mark.parametrize(("limit", "fits"), [(None, True), ((30, 60), True), ((31, 60), False)])
def test_start_is_refused_where_threads_would_be_short(monkeypatch, limit, fits):
    monkeypatch.setattr(thread_pools, "process_limit", lambda: limit)
    if fits:
        require_threads(30)
        return
    with pytest.raises(ConfigError, match=r"31 of at most 60 .* up to 30: raise the limit"):
        require_threads(30)


ROOT = Path(__file__).parents[3]
BEFORE_READY = {
    "engine/tandem_engine/base/thread_pools.py",
    # Starts its threads with the test step that precedes "ready".
    "engine/tandem_engine/kernels/cpu/threads.py",
    # Of a command that ends.
    "services/tandem_services/cli/k8s/pods.py",
}


def test_product_has_no_pool_that_starts_threads_for_requests():
    sources = [file for package in ("engine", "services") for file in (ROOT / package).rglob("*.py")]
    assert len(sources) > 400
    lazy = {str(file.relative_to(ROOT)) for file in sources if "ThreadPoolExecutor(" in file.read_text()}
    assert lazy == BEFORE_READY
