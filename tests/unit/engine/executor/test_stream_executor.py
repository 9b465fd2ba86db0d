"""Futures that look at the device themselves, and pages that are copied beside steps."""

import pytest
import torch

from tandem_engine.executor.cuda.streams import (
    SHORT_RUN,
    PageStreams,
    Queued,
    StreamExecutor,
    StreamFuture,
    StreamName,
    are_short,
    runs_of,
)
from tandem_engine.forward.batch import ForwardResult
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.page_copies import CopyKind, PageCopy
from tandem_engine.memory.state_pool import StatePool, StateSpec
from tandem_testing.forward_builders import Seq, make_batch, make_pool
from tandem_testing.simulated_device import SimulatedStreams

BATCH = make_batch([Seq(seq_len=2, decode=True, pages=[3], row=1, input_ids=[5])])


class Step:
    """Arrives when the test says so."""

    def __init__(self) -> None:
        self.there = False
        self.finished = 0
        self.error: Exception | None = None

    def arrived(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.there

    def finish(self) -> ForwardResult:
        self.finished += 1
        return ForwardResult(step=7, next_token_ids=(1,))

    @property
    def queued(self) -> Queued[ForwardResult]:
        return Queued(self.arrived, self.finish)


def test_stream_future_is_done_on_arrival_and_finishes_once():
    step, seen = Step(), []
    future = StreamFuture(step.queued)
    future.add_done_callback(lambda done: seen.append(done.result().step))
    assert not future.done()
    step.there = True
    assert future.done()
    assert (step.finished, seen) == (0, [])
    assert future.exception() is None
    assert (future.result().step, future.result().step, step.finished, seen) == (7, 7, 1, [7])


def test_waiting_for_a_step_ends_after_the_time_given():
    future = StreamFuture(Step().queued)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0.0)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    assert not future.done()


def test_device_error_is_delivered_by_the_future():
    step = Step()
    future = StreamFuture(step.queued)
    step.error = torch.AcceleratorError("an illegal memory access was encountered")
    assert future.done()
    assert future.exception() is step.error


def test_read_error_is_delivered_by_the_future():
    def broken(_: ForwardResult) -> ForwardResult:
        raise ValueError("no")

    step = Step()
    step.there = True
    future = StreamFuture(step.queued.then(broken))
    assert isinstance(future.exception(), ValueError)


def executor(enqueue) -> StreamExecutor:
    return StreamExecutor(enqueue, copier=lambda _: pytest.fail("no copies"), streams=SimulatedStreams())


def test_launch_error_is_delivered_and_executor_continues():
    step = Step()
    step.there = True
    answers = iter([RuntimeError("no"), step.queued])

    def enqueue(_: object) -> Queued[ForwardResult]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    runs = executor(enqueue)
    assert isinstance(runs.launch(BATCH).exception(), RuntimeError)
    assert runs.launch(BATCH).result().step == 7


def test_nothing_is_launched_after_shutdown():
    runs = executor(lambda _: Step().queued)
    runs.shutdown()
    runs.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        runs.launch(BATCH)


def batch_on(*pages: int):
    return make_batch([Seq(seq_len=2, decode=True, pages=pages, row=1, input_ids=[5])])


@torch.inference_mode()
def test_step_waits_for_copies_of_its_own_pages_alone(monkeypatch):
    streams, pool = SimulatedStreams(looks=1000), make_pool()
    host = HostPool(num_pages=4, page_bytes=pool.page_bytes)
    streams.adopt(pool.data, shared=True)
    memory = streams.know(host.data)
    memory.pinned = memory.shared = True
    waits = []
    monkeypatch.setattr(streams, "wait", lambda stream, event: waits.append((stream, event)))
    pages = PageStreams(streams, pool, host)
    pages.enqueue(PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=[7, 9], target=[0, 1]))
    assert [stream for stream, _ in waits] == [StreamName.PAGES]
    pages.before(batch_on(3, 4))
    assert len(waits) == 1
    pages.before(batch_on(3, 9))
    assert [stream for stream, _ in waits[1:]] == [StreamName.FORWARD]


@pytest.mark.parametrize(
    ("source", "target", "runs"),
    [
        ([], [], []),
        ([5], [2], [(5, 2, 1)]),
        ([5, 6, 7], [1, 2, 3], [(5, 1, 3)]),
        ([5, 6, 7], [1, 2, 4], [(5, 1, 2), (7, 4, 1)]),
        ([5, 7, 8, 9], [1, 2, 3, 4], [(5, 1, 1), (7, 2, 3)]),
        ([6, 5], [2, 1], [(6, 2, 1), (5, 1, 1)]),
    ],
)
def test_pages_that_follow_each_other_on_both_sides_are_one_copy(source, target, runs):
    assert [*runs_of(PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=source, target=target))] == runs


