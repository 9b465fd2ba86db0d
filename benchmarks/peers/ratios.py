"""Medians over rounds of ratios within rounds: what is left when a machine is noisy."""

from collections.abc import Iterable, Sequence
from statistics import median

from peers.rounds import Sample
from peers.workloads import FIGURES

OURS = "tandem"
ENGINES = ("vllm", "llama.cpp", "transformers")
"""What a single engine is compared with."""


def combinations(samples: Iterable[Sample]) -> list[tuple[str, str]]:
    """(model, dtype) of all samples, in the order they came."""
    return list(dict.fromkeys((sample.model, sample.dtype) for sample in samples))


def by_round(samples: Sequence[Sample], engine: str, model: str, dtype: str, figure: str) -> dict[int, float]:
    return {
        sample.round: sample.figures[figure]
        for sample in samples
        if (sample.engine, sample.model, sample.dtype) == (engine, model, dtype) and figure in sample.figures
    }


def middle(samples: Sequence[Sample], engine: str, model: str, dtype: str, figure: str) -> float | None:
    """The median of a figure; None where it was not taken."""
    rounds = by_round(samples, engine, model, dtype, figure)
    return median(rounds.values()) if rounds else None


def speed(
    samples: Sequence[Sample], model: str, dtype: str, figure: str, theirs: str, *, ours: str = OURS
) -> float | None:
    """How many times faster ours is: the median over the rounds that both were in; None when there are none."""
    mine = by_round(samples, ours, model, dtype, figure)
    others = by_round(samples, theirs, model, dtype, figure)
    ratios = [FIGURES[figure].speed(mine[number], others[number]) for number in mine if number in others]
    return median(ratios) if ratios else None


def against_best(samples: Sequence[Sample], model: str, dtype: str, figure: str) -> tuple[float, str] | None:
    """The ratio to the best of the other engines, and which that is; None without any."""
    ratios = [(ratio, peer) for peer in ENGINES if (ratio := speed(samples, model, dtype, figure, peer)) is not None]
    return min(ratios) if ratios else None
