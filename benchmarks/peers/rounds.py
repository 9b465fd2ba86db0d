"""A B A B …: each round plays a workload on every engine in turn, so that a noisy machine disturbs all alike.

Engines that are not being timed are paused. One that has had its share of seconds for a workload takes no part in
further rounds: the slowest peers would take most of the time and gain nothing from more of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from peers.engines.base import Engine
from peers.machine import Watch, wait_until_idle
from peers.processes import PeerError
from peers.time_limit import Deadline
from peers.workloads import Workload


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one round of one workload."""

    engine: str
    model: str
    dtype: str
    workload: str
    round: int
    figures: dict[str, float]
    own: float
    """Share of all cores that the engine used."""
    others: float
    """The same of processes that have nothing to do with this figure."""
    idle: bool
    """Whether the machine was idle before."""
    equal: float | None = None
    """Share of jobs whose tokens equal those of the first engine of the round; None where one of them tells none."""
    stage: str = ""


OnSample = Callable[[Sample], None]
Failed = Callable[[str, PeerError], None]


@dataclass(kw_only=True)
class Rounds:
    """Rounds of one comparison on open engines."""

    engines: list[Engine]
    """Those that still play."""
    model: str
    dtype: str
    budget_s: float
    """Of an engine in one workload."""
    deadline: Deadline
    on_sample: OnSample
    failed: Failed
    """Called with an engine that cannot continue."""
    _spent: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def play(self, workloads: Sequence[Workload], numbers: Iterable[int]) -> bool:
        """One round of every workload after the other, so that time that runs out takes rounds and not workloads.

        Returns whether all rounds could be begun.
        """
        return all(self._round(workload, number) for number in numbers for workload in workloads)

    def _round(self, workload: Workload, number: int) -> bool:
        first: tuple[tuple[int, ...], ...] = ()
        for engine in [each for each in self.engines if self._spent[each.name, workload.name] < self.budget_s]:
            if self.deadline.passed:
                return False
            try:
                sample, outputs, seconds = _play(engine, workload, number, model=self.model, dtype=self.dtype)
            except PeerError as error:
                self.failed(engine.name, error)
                # What it still computes would be measured with the others.
                engine.close()
                self.engines.remove(engine)
                continue
            self._spent[engine.name, workload.name] += seconds
            first = first or outputs
            self.on_sample(msgspec.structs.replace(sample, equal=share_equal(first, outputs)))
        return True


def _play(
    engine: Engine, workload: Workload, number: int, *, model: str, dtype: str
) -> tuple[Sample, tuple[tuple[int, ...], ...], float]:
    idle = wait_until_idle()
    engine.resume()
    with Watch(engine.pids) as watch:
        played = workload.play(engine.run, number)
    engine.pause()
    sample = Sample(
        engine=engine.name,
        model=model,
        dtype=dtype,
        workload=workload.name,
        round=number,
        figures=played.figures,
        own=watch.own,
        others=watch.others,
        idle=idle,
    )
    return sample, played.outputs, watch.seconds


def share_equal(first: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> float | None:
    """Of jobs with the same tokens on both sides; None without tokens to compare."""
    if not first or not outputs:
        return None
    return sum(a == b for a, b in zip(first, outputs, strict=True)) / len(first)
