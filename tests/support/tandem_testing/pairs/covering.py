"""Rows of options in which every allowed pair of values occurs at least once.

    axes = [Axis("n", ("absent", "2")), Axis("echo", ("absent", "true")), Axis("stop", ("absent", "dot"))]
    covering_rows(axes, [Forbidden(("echo", "true"), ("stop", "dot"))], seed=1)

Greedy: each row begins with a pair that no row has yet, and takes for every other axis the value that adds most new
pairs. The same arguments give the same rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

Value = tuple[str, str]
"""Name of an axis, and one of its values."""
Pair = frozenset[Value]
Row = Mapping[str, str]
"""A value for every axis."""
TRIES = 6
"""Rows that are made for each that is kept: the one with most new pairs."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An option. Its first value is allowed with every value of the others, so that every row can be completed."""

    name: str
    values: tuple[str, ...]

    def named(self) -> Iterator[Value]:
        for value in self.values:
            yield self.name, value


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Two values that no row has together."""

    one: Value
    other: Value

    @property
    def pair(self) -> Pair:
        return frozenset((self.one, self.other))


def allowed_pairs(axes: Sequence[Axis], forbidden: Sequence[Forbidden]) -> list[Pair]:
    """What the rows have to cover. Raises `ValueError` for a pair that cannot be forbidden."""
    _check(axes, forbidden)
    without = {each.pair for each in forbidden}
    every = (frozenset((a, b)) for one, other in combinations(axes, 2) for a in one.named() for b in other.named())
    return [pair for pair in every if pair not in without]


def pairs_of(row: Row) -> list[Pair]:
    return [frozenset(pair) for pair in combinations(row.items(), 2)]


def covering_rows(axes: Sequence[Axis], forbidden: Sequence[Forbidden] = (), *, seed: int = 0) -> list[Row]:
    """Raises `ValueError` for a pair that cannot be forbidden."""
    random = Random(seed)
    missing = dict.fromkeys(allowed_pairs(axes, forbidden))
    without = {each.pair for each in forbidden}
    rows: list[Row] = []
    while missing:
        tried = [_new_row(axes, without, missing, random) for _ in range(TRIES)]
        best = max(tried, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        rows.append({axis.name: best[axis.name] for axis in axes})
    return rows


def _new_row(axes: Sequence[Axis], without: set[Pair], missing: Mapping[Pair, None], random: Random) -> dict[str, str]:
    """It has at least one pair of `missing`."""
    row = dict(sorted(random.choice([*missing])))
    for axis in random.sample(axes, len(axes)):
        if axis.name not in row:
            row[axis.name] = _best_value(axis, row, without, missing, random)
    return row


def _best_value(axis: Axis, row: Row, without: set[Pair], missing: Mapping[Pair, None], random: Random) -> str:
    gains: dict[str, int] = {}
    for value in axis.named():
        pairs = [frozenset((value, there)) for there in row.items()]
        if not any(pair in without for pair in pairs):
            gains[value[1]] = sum(pair in missing for pair in pairs)
    most = max(gains.values())
    return random.choice([value for value, gain in gains.items() if gain == most])


def _check(axes: Sequence[Axis], forbidden: Sequence[Forbidden]) -> None:
    known = {axis.name: axis.values for axis in axes}
    for each in forbidden:
        if each.one[0] == each.other[0]:
            raise ValueError(f"{each.pair} is one axis, of which a row has one value")
        for name, value in each.pair:
            if value not in known.get(name, ()):
                raise ValueError(f"{name} has no value {value!r}")
            if value == known[name][0]:
                raise ValueError(f"the first value of {name}, {value!r}, must be allowed with every other")
