"""Which part of a stored tensor each rank holds.

    split along dim 0    outputs of a projection (column-parallel): q, k, v, gate, up
    split along dim 1    its inputs (row-parallel): o, down; the partial results are summed over the ranks
    vocabulary           rows of the embedding and the head, zero rows at the end so that all parts are equal

Ranks take runs of `unit` indices in order. Where there are fewer runs than ranks (a model with 2 KV heads on
4 ranks), neighbors hold the same one: rank r holds run `r * runs // size`, the one that its query heads read.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Indices [start, stop) of the split dimension, followed by zeros up to `length` indices."""

    start: int
    stop: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How the ranks share one dimension of a tensor."""

    dim: int
    unit: int = 1
    """Indices that stay together, such as the rows of a head."""
    padded: bool = False
    """The ranks' parts are made equal with zeros; without it the runs must divide evenly."""

    def part(self, length: int, *, rank: int, size: int) -> Part:
        """The part of rank `rank` of `size` in a dimension of `length` indices."""
        assert 0 <= rank < size, f"rank {rank} of {size}"
        if self.padded:
            share = -(-length // size)
            return Part(min(rank * share, length), min((rank + 1) * share, length), share)
        runs, rest = divmod(length, self.unit)
        assert rest == 0, f"a dimension of {length} does not consist of runs of {self.unit}"
        each = share_of(runs, size)
        assert each is not None, f"{runs} runs cannot be shared by {size} ranks"
        start = (rank * runs // size) * self.unit
        return Part(start, start + each * self.unit, each * self.unit)


OUTPUTS = Split(dim=0)
INPUTS = Split(dim=1)
VOCABULARY = Split(dim=0, padded=True)


def share_of(runs: int, size: int) -> int | None:
    """Runs that each of `size` ranks holds; None when `runs` can be neither divided nor repeated evenly."""
    if runs % size == 0:
        return runs // size
    return 1 if size % runs == 0 else None


def part_of(shape: tuple[int, ...], split: Split | None, *, rank: int, size: int) -> tuple[int, Part]:
    """The dimension in which a tensor of `shape` is cut, and the part of it that rank `rank` of `size` holds.

    All of it without a split, and of a bias, which has no inputs to split by.
    """
    if split is None or split.dim >= len(shape):
        return 0, Part(0, shape[0], shape[0])
    return split.dim, split.part(shape[split.dim], rank=rank, size=size)


def shape_of_part(shape: tuple[int, ...], dim: int, part: Part) -> tuple[int, ...]:
    """Of a tensor of `shape` cut in dimension `dim`, padding included."""
    return (*shape[:dim], part.length, *shape[dim + 1 :])
