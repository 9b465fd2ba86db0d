"""What each layer of a model remembers, and how layers share pages.

    KvSpec        of one layer: which earlier tokens it reads, and what it keeps of a token
    CacheGroup    layers with equal specs: they have one pool, and a page of it holds all of them [window-by-layer]
    CacheLayout   the groups of a model, those that read all tokens first, and the place of each layer

A layer whose tokens see the newest `window` tokens, or those of their chunk, needs no others: once n tokens are
committed, later ones read from `Reach.first_read(n)` on. `merged` is the layout that makes no use of that: one group
for all layers, whose pages live as long as the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

STATE_CHUNK = 64
"""Tokens: layers with states compute a prompt in chunks (`model.layers.delta_rule`). A state after a whole number of
them has the same bits however a prompt is divided."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tokens a layer reads: the newest `window`, the reading one included, those of its `chunk`, or all."""

    window: int | None = None
    chunk: int | None = None

    @property
    def span(self) -> int | None:
        """The most tokens that one reads; None is all."""
        return self.window if self.chunk is None else self.chunk

    def first_read(self, tokens: int) -> int:
        """The oldest token that any later one than the first `tokens` reads, themselves apart."""
        if self.chunk is not None:
            return tokens - tokens % self.chunk
        return 0 if self.window is None else max(0, tokens + 1 - self.window)

    def first_reads(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`first_read` of each number."""
        if self.chunk is not None:
            return tokens - tokens % self.chunk
        return np.zeros_like(tokens) if self.window is None else np.maximum(0, tokens + 1 - self.window)

    def passed_blocks(self, tokens: int, page_size: int) -> int:
        """Leading blocks that no later token than the first `tokens` reads."""
        return self.first_read(tokens) // page_size

    def max_blocks(self, page_size: int) -> int | None:
        """Blocks that a decoding sequence needs at most, that of its next token included; None: all that it has."""
        return None if self.span is None else -(-(self.span - 1) // page_size) + 2


ALL_TOKENS = Reach()


class KvRow(NamedTuple):
    """What a layer keeps of a token: K, V, or a latent that is both."""

    heads: int
    """Of this rank."""
    width: int
    """Numbers of one head."""


def common_row(rows: Sequence[KvRow]) -> KvRow:
    """The smallest that is a whole number of each of `rows`, and of heads of one width."""
    if len(set(rows)) == 1:
        return rows[0]
    size, width = lcm(*(row.heads * row.width for row in rows)), gcd(*(row.width for row in rows))
    return KvRow(heads=size // width, width=width)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """One layer. Layers with equal specs form a group."""

    reach: Reach
    row: KvRow
    """Of K and of V, or of the latent."""
    value_width: int | None = None
    """Of a layer that keeps one latent, the numbers at its beginning that are V; None for K and V."""

    @property
    def parts(self) -> int:
        """Rows of a token."""
        return 2 if self.value_width is None else 1


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a model that share pages."""

    spec: KvSpec
    layers: tuple[int, ...]
    """In model order."""
    rows: tuple[KvRow, ...] = ()
    """Of each layer, where they differ: `spec.row` has room for any of them. () where all are `spec.row`."""

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """Of a page of `page_size` tokens whose numbers have `itemsize` bytes."""
        return len(self.layers) * page_size * itemsize * self.spec.parts * self.spec.row.heads * self.spec.row.width


class Place(NamedTuple):
    """Where a layer's pages are."""

    group: int
    layer: int
    """Among the layers of the group."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model."""

    groups: tuple[CacheGroup, ...]
    """Those that read all tokens first, then by their first layer."""

    @classmethod
    def of(cls, specs: Sequence[KvSpec]) -> Self:
        """Of the layers of a model, in order."""
        assert specs, "a model without layers remembers nothing"
        layers: dict[KvSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            layers.setdefault(spec, []).append(layer)
        groups = [CacheGroup(spec, tuple(members)) for spec, members in layers.items()]
        return cls(tuple(sorted(groups, key=lambda group: group.spec.reach.span is not None)))

    @classmethod
    def merged(cls, specs: Sequence[KvSpec]) -> Self:
        """One group for all layers, which keeps all their tokens. Their rows may differ in size."""
        rows = tuple(spec.row for spec in specs)
        shared = [replace(spec, reach=ALL_TOKENS, row=common_row(rows)) for spec in specs]
        layout = cls.of(shared)
        assert len(layout.groups) == 1, f"layers of {len(layout.groups)} forms share no page"
        if len(set(rows)) == 1:
            return layout
        return cls((replace(layout.groups[0], rows=rows),))

    @property
    def is_merged(self) -> bool:
        """One group, which keeps all tokens."""
        return [group.spec.reach for group in self.groups] == [ALL_TOKENS]

    @property
    def windows(self) -> int:
        """Groups with a window or chunks, which come last."""
        return sum(group.spec.reach.span is not None for group in self.groups)

    @property
    def places(self) -> tuple[Place, ...]:
        """Of each layer of the model."""
        places = {
            layer: Place(index, inside)
            for index, group in enumerate(self.groups)
            for inside, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(len(places)))
