"""The attention backend for devices: Triton kernels that read pages in place. With TRITON_INTERPRET=1 it runs on a CPU.

    rows of a step                   kernel                                        why
    at most `max_queries` tokens     `kernels.triton.decode_attention`, split-KV   bound by memory
    any other                        `kernels.triton.extend_attention`             bound by arithmetic
    long prompts without a graph     a library, where one was faster at start      `prompt_choice`
    over latents, either             `kernels.triton.latent_attention`

The kernel of a row depends on that row alone, and so does its result. The host needs no lengths: the device lists which
program computes what (`kernels.triton.work_list`), once per step for each distinct span, and all sizes are upper
bounds. So nothing here waits for the device, and a step of decodes, or of prompts, can be captured in a CUDA graph.

A `TritonGraphPlan` or `TritonPromptPlan` is the plan of a captured step: its tensors keep their addresses, `load`
writes a batch into them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.forward.prompt_shape import PromptShape
from tandem_engine.kernels.interface import HeadTurn
from tandem_engine.kernels.span import Span
from tandem_engine.kernels.triton.decode_attention import Partials
from tandem_engine.kernels.triton.work_list import Bounds, Rows, WorkList
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec, TurningPlan
from tandem_engine.model.attention.long_rows import LongPrompts, LongRow, LongRows
from tandem_engine.model.attention.paged_kernels import PagedAttention, PagedKernels, PagedLatents
from tandem_engine.model.attention.prompt_choice import PromptChooser, Run
from tandem_engine.model.attention.prompt_libraries import AttentionFacts, DenseAttend
from tandem_engine.model.attention.prompt_tensors import PromptTensors, load_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonPlan(TurningPlan):
    """Implements `Attend`."""

    attention: PagedKernels
    rows: Rows
    slots: Tensor
    """[T] int64"""
    lists: dict[Span | None, WorkList]
    partials: Partials
    long: dict[Span | None, LongRows] = field(default_factory=dict)
    """Rows that a library computes, of steps that have any."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.attention.pool.store(layer, k, v, self.slots)
        return self.attend(layer, q).flatten(1)

    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        """See `TurningPlan.turn_and_attend`: one launch between the projection and attention."""
        return self.attend(layer, self.attention.pool.turn_and_store(layer, q, k, v, self.slots, turn)).flatten(1)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of `layer` over what the pool holds: [T, heads, head_dim], or of a latent's values."""
        out = torch.empty((*q.shape[:2], self.attention.value_width), dtype=q.dtype, device=q.device)
        spec, q = self.attention.specs[layer], _dense_heads(q)
        long = self.long.get(spec.span) if self.long else None
        if long is None or not long.alone:
            self.attention.attend(layer, q, out, self.rows, self.lists[spec.span], self.partials)
        if long is not None:
            left = long.attend(self.attention.pool, layer, spec, q, out, self.rows.page_table)
            if left:
                self._attend_left(layer, q, out, long, left)
        return out

    def _attend_left(self, layer: int, q: Tensor, out: Tensor, long: LongRows, left: tuple[LongRow, ...]) -> None:
        """Rows that a library has failed at are ours, in this layer and in those behind it."""
        span = self.attention.specs[layer].span
        work = self.lists[span]
        self.long[span], rows = long.without(left, self.rows)
        work.fill(rows)
        self.attention.attend(layer, q, out, rows, work, self.partials)
        work.fill(self.long[span].others)

    def fill(self) -> None:
        """List the work of the rows as they are now."""
        for span, work in self.lists.items():
            work.fill(self.long[span].others if span in self.long else self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonGraphPlan(TurningPlan):
    """An `Attend` for steps of decodes whose tensors never move, so that a CUDA graph can be captured with it.

    Each row has one token: token i is that of row i. Rows that a batch does not have read no page, get zeros, and
    write their K and V to the dummy page [finite-padding] [dummy-page].
    """

    plan: TritonPlan
    page_table: Tensor
    """[rows, pages] int32"""
    seq_lens: Tensor
    """[rows] int32; 0 is no row."""
    slots: Tensor
    """[rows] int64"""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.plan(layer, q, k, v)

    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        """See `TurningPlan.turn_and_attend`."""
        return self.plan.turn_and_attend(layer, q, k, v, turn)

    def load(self, batch: ForwardBatch) -> None:
        """Make this the plan of `batch`: to be called on the forward's stream, before the graph is replayed.

        The batch's tensors are on the device or in pinned memory.
        """
        rows, pages = batch.page_table.shape
        assert batch.num_tokens == rows, f"a graph of decodes was given {batch.num_tokens} tokens of {rows} rows"
        assert rows <= len(self.seq_lens), f"{rows} rows for a graph of {len(self.seq_lens)}"
        assert pages <= self.page_table.shape[1], f"{pages} pages for a graph of {self.page_table.shape[1]}"
        self.page_table[:rows, :pages].copy_(batch.page_table, non_blocking=True)
        for static, given in ((self.seq_lens, batch.seq_lens), (self.slots, batch.out_cache_loc)):
            static[:rows].copy_(given, non_blocking=True)
            static[rows:].zero_()

    def prepare(self) -> None:
        """See `GraphPlan.prepare`."""
        self.plan.fill()


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonPromptPlan(TurningPlan):
    """Implements `PromptGraphPlan`: as `TritonGraphPlan`, where sequences may have several tokens."""

    plan: TritonPlan
    page_table: Tensor
    """[rows, pages] int32; the last row is 0 at all times."""
    extend_lens: Tensor
    """[rows] int32"""
    seq_lens: Tensor
    """[rows] int32"""
    slots: Tensor
    """[tokens] int64"""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.plan(layer, q, k, v)

    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        """See `TurningPlan.turn_and_attend`."""
        return self.plan.turn_and_attend(layer, q, k, v, turn)

    def load(self, batch: ForwardBatch) -> None:
        """See `TritonGraphPlan.load`; of a step padded to the shape of the graph."""
        load_prompt(self, batch)

    def prepare(self) -> None:
        """See `GraphPlan.prepare`."""
        self.plan.fill()


class TritonBackend:
    """Implements `GraphBackend` over a pool on a CUDA device, or anywhere in Triton's interpreter."""

    captures_prompts = True
    """Its grids follow from the shape of a step."""

    def __init__(
        self,
        pool: KvPool,
        *,
        num_heads: int,
        specs: Sequence[AttentionSpec],
        dtype: torch.dtype | None = None,
        max_queries: int = 1,
        chooser: PromptChooser | None = None,
    ) -> None:
        """Choose tiles for the pool's shape.

        Args:
            specs: one for each layer of the pool.
            dtype: of queries, which the pool's numbers are converted to; None is the pool's.
            max_queries: longest row that decodes: 1 + the drafts that a step may verify.
            chooser: of libraries for long prompts; None is none.

        Raises `ConfigError` for a library that a flag names and that fails.
        """
        layers = pool.data.shape[1]
        assert len(specs) == layers, f"{len(specs)} specs for a pool of {layers} layers"
        dtype = dtype or pool.data.dtype
        paged = PagedAttention if pool.value_width is None else PagedLatents
        self._attention: PagedKernels = paged.of_pool(
            pool, num_heads=num_heads, specs=tuple(specs), dtype=dtype, max_queries=max_queries
        )
        self._num_heads, self._dtype = num_heads, dtype
        self._graph_partials: Partials | None = None
        self._graph_items = 0
        self._long = None if chooser is None else self._chosen(chooser)

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """A small launch for each distinct span; waits for nothing."""
        rows = Rows(*(self._int32(part) for part in (batch.page_table, batch.extend_lens, batch.seq_lens)))
        bounds = self._bounds(rows.page_table, extend_tokens=batch.num_tokens if batch.num_extend else 0)
        slots = batch.out_cache_loc.to(self._attention.device, non_blocking=True)
        if self._long is None or not batch.num_extend:
            return self._plan(rows, slots, bounds)
        lens = batch.host.extend_lens.tolist(), batch.host.seq_lens.tolist()
        found = {span: self._long.rows_of(*lens, span) for span in self._long.choices}
        long = {span: LongRows.of(some, rows, failed=self._long.failed) for span, some in found.items() if some}
        return self._plan(rows, slots, bounds, long=long)

    def graph_plan(self, max_rows: int, max_pages: int) -> TritonGraphPlan:
        """The plan of a step of up to `max_rows` decodes with up to `max_pages` pages each. Empty until loaded."""
        device = self._attention.device
        page_table = torch.zeros((max_rows, max_pages), dtype=torch.int32, device=device)
        seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        slots = torch.zeros(max_rows, dtype=torch.int64, device=device)
        rows = Rows(page_table, torch.ones_like(seq_lens), seq_lens)
        bounds = self._bounds(page_table, extend_tokens=0)
        plan = self._plan(rows, slots, bounds, self._shared_partials(bounds))
        return TritonGraphPlan(plan=plan, page_table=page_table, seq_lens=seq_lens, slots=slots)

    def prompt_graph_plan(self, shape: PromptShape, max_pages: int) -> TritonPromptPlan:
        """See `GraphBackend.prompt_graph_plan`."""
        pool = self._attention.pool
        tensors = PromptTensors.of_padding(shape, max_pages, page_size=pool.page_size, device=pool.data.device)
        rows = Rows(tensors.page_table, tensors.extend_lens, tensors.seq_lens)
        bounds = self._bounds(rows.page_table, extend_tokens=shape.tokens)._replace(extends=shape.extends)
        plan = self._plan(rows, tensors.slots, bounds, self._shared_partials(bounds))
        return TritonPromptPlan(plan=plan, **tensors._asdict())

    def warm_up(self) -> None:
        """Compile every kernel for every distinct spec, with sinks and without, by launches that have no work."""
        pool, specs = self._attention.pool.data, self._attention.specs
        none = torch.zeros(1, dtype=torch.int32, device=pool.device)
        rows = Rows(none[:, None], none, none)
        q = torch.zeros((1, self._num_heads, pool.shape[-1]), dtype=self._dtype, device=pool.device)
        for extend_tokens in (0, 1):
            plan = self._plan(rows, none, self._bounds(rows.page_table, extend_tokens=extend_tokens))
            for layer in {(spec, spec.sinks is None): layer for layer, spec in enumerate(specs)}.values():
                plan.attend(layer, q)

    def _chosen(self, chooser: PromptChooser) -> LongPrompts | None:
        pool, specs = self._attention.pool, self._attention.specs
        _, _, _, kv_heads, page_size, head_dim = pool.data.shape
        facts = AttentionFacts(
            heads=self._num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self._dtype,
            pool_dtype=pool.data.dtype,
            page_size=page_size,
            device=pool.data.device,
            latents=pool.value_width is not None,
        )
        choices = [chooser.choose(facts, spec, trial_runs(facts, spec)) for spec in specs]
        return LongPrompts.of(specs, choices, least_queries=chooser.least_queries)

    def trial(self, attend: DenseAttend | None, q: Tensor, before: int) -> Callable[[], Tensor]:
        """A row of queries q behind `before` tokens on the pages after the dummy page: by `attend`, or our kernels."""
        pool, tokens = self._attention.pool, before + len(q)
        pages = -(-tokens // pool.page_size)
        numbers = ((range(1, 1 + pages),), (len(q),), (tokens,))
        rows = Rows(*(torch.tensor(part, dtype=torch.int32, device=pool.data.device) for part in numbers))
        bounds = self._bounds(rows.page_table, extend_tokens=len(q))
        long: dict[Span | None, LongRows] = {}
        if attend is not None:
            row = LongRow(row=0, start=0, queries=len(q), tokens=tokens, attend=attend)
            long[self._attention.specs[0].span] = LongRows.of((row,), rows)
        plan = self._plan(rows, rows.extend_lens, bounds, long=long)
        return lambda: plan.attend(0, q)

    def _plan(
        self,
        rows: Rows,
        slots: Tensor,
        bounds: Bounds,
        partials: Partials | None = None,
        *,
        long: dict[Span | None, LongRows] | None = None,
    ) -> TritonPlan:
        """Of `rows`, which are within `bounds`. `partials`: memory that no concurrent step uses."""
        kernels = self._attention
        plan = TritonPlan(
            attention=kernels,
            rows=rows,
            slots=slots,
            lists=kernels.lists(bounds),
            partials=partials or kernels.partials(bounds),
            long=long or {},
        )
        plan.fill()
        return plan

    def _shared_partials(self, bounds: Bounds) -> Partials:
        """One memory for all graphs, of which only one runs at a time: that of the largest so far."""
        items = self._attention.splitting.items(bounds)
        if self._graph_partials is None or items > self._graph_items:
            self._graph_partials, self._graph_items = self._attention.partials(bounds), items
        return self._graph_partials

    def _bounds(self, page_table: Tensor, *, extend_tokens: int) -> Bounds:
        rows, pages = page_table.shape
        return Bounds(rows, pages * self._attention.pool.page_size, extend_tokens)

    def _int32(self, numbers: Tensor) -> Tensor:
        """On the device. Of one type, so that what is compiled for graphs is compiled for other steps too."""
        return numbers.to(self._attention.device, torch.int32, non_blocking=True)


def _dense_heads(q: Tensor) -> Tensor:
    """`q` with the heads of a token adjacent."""
    return q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()


def trial_runs(facts: AttentionFacts, spec: AttentionSpec) -> Run:
    """Rows of random numbers over a pool of their own, for `PromptChooser`."""

    def run(attend: DenseAttend | None, queries: int, before: int) -> Callable[[], Tensor]:
        random = torch.Generator(facts.device).manual_seed(queries)
        pool = KvPool(
            num_pages=1 - (-(before + queries) // facts.page_size),
            num_layers=1,
            num_kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            page_size=facts.page_size,
            dtype=facts.pool_dtype,
            device=facts.device,
        )
        pool.data.normal_(generator=random)
        shape = (queries, facts.heads, facts.head_dim)
        q = torch.randn(shape, generator=random, dtype=facts.dtype, device=facts.device)
        return TritonBackend(pool, num_heads=facts.heads, specs=(spec,), dtype=facts.dtype).trial(attend, q, before)

    return run
