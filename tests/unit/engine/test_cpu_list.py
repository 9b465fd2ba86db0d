"""CPU lists, and threads that stay on the cores of one."""

import os
import threading

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import allowed_cpus, bind_thread, can_bind, format_cpus, parse_cpus
from tandem_engine.config import EngineConfig
from tandem_engine.executor.forward_thread import ForwardThread

needs_affinity = pytest.mark.skipif(not can_bind(), reason="this system keeps no threads on cores")


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("5,2-4,3", (2, 3, 4, 5)), ("7-7", (7,))]
)
def test_lists_are_read_as_linux_writes_them(text, cpus):
    assert parse_cpus(text) == cpus
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "1,,2", "0-999999", "²", "1 2"])
def test_invalid_cpu_list_is_rejected(text):
    with pytest.raises(ValueError, match="ends before it begins|no number of a CPU"):
        parse_cpus(text)


@needs_affinity
def test_forward_thread_affinity_leaves_other_threads_unchanged():
    before, one = allowed_cpus(), min(allowed_cpus())
    executor = ForwardThread(lambda batch: batch, threads=1, cpus=(one,))
    try:
        assert executor.run(lambda: os.sched_getaffinity(0)) == {one}
        inherited = executor.run(lambda: started_by_this_thread(lambda: os.sched_getaffinity(0)))
        assert inherited == {one}, "a team stays where the thread is that started it"
    finally:
        executor.shutdown()
    assert allowed_cpus() == before


def started_by_this_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@needs_affinity
def test_thread_without_cores_of_its_own_is_left_alone():
    before = allowed_cpus()
    bind_thread(())
    assert allowed_cpus() == before


def test_threads_that_have_too_few_cores_are_refused():
    EngineConfig(model_path="m", threads=2, cpus=(0, 1))
    with pytest.raises(ConfigError, match="--cpu-affinity names 1 cores for --threads 2"):
        EngineConfig(model_path="m", threads=2, cpus=(0,))
