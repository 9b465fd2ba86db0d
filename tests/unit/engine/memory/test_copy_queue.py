from concurrent.futures import Future

import pytest

from tandem_engine.memory.copies import CopyFence, CopyQueue
from tandem_engine.memory.page_copy import CopyKind, CopyReport, PageCopy


class Executor:
    """Copies that end when a test says so."""

    def __init__(self) -> None:
        self.futures: list[Future[CopyReport]] = []

    def __call__(self, copy: PageCopy) -> Future[CopyReport]:
        self.futures.append(Future())
        return self.futures[-1]

    def end(self, index: int, *, pages: int = 1, seconds: float = 0.5) -> None:
        self.futures[index].set_result(CopyReport(pages=pages, seconds=seconds))


@pytest.fixture
def executor():
    return Executor()


@pytest.fixture
def copies(executor):
    return CopyQueue(submit=executor)


def launch(copies, kind=CopyKind.DEVICE_TO_HOST, acked=None) -> int:
    return copies.launch(PageCopy(kind=kind, source=[1], target=[2]), acked)


def test_copies_are_acked_in_order_and_from_poll_alone(copies, executor):
    told = []
    first, second = (launch(copies, acked=lambda name=name: told.append(name)) for name in ("first", "second"))
    executor.end(1)
    assert not copies.poll()
    executor.end(0)
    assert told == []
    assert copies.poll()
    assert told == ["first", "second"]
    assert copies.passed(first)
    assert copies.passed(second)
    assert copies.idle


def test_the_copy_before_the_first_has_passed(copies):
    assert copies.passed(0)
    assert copies.passed(copies.newest_load)


def test_loads_are_remembered_apart(copies):
    launch(copies)
    load = launch(copies, CopyKind.HOST_TO_DEVICE)
    launch(copies)
    assert copies.newest_load == load


def test_a_copy_that_raises_ends_the_loop(copies, executor):
    launch(copies)
    executor.futures[0].set_exception(MemoryError("no more"))
    with pytest.raises(MemoryError):
        copies.poll()


def test_rates_are_measured_per_direction(copies, executor):
    assert copies.pages_per_s(CopyKind.DEVICE_TO_HOST) is None
    launch(copies)
    executor.end(0, pages=10, seconds=0.5)
    copies.poll()
    assert copies.pages_per_s(CopyKind.DEVICE_TO_HOST) == 20.0
    assert copies.pages_per_s(CopyKind.HOST_TO_DEVICE) is None


def test_what_is_fenced_waits_for_the_newest_copy_of_its_time(copies, executor):  # T56
    fence: CopyFence[str] = CopyFence(copies=copies)
    assert not fence.needed
    launch(copies)
    assert fence.needed
    fence.hold(["a", "b"])
    launch(copies)
    fence.hold(["c"])
    executor.end(0)
    copies.poll()
    assert fence.passed() == ["a", "b"]
    assert [*fence] == ["c"]


def test_the_stream_may_have_what_is_fenced_at_once(copies):  # T77
    fence: CopyFence[str] = CopyFence(copies=copies)
    launch(copies)
    fence.hold(["a", "b", "c"])
    assert fence.take(2) == ["a", "b"]
    assert fence.take(2) == ["c"]
    assert len(fence) == 0
