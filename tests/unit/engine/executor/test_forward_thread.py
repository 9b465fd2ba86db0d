import threading
from concurrent.futures import CancelledError, Future

import pytest
import torch

from tandem_engine.executor import forward_thread
from tandem_engine.executor.forward_thread import ForwardThread, InlineExecutor, Task
from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.memory.page_copies import CopyKind, CopyReport, PageCopy
from tandem_testing.forward_builders import Seq, make_batch

TIMEOUT = 60.0


def batch(step: int) -> ForwardBatch:
    return make_batch([Seq(seq_len=1, pages=[1])], step=step)


def echo(batch: ForwardBatch) -> ForwardResult:
    return ForwardResult(step=batch.step, next_token_ids=(int(torch.is_inference_mode_enabled()),))


@pytest.fixture(params=[ForwardThread, InlineExecutor])
def start(request):
    """Start an executor around a forward; it is shut down at the end."""
    started = []

    def start(forward):
        started.append(request.param(forward))
        return started[-1]

    yield start
    for executor in started:
        executor.shutdown()


def test_batches_run_in_launch_order_under_inference_mode(start):
    executor = start(echo)
    futures = [executor.launch(batch(step)) for step in range(20)]
    assert [future.result(TIMEOUT).step for future in futures] == list(range(20))
    assert futures[0].result().next_token_ids == (1,)
    assert not torch.is_inference_mode_enabled()


def test_failed_forward_fails_its_future_and_next_one_runs(start):
    def fail_first(batch: ForwardBatch) -> ForwardResult:
        if batch.step == 0:
            raise ValueError("step 0 is broken")
        return echo(batch)

    executor = start(fail_first)
    failed, fine = executor.launch(batch(0)), executor.launch(batch(1))
    with pytest.raises(ValueError, match="step 0 is broken"):
        failed.result(TIMEOUT)
    assert fine.result(TIMEOUT).step == 1


def test_shutdown_may_be_repeated(start):
    executor = start(echo)
    executor.launch(batch(0)).result(TIMEOUT)
    executor.shutdown()
    executor.shutdown()


class Gate:
    """A forward that waits until it is let through."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.thread = ""

    def __call__(self, batch: ForwardBatch) -> ForwardResult:
        self.thread = threading.current_thread().name
        self.entered.set()
        assert self.open.wait(TIMEOUT)
        return echo(batch)


def test_launch_does_not_wait_for_the_forward():
    gate = Gate()
    executor = ForwardThread(gate)
    futures: list[Future[ForwardResult]] = [executor.launch(batch(step)) for step in range(2)]
    assert gate.entered.wait(TIMEOUT)
    assert not any(future.done() for future in futures)
    gate.open.set()
    executor.shutdown()
    assert [future.result(0).step for future in futures] == [0, 1]
    assert gate.thread.startswith("forward")


def test_nothing_is_launched_after_shutdown():
    executor = ForwardThread(echo)
    executor.shutdown()
    with pytest.raises(RuntimeError):
        executor.launch(batch(0))


def test_abandoning_a_hung_forward_drops_queued_tasks():
    gate = Gate()
    executor = ForwardThread(gate)
    hung, queued = executor.launch(batch(0)), executor.launch(batch(1))
    assert gate.entered.wait(TIMEOUT)
    executor.abandon()
    assert queued.cancelled()
    with pytest.raises(RuntimeError):
        executor.launch(batch(2))
    gate.open.set()
    assert hung.result(TIMEOUT).step == 0
    executor.shutdown()


def test_system_exit_in_forward_is_reported_and_thread_continues():
    def leave(batch: ForwardBatch) -> ForwardResult:
        if batch.step == 0:
            raise SystemExit(3)
        return echo(batch)

    executor = ForwardThread(leave)
    left, fine = executor.launch(batch(0)), executor.launch(batch(1))
    assert isinstance(left.exception(TIMEOUT), SystemExit)
    assert fine.result(TIMEOUT).step == 1
    executor.shutdown()


@pytest.mark.parametrize("make", [ForwardThread, InlineExecutor])
def test_copies_run_in_launch_order_with_batches(make):
    order = []

    def forward(batch: ForwardBatch) -> ForwardResult:
        order.append(f"batch {batch.step}")
        return echo(batch)

    def copier(copy: PageCopy) -> CopyReport:
        order.append(f"copy {copy.source[0]}")
        return CopyReport(pages=1, seconds=0.0)

    executor = make(forward, copier=copier)
    for number in range(3):
        executor.copy(PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=[number], target=[9]))
        executor.launch(batch(number))
    executor.shutdown()
    assert order == ["copy 0", "batch 0", "copy 1", "batch 1", "copy 2", "batch 2"]


@pytest.mark.parametrize("make", [ForwardThread, InlineExecutor])
def test_failed_copy_fails_its_future_and_next_step_runs(make):
    executor = make(echo)
    failed = executor.copy(PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=[1], target=[1]))
    with pytest.raises(AssertionError, match="has no copier"):
        failed.result(TIMEOUT)
    assert executor.launch(batch(0)).result(TIMEOUT).step == 0
    executor.shutdown()


def test_step_outcomes_do_not_wait_for_a_forward_thread_that_failed(monkeypatch):
    reached, go = threading.Event(), threading.Event()

    def fail(self: Task) -> None:
        reached.set()
        go.wait(TIMEOUT)
        raise MemoryError

    monkeypatch.setattr(Task, "run", fail)
    executor = ForwardThread(echo)
    first = executor.launch(batch(0))
    assert reached.wait(TIMEOUT)
    queued = executor.launch(batch(1))
    go.set()
    assert isinstance(first.exception(TIMEOUT), MemoryError)
    with pytest.raises(CancelledError):
        queued.result(TIMEOUT)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.launch(batch(2))


def test_forward_thread_that_failed_to_start_takes_no_batch(monkeypatch):
    def fail(cpus: object) -> None:
        raise OSError

    monkeypatch.setattr(forward_thread, "bind_thread", fail)
    executor = ForwardThread(echo)
    with pytest.raises((RuntimeError, CancelledError)):
        executor.launch(batch(0)).result(TIMEOUT)
    executor.shutdown()