@pytest.mark.parametrize(
    ("runs", "page_bytes", "short"),
    [
        ([], 16, False),
        ([(1, 0, 1)], 16, False),
        ([(1, 0, 1), (3, 1, 1)], SHORT_RUN - 1, True),
        ([(1, 0, 1), (3, 1, 1)], SHORT_RUN, False),
        ([(1, 0, 3), (5, 3, 1)], SHORT_RUN // 2, False),
        ([(1, 0, 2), (5, 3, 1)], SHORT_RUN // 2, True),
    ],
)
def test_runs_are_short_when_they_are_so_on_average_and_several(runs, page_bytes, short):
    assert are_short(runs, page_bytes=page_bytes) is short


@torch.inference_mode()
def test_runs_of_pages_arrive_whole():
    streams, pool = SimulatedStreams(), make_pool()
    host = HostPool(num_pages=6, page_bytes=pool.page_bytes)
    streams.adopt(pool.data, shared=True)
    memory = streams.know(host.data)
    memory.pinned = memory.shared = True
    pages, before = PageStreams(streams, pool, host), pool.data.clone()
    for kind, source, target in (
        (CopyKind.DEVICE_TO_HOST, [7, 8, 9, 12], [1, 2, 3, 4]),
        (CopyKind.HOST_TO_DEVICE, [1, 2, 3, 4], [20, 21, 24, 25]),
    ):
        StreamFuture(pages.enqueue(PageCopy(kind=kind, source=source, target=target))).result()
    assert torch.equal(pool.data[[20, 21, 24, 25]], before[[7, 8, 9, 12]])


@torch.inference_mode()
def test_pages_go_to_the_host_and_come_back_elsewhere():
    streams, pool = SimulatedStreams(), make_pool()
    host = HostPool(num_pages=4, page_bytes=pool.page_bytes)
    streams.adopt(pool.data, shared=True)
    memory = streams.know(host.data)
    memory.pinned = memory.shared = True
    pages = PageStreams(streams, pool, host)
    before = pool.data.clone()
    copies = [
        PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=[7, 9], target=[2, 0]),
        PageCopy(kind=CopyKind.HOST_TO_DEVICE, source=[2, 0], target=[20, 21]),
    ]
    reports = [StreamFuture(pages.enqueue(copy)).result() for copy in copies]
    assert [report.pages for report in reports] == [2, 2]
    assert all(report.seconds > 0 for report in reports)
    for target, source in ((20, 7), (21, 9)):
        assert torch.equal(pool.data[target], before[source])


def pages_and_states(streams: SimulatedStreams) -> tuple[PageStreams, StatePool]:
    pool = make_pool()
    states = StatePool(StateSpec(**STATE, dtype=torch.float32), rows=3, device="cpu")
    states.bytes_view().random_(0, 256)
    host = HostPool(num_pages=4, page_bytes=pool.page_bytes)
    for data in (pool.data, states.bytes_view()):
        streams.adopt(data, shared=True)
    memory = streams.know(host.data)
    memory.pinned = memory.shared = True
    return PageStreams(streams, pool, host, states), states


STATE = {"layers": 1, "history": 1, "channels": 4, "heads": 1, "key_size": 4, "value_size": 4}


@torch.inference_mode()
def test_step_waits_for_the_copy_of_its_own_state_alone(monkeypatch):
    streams = SimulatedStreams(looks=1000)
    pages, _ = pages_and_states(streams)
    waits = []
    monkeypatch.setattr(streams, "wait", lambda stream, _: waits.append(stream))
    pages.enqueue(PageCopy(kind=CopyKind.STATE_TO_HOST, source=[2], target=[0]))
    pages.before(make_batch([Seq(seq_len=2, decode=True, pages=(2,), row=1, input_ids=[5])]))
    assert waits == [StreamName.PAGES]
    pages.before(make_batch([Seq(seq_len=2, decode=True, pages=(3,), row=2, input_ids=[5])]))
    assert waits == [StreamName.PAGES, StreamName.FORWARD]


@torch.inference_mode()
def test_states_go_to_the_host_and_come_back_elsewhere():
    pages, states = pages_and_states(SimulatedStreams())
    before = states.bytes_view().clone()
    for kind, source, target in ((CopyKind.STATE_TO_HOST, [2], [3]), (CopyKind.HOST_TO_STATE, [3], [1])):
        assert StreamFuture(pages.enqueue(PageCopy(kind=kind, source=source, target=target))).result().pages == 1
    assert torch.equal(states.bytes_view()[1], before[2])
