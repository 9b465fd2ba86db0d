import signal
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.engine.watchdog import Watchdog, describe_scheduler
from tandem_testing.scheduler_builders import make_engine, make_message


@pytest.fixture
def watchdog(tmp_path):
    dog = Watchdog(timeout=1000.0, folder=tmp_path / "dumps", name="w@1", describe=lambda: "queues and pages")
    yield dog
    dog.close()


def test_hung_step_is_written_down_with_state_and_stacks(watchdog):
    watchdog.step_hangs(120.0)
    text = watchdog.path.read_text()
    assert "120 s" in text
    assert "queues and pages" in text
    assert "test_hung_step_is_written_down_with_state_and_stacks" in text


def test_timer_runs_until_it_is_closed(watchdog, tmp_path):
    watchdog.progressed()
    watchdog.progressed()
    watchdog.close()
    assert not watchdog.path.exists(), "a dump that nobody needed leaves no file"
    # A timer that is left behind would end the process: the handler is gone.
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_watchdog_timer_restarted_often_starts_no_thread(watchdog):
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    for _ in range(100):
        watchdog.progressed()
    after = {task.name for task in Path("/proc/self/task").iterdir()}
    assert not after - before, "a machine that is out of threads must not end the engine"
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0.0


def test_watchdog_closed_does_not_start_its_timer(watchdog):
    watchdog.close()
    watchdog.progressed()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_stalled_scheduler_stack_is_written_by_watchdog(tmp_path):
    dog = Watchdog(timeout=0.01, folder=tmp_path, name="w@2", describe=lambda: "")
    dog.progressed()
    while dog.path.stat().st_size == 0:
        pass
    dog.close()
    assert "test_stalled_scheduler_stack_is_written_by_watchdog" in dog.path.read_text()
    assert dog.path.exists()


def test_folder_that_cannot_be_written_is_named_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--crash-dump-folder .*file"):
        Watchdog(timeout=1.0, folder=tmp_path / "file" / "sub", name="w", describe=lambda: "")


def test_state_names_every_request_and_the_pages():
    engine = make_engine(enable_overlap=True, max_running_requests=1)
    for rid in ("first", "second"):
        engine.add(make_message(rid, [1, 2, 3], max_tokens=9))
    engine.step(2)
    text = describe_scheduler(engine.scheduler)
    assert "running: 1\n  first: 3 prompt" in text
    assert "waiting: 1\n  second: 3 prompt" in text
    assert "1 steps in flight" in text
    assert "64 free" not in text
