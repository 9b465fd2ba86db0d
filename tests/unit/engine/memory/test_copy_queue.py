from concurrent.futures import Future

import pytest

from tandem_engine.memory.page_copies import CopyFence, CopyKind, CopyQueue, CopyReport, PageCopy
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import Parallel
from tandem_testing.rank_threads import on_ranks


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
    reported = []
    first, second = (launch(copies, acked=lambda name=name: reported.append(name)) for name in ("first", "second"))
    executor.end(1)
    assert not copies.poll()
    executor.end(0)
    assert reported == []
    assert copies.poll()
    assert reported == ["first", "second"]
    assert copies.passed(first)
    assert copies.passed(second)
    assert copies.idle


def test_copy_before_the_first_has_passed(copies):
    assert copies.passed(0)
    assert copies.passed(copies.newest_load)


@pytest.mark.parametrize("kind", [CopyKind.HOST_TO_DEVICE, CopyKind.HOST_TO_STATE])
def test_loads_are_remembered_apart(copies, kind):
    launch(copies)
    load = launch(copies, kind)
    launch(copies)
    assert copies.newest_load == load


def test_copy_that_raises_ends_the_loop(copies, executor):
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


def test_fence_waits_for_the_newest_earlier_copy(copies, executor):  # [copy-acked]
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


def test_stream_takes_fenced_pages_at_once(copies):  # [page-fence]
    fence: CopyFence[str] = CopyFence(copies=copies)
    launch(copies)
    fence.hold(["a", "b", "c"])
    assert fence.take(2) == ["a", "b"]
    assert fence.take(2) == ["c"]
    assert len(fence) == 0


def test_copy_is_acked_after_all_ranks_at_slowest_rate():  # [copy-acked]
    def work(parallel: Parallel) -> list[tuple[int, float | None]]:
        executor = Executor()
        copies = CopyQueue(submit=executor, least=Agreement(parallel.schedule).least)
        copies.poll()  # nothing is on its way on any rank, so no rank is queried
        for _ in range(3):
            launch(copies)
        seen = []
        # What ends between two polls: on rank 0, and on rank 1.
        for mine, theirs in (((0, 1), ()), ((), (0,)), ((2,), ()), ((), (1, 2))):
            for index in theirs if parallel.rank else mine:
                executor.end(index, seconds=0.5 if parallel.rank else 0.1)
            copies.poll()
            seen.append((copies.acked, copies.pages_per_s(CopyKind.DEVICE_TO_HOST)))
        assert copies.idle
        return seen

    first, second = on_ranks(2, work)
    assert first == second
    assert [acked for acked, _ in first] == [0, 1, 1, 3]
    assert [rate for _, rate in first] == [None, *[pytest.approx(2.0)] * 3]
