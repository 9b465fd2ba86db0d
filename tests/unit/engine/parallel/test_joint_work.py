"""Joint work over real gloo: what raises on one rank raises on all, and the ranks continue."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tandem_engine.base.errors import OtherRankFailedError, RankLostError
from tandem_engine.parallel import torch_group
from tandem_engine.parallel.group import FirstFailure, JointWork, Parallel, SingleRank
from tandem_testing.rank_threads import on_ranks


def joint(parallel: Parallel) -> JointWork:
    return JointWork(group=parallel.forward, failure=parallel.failure)


def total(parallel: Parallel) -> int:
    return int(parallel.forward.all_reduce(torch.ones(1, dtype=torch.int64)))


@pytest.mark.parametrize("collectives_before", [0, 1, 3])
@pytest.mark.parametrize("failing_ranks", [(0,), (2,), (0, 1, 2)])
def test_joint_work_error_raises_on_all_ranks_and_ranks_continue(failing_ranks, collectives_before):
    def work(parallel: Parallel) -> list[str | int]:
        def faulty() -> int:
            for count in range(3):
                if count == collectives_before and parallel.rank in failing_ranks:
                    raise ValueError("a bad token")
                total(parallel)
            # Also after its last collective a step can fail on one rank.
            if collectives_before == 3 and parallel.rank in failing_ranks:
                raise ValueError("a bad token")
            return 0

        together, outcomes = joint(parallel), []
        for step in (lambda: total(parallel), faulty, faulty, lambda: total(parallel)):
            try:
                outcomes.append(together.run(step))
            except (ValueError, OtherRankFailedError) as error:
                outcomes.append(type(error).__name__)
        parallel.failure.raise_if_any()
        return outcomes

    for rank, outcomes in enumerate(on_ranks(3, work)):
        error = "ValueError" if rank in failing_ranks else "OtherRankFailedError"
        assert outcomes == [3, error, error, 3]


def test_rank_that_does_not_come_back_is_lost(monkeypatch):
    passed = threading.Event()

    def monotonic() -> float:
        """Once the ranks have met, an hour passes between two looks."""
        return 3600.0 * next(hours) if passed.is_set() else time.monotonic()

    hours = itertools.count()
    monkeypatch.setattr(torch_group, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))

    def work(parallel: Parallel) -> None:
        together = joint(parallel)
        with pytest.raises((ValueError, OtherRankFailedError)):
            together.run(lambda: int("x") if parallel.rank else total(parallel))
        if parallel.rank == 0:
            passed.set()
            with pytest.raises(RankLostError, match="did not meet the others within 300 s"):
                together.run(lambda: total(parallel))
            assert parallel.failure.error is not None

    on_ranks(2, work, timeout_s=300.0)


def test_known_end_of_a_rank_cuts_the_wait_for_it_short():
    def work(parallel: Parallel) -> None:
        together = joint(parallel)
        with pytest.raises((ValueError, OtherRankFailedError)):
            together.run(lambda: int("x") if parallel.rank else total(parallel))
        if parallel.rank == 0:
            parallel.failure.record(RankLostError("rank 1 was ended by signal 9"))
            with pytest.raises(RankLostError, match="signal 9"):
                together.run(lambda: total(parallel))

    on_ranks(2, work, timeout_s=300.0)


class NoMeeting(SingleRank):
    """Two ranks by a backend that cannot free one that waits for another."""

    size = 2
    can_meet_again = False


def test_fault_ends_engine_if_other_ranks_cannot_be_freed():
    failure = FirstFailure()
    with pytest.raises(ZeroDivisionError):
        JointWork(group=NoMeeting(size=2), failure=failure).run(lambda: 1 / 0)
    with pytest.raises(RankLostError, match="a model step raised ZeroDivisionError"):
        failure.raise_if_any()


def test_rank_that_is_alone_just_works():
    assert JointWork(group=SingleRank(), failure=FirstFailure()).run(lambda: 7) == 7
