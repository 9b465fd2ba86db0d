"""Attention of a model whose groups of layers have pools of their own (`memory.cache_groups`).

Each group has a backend over its pool, for its layers alone. A step names pages and slots as the first group has
them; `ForwardBatch.windows` has those of the groups with a window. A step without them, as those that measure memory,
lies on the same pages in every group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.forward.prompt_shape import PromptShape
from tandem_engine.kernels.interface import HeadTurn
from tandem_engine.memory.cache_groups import Place
from tandem_engine.model.attention.backend import (
    Attend,
    AttentionBackend,
    GraphBackend,
    GraphPlan,
    PromptGraphPlan,
    TurningPlan,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedPlan:
    """Implements `Attend`."""

    plans: tuple[Attend, ...]
    places: tuple[Place, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend.__call__`."""
        group, inside = self.places[layer]
        return self.plans[group](inside, q, k, v)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedTurningPlan(TurningPlan):
    """The same of plans that turn heads themselves."""

    plans: tuple[TurningPlan, ...]
    places: tuple[Place, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, inside = self.places[layer]
        return self.plans[group](inside, q, k, v)

    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        """See `TurningPlan.turn_and_attend`."""
        group, inside = self.places[layer]
        return self.plans[group].turn_and_attend(inside, q, k, v, turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedGraphPlan(TurningPlan):
    """Implements `GraphPlan`."""

    graphs: tuple[GraphPlan, ...]
    plan: GroupedTurningPlan
    """Of the same."""
    batches: Callable[[ForwardBatch], list[ForwardBatch]]
    """A step as each group has it."""
    slots: Tensor
    """int64 slots as steps name them: a group with a window has other ones."""

    @property
    def page_table(self) -> Tensor:
        """See `GraphPlan`; of the first group."""
        return self.graphs[0].page_table

    @property
    def seq_lens(self) -> Tensor:
        """See `GraphPlan`."""
        return self.graphs[0].seq_lens

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.plan(layer, q, k, v)

    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        """See `TurningPlan.turn_and_attend`."""
        return self.plan.turn_and_attend(layer, q, k, v, turn)

    def load(self, batch: ForwardBatch) -> None:
        """See `GraphPlan.load`: every tensor of every group, whatever an earlier step left [graph-tables-whole]."""
        self.slots.copy_(batch.out_cache_loc, non_blocking=True)
        for graph, each in zip(self.graphs, self.batches(batch), strict=True):
            graph.load(each)

    def prepare(self) -> None:
        """See `GraphPlan.prepare`."""
        for graph in self.graphs:
            graph.prepare()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedPromptPlan(GroupedGraphPlan):
    """Implements `PromptGraphPlan`."""

    first: PromptGraphPlan
    """Of `graphs`."""

    @property
    def extend_lens(self) -> Tensor:
        """See `PromptGraphPlan`."""
        return self.first.extend_lens


class GroupedAttention:
    """Implements `AttentionBackend`."""

    def __init__(self, backends: Sequence[AttentionBackend], *, windows: int, places: Sequence[Place]) -> None:
        """`backends`: one for each group, of which the last `windows` have a window."""
        self._backends = tuple(backends)
        self._windows = windows
        self._places = tuple(places)

    def plan(self, batch: ForwardBatch) -> Attend:
        """That of the only group, if there is one: a model whose layers all have the same window."""
        plans = tuple(backend.plan(each) for backend, each in zip(self._backends, self.batches(batch), strict=True))
        if len(plans) == 1:
            return plans[0]
        turning = tuple(plan for plan in plans if isinstance(plan, TurningPlan))
        if len(turning) == len(plans):
            return GroupedTurningPlan(plans=turning, places=self._places)
        return GroupedPlan(plans=plans, places=self._places)

    def warm_up(self) -> None:
        """See `AttentionBackend.warm_up`."""
        for backend in self._backends:
            backend.warm_up()

    def batches(self, batch: ForwardBatch) -> list[ForwardBatch]:
        """`batch` with the pages of each group."""
        if not batch.windows:
            return [batch] * len(self._backends)
        assert len(batch.windows) == self._windows, f"a step with {len(batch.windows)} groups, not {self._windows}"
        mapped = [
            replace(batch, page_table=pages.page_table, out_cache_loc=pages.out_cache_loc) for pages in batch.windows
        ]
        return [*[batch] * (len(self._backends) - self._windows), *mapped]


class GroupedGraphAttention(GroupedAttention):
    """Implements `GraphBackend`."""

    def __init__(self, backends: Sequence[GraphBackend], *, windows: int, places: Sequence[Place]) -> None:
        """See `GroupedAttention`."""
        super().__init__(backends, windows=windows, places=places)
        self._graph_backends = tuple(backends)

    @property
    def captures_prompts(self) -> bool:
        """See `GraphBackend.captures_prompts`."""
        return all(backend.captures_prompts for backend in self._graph_backends)

    def graph_plan(self, max_rows: int, max_pages: int) -> GroupedGraphPlan:
        """See `GraphBackend.graph_plan`."""
        graphs = tuple(backend.graph_plan(max_rows, max_pages) for backend in self._graph_backends)
        return GroupedGraphPlan(
            graphs=graphs,
            plan=self._turning(graphs),
            batches=self.batches,
            slots=torch.zeros_like(graphs[0].slots),
        )

    def prompt_graph_plan(self, shape: PromptShape, max_pages: int) -> GroupedPromptPlan:
        """See `GraphBackend.prompt_graph_plan`."""
        graphs = tuple(backend.prompt_graph_plan(shape, max_pages) for backend in self._graph_backends)
        return GroupedPromptPlan(
            graphs=graphs,
            first=graphs[0],
            plan=self._turning(graphs),
            batches=self.batches,
            slots=torch.zeros_like(graphs[0].slots),
        )

    def _turning(self, graphs: Sequence[GraphPlan]) -> GroupedTurningPlan:
        turning = tuple(graph for graph in graphs if isinstance(graph, TurningPlan))
        assert len(turning) == len(graphs), "attention of a device turns heads"
        return GroupedTurningPlan(plans=turning, places=self._places)
