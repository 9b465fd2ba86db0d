"""Attention of a model whose groups of layers have pools of their own (`memory.cache_groups`).

Each group has a backend over its pool, which knows only its layers. A step names pages and slots as the first group has
them; `ForwardBatch.windows` has those of the groups with a window. A step without them, as those that measure memory,
lies on the same pages in every group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.memory.cache_groups import Place
from tandem_engine.model.attention.backend import AttentionBackend, AttentionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedPlan:
    """Implements `AttentionPlan`."""

    plans: tuple[AttentionPlan, ...]
    places: tuple[Place, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionPlan.__call__`."""
        group, inside = self.places[layer]
        return self.plans[group](inside, q, k, v)


class GroupedAttention:
    """Implements `AttentionBackend`."""

    def __init__(self, backends: Sequence[AttentionBackend], *, windows: int, places: Sequence[Place]) -> None:
        """`backends`: one for each group, of which the last `windows` have a window."""
        self._backends = tuple(backends)
        self._windows = windows
        self._places = tuple(places)

    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """That of the only group, if there is one: a model whose layers all have the same window."""
        plans = tuple(backend.plan(each) for backend, each in zip(self._backends, self._batches(batch), strict=True))
        return plans[0] if len(plans) == 1 else GroupedPlan(plans=plans, places=self._places)

    def warm_up(self) -> None:
        """See `AttentionBackend.warm_up`."""
        for backend in self._backends:
            backend.warm_up()

    def _batches(self, batch: ForwardBatch) -> list[ForwardBatch]:
        if not batch.windows:
            return [batch] * len(self._backends)
        assert len(batch.windows) == self._windows, f"a step with {len(batch.windows)} groups, not {self._windows}"
        mapped = [
            replace(batch, page_table=pages.page_table, out_cache_loc=pages.out_cache_loc) for pages in batch.windows
        ]
        return [*[batch] * (len(self._backends) - self._windows), *mapped]
