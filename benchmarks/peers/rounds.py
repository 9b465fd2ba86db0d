"""A B A B …: each round plays a workload on every engine in turn, so that a noisy machine disturbs all alike.

Engines that are not being timed are paused. One that has had its share of seconds for a workload takes no part in
further rounds: the slowest peers would take most of the time and gain nothing from more of it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from peers.engines.base import Engine
from peers.machine import Watch, wait_until_idle
from peers.processes import PeerError
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


Told = Callable[[Sample], None]
Failed = Callable[[str, PeerError], None]


def play_rounds(
    engines: Sequence[Engine],
    workload: Workload,
    *,
    model: str,
    dtype: str,
    numbers: Sequence[int],
    budget_s: float,
    told: Told,
    failed: Failed,
) -> set[str]:
    """Play the rounds with these numbers. `told` hears of each sample, `failed` of an engine that cannot go on, whose
    name is among those returned."""
    out: set[str] = set()
    spent: dict[str, float] = defaultdict(float)
    for number in numbers:
        first: tuple[tuple[int, ...], ...] = ()
        for engine in engines:
            if engine.name in out or spent[engine.name] >= budget_s:
                continue
            try:
                sample, outputs, seconds = _play(engine, workload, number, model=model, dtype=dtype)
            except PeerError as error:
                failed(engine.name, error)
                out.add(engine.name)
                continue
            spent[engine.name] += seconds
            first = first or outputs
            told(msgspec.structs.replace(sample, equal=share_equal(first, outputs)))
    return out


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
