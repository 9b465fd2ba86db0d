"""Weights change on all ranks of an engine or on none."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tandem_engine.base.errors import BusyError, CheckpointError, EngineStoppedError
from tandem_engine.engine.reload import Reloaded, WeightsReload
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import Parallel, SingleRank, TpGroup
from tandem_testing.rank_threads import on_ranks


@dataclass
class Rank:
    """The reload of one rank, with a model that loads when the test lets it."""

    load: Callable[[], None] = lambda: None
    group: TpGroup = field(default_factory=SingleRank)
    may_load: threading.Event = field(default_factory=threading.Event)
    served: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reload = WeightsReload(
            load=self._load,
            replace=self._replace,
            agreement=Agreement(self.group),
            rank=self.group.rank,
            size=self.group.size,
        )

    def _load(self, path: str) -> SimpleNamespace:
        assert self.may_load.wait(30.0)
        self.load()
        return SimpleNamespace(path=path, model_config=SimpleNamespace(fingerprint="f" * 32))

    def _replace(self, loaded: SimpleNamespace) -> int:
        self.served.append(loaded.path)
        return 3

    def end(self) -> None:
        """Turn until the reload has ended."""
        while not self.reload.poll():
            pass


def test_reload_result_has_path_fingerprint_and_ended_count():
    rank = Rank()
    answer = rank.reload.expect()
    rank.reload.start("/new")
    assert not rank.reload.poll()
    assert rank.reload.active
    with pytest.raises(BusyError):
        rank.reload.expect()
    rank.may_load.set()
    rank.end()
    assert answer.result() == Reloaded(path="/new", fingerprint="f" * 32, ended=3)
    assert not rank.reload.active
    rank.reload.close()


def test_reload_error_is_returned_as_checkpoint_error():
    def fail() -> None:
        raise MemoryError("2 GiB")

    rank = Rank(load=fail)
    rank.may_load.set()
    answer = rank.reload.expect()
    rank.reload.start("/new")
    rank.end()
    with pytest.raises(CheckpointError, match="/new cannot be loaded: MemoryError: 2 GiB"):
        answer.result()
    assert not rank.served
    rank.reload.close()


def test_reload_waiter_gets_error_when_engine_closes():
    rank = Rank()
    answer = rank.reload.expect()
    rank.may_load.set()
    rank.reload.close()
    with pytest.raises(EngineStoppedError):
        answer.result()


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_ranks_change_together_or_not_at_all(failing):
    def work(parallel: Parallel) -> tuple[list[str], str, int]:
        def load() -> None:
            if parallel.rank == failing:
                raise CheckpointError("tensor norm holds NaN")

        rank, message, turns = Rank(load=load, group=parallel.schedule), "", 0
        answer = rank.reload.expect() if parallel.rank == 0 else None
        rank.reload.start("/new")
        # Rank 1 takes longer: the other has its weights, or knows that it has none, some turns before.
        for turns in itertools.count(1):
            if turns == (20 if parallel.rank else 1):
                rank.may_load.set()
            if rank.reload.poll():
                break
        if answer is not None and answer.exception() is not None:
            message = str(answer.exception())
        rank.reload.close()
        return rank.served, message, turns

    (served, message, turns), (other_served, _, other_turns) = on_ranks(2, work)
    assert served == other_served == ([] if failing is not None else ["/new"])
    assert turns == other_turns >= 20
    reported = {None: "", 0: "tensor norm holds NaN", 1: "rank 1 cannot load its part of /new"}
    assert message.startswith(reported[failing]) if message else failing is None
