"""The pools of a model's groups of layers (`cache_groups`), and how many pages each gets.

Page ids number blocks in all groups. Layers that read all tokens have a page for each id. Layers with a window need
fewer: `pages_of_window`. Of the memory that was planned for pages of all layers, what they do not need becomes further
page ids for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

from tandem_engine.memory.cache_groups import CacheGroup, CacheLayout, KvRow, Place, Reach
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.state_pool import StatePool
from tandem_engine.memory.window_pages import WindowPages

Spec = TypeVar("Spec")

TYPICAL_TOKENS = 8192
"""Of a request at most, for the shares of groups in the memory: longer ones are rare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What requests need, in blocks of one page."""

    page_size: int
    context_length: int
    chunk: int
    """Prompt tokens that a step computes for one request, at most."""

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pages_of_window(self, reach: Reach, page_ids: int) -> int:
        """Of `page_ids` blocks, as many as requests of a usual length have in their windows, the dummy page included.

        At least what one decoding request and the chunks of a prompt need: without that nothing could run.
        """
        most = self.blocks(min(self.context_length, TYPICAL_TOKENS))
        window = min(reach.max_blocks(self.page_size) or most, most)
        least = 2 * (window + self.blocks(self.chunk) + 1)
        return min(page_ids, 1 + least + -(-page_ids * window // most))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPools:
    """Pools of one engine."""

    layout: CacheLayout
    page_ids: int
    """That the allocator gives out, the dummy one included."""
    pools: tuple[KvPool, ...]
    """One for each group."""
    states: StatePool | None = None
    """Of layers that keep a state, and no pages."""

    @classmethod
    def of(
        cls,
        layout: CacheLayout,
        num_pages: Sequence[int],
        *,
        page_ids: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        scales: torch.Tensor | None = None,
        states: StatePool | None = None,
    ) -> Self:
        """`num_pages` of each group. `scales`: of all layers with pages."""
        pools = (
            KvPool.of_group(group, num_pages=pages, page_size=page_size, dtype=dtype, device=device, scales=scales)
            for group, pages in zip(layout.groups, num_pages, strict=True)
        )
        return cls(layout=layout, page_ids=page_ids, pools=tuple(pools), states=states)

    @property
    def first(self) -> KvPool:
        """Of all layers, where they are one group."""
        return self.pools[0]

    @property
    def is_plain(self) -> bool:
        """One pool, whose layers are those of the model."""
        return self.layout.is_merged and not self.layout.groups[0].rows

    def with_specs(self, specs: Sequence[Spec]) -> list[tuple[KvPool, list[Spec]]]:
        """Each pool with the `specs` of its layers, of one for each layer of the model.

        A pool whose rows differ counts as several, one for each kind.
        """
        rows = self.layout.groups[0].rows
        if rows:
            return [self._of_kind(row, specs) for row in dict.fromkeys(rows)]
        return [
            (pool, [specs[layer] for layer in group.layers])
            for group, pool in zip(self.layout.groups, self.pools, strict=True)
        ]

    def _of_kind(self, row: KvRow, specs: Sequence[Spec]) -> tuple[KvPool, list[Spec]]:
        """Layers between those of the kind have its first spec, and are never computed."""
        pool, rows = self.first.of_rows(row), self.layout.groups[0].rows
        found = [specs[rows.index(row)]] * pool.layout.layers
        times = len(found) // len(rows)
        for layer, own in enumerate(rows):
            if own == row:
                found[layer * times] = specs[layer]
        return pool, found

    @property
    def places(self) -> tuple[Place, ...]:
        """Of each layer of the model, among the pools of `with_specs`."""
        rows = self.layout.groups[0].rows
        if not rows:
            return self.layout.places
        kinds, shared = [*dict.fromkeys(rows)], self.layout.groups[0].spec.row
        return tuple(
            Place(kinds.index(row), layer * (shared.heads * shared.width // (row.heads * row.width)))
            for layer, row in enumerate(rows)
        )

    @property
    def windows(self) -> list[WindowPages]:
        """New, of the groups with a window."""
        return [
            WindowPages(group.spec.reach, page_size=pool.page_size, num_pages=pool.num_pages, page_ids=self.page_ids)
            for group, pool in zip(self.layout.groups, self.pools, strict=True)
            if group.spec.reach.span is not None
        ]

    @property
    def scales(self) -> torch.Tensor | None:
        """A copy of those of all layers, in model order; None where there are none."""
        if self.first.scales is None:
            return None
        layers = [(group, inside) for group, inside in self.layout.places]
        scales = [self.pools[group].scales for group, _ in layers]
        return torch.stack([each[inside] for each, (_, inside) in zip(scales, layers, strict=True) if each is not None])

    def set_scales(self, scales: torch.Tensor) -> None:
        """See `KvPool.set_scales`, of all layers."""
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            pool.set_scales(scales[list(group.layers)])


def group_pages(layout: CacheLayout, demand: Demand, page_ids: int) -> list[int]:
    """Pages of each group, for so many page ids."""
    return [
        page_ids if group.spec.reach.span is None else demand.pages_of_window(group.spec.reach, page_ids)
        for group in layout.groups
    ]


def page_ids_in(layout: CacheLayout, demand: Demand, pages: int, *, itemsize: int, draft_bytes: int = 0) -> int:
    """The most page ids for which the memory of `pages` pages of all layers is enough.

    `draft_bytes`: of a draft model, for each page id.
    """

    def size(group: CacheGroup) -> int:
        return group.page_bytes(demand.page_size, itemsize)

    def fits(page_ids: int) -> bool:
        used = sum(map(int.__mul__, map(size, layout.groups), group_pages(layout, demand, page_ids)))
        return used + page_ids * draft_bytes <= pages * (sum(map(size, layout.groups)) + draft_bytes)

    fitting, beyond = pages, 2 * pages
    while fits(beyond):
        fitting, beyond = beyond, 2 * beyond
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return fitting
