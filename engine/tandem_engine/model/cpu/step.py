"""Compiled steps of a CPU: which models and steps run as compiled code beyond attention and products, and how.

    model           float32 or bfloat16 on a CPU, whole on one rank; plain blocks: an RMS norm before attention and one
                    before a SwiGLU feed-forward, one rotation, one kind of attention and no cap on its scores
    small step      at most `FEW_TOKENS`, all of whose attention reads pages in place: decodes, drafts, a few tokens on
                    a cached prefix. One call (`kernels.cpu.decoder_step`); another kernel where tokens have adapters
    large step      any other: products by oneDNN, and compiled calls over rows between them; at first also small ones,
                    when another process still compiles their kernel

Every other model takes the layers of `Decoder` one by one. A large step:

    hidden, delta ─▶ sum, norm ─▶ qkv ─▶ place heads ─▶ attend ─▶ output = delta
    hidden, delta ─▶ sum, norm ─▶ gate_up ─▶ silu(gate) · up ─▶ down = delta

oneDNN gets a number of rows that it computes fast (`padded_tokens`): rows after the last token have zeros or numbers of
another token, and their results are not read. The arithmetic is that of `model.layers`, to the bit except for the order
in which a norm sums its squares.

The records of the row kernels are filled once with what does not change within a step: filling a hundred of them in
Python takes as long as some of the arithmetic of forty decodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import Activation, ModelConfig, NormKind, NormPlacement, QkNorm
from tandem_engine.kernels.cpu.attention_work import STATISTICS
from tandem_engine.kernels.cpu.decoder_step import StepKernel, build_step_kernel, phases_of
from tandem_engine.kernels.cpu.kept import LateKernel
from tandem_engine.kernels.cpu.panels import steps_of
from tandem_engine.kernels.cpu.pieces import Array
from tandem_engine.kernels.cpu.row_ops import (
    GATE,
    NORM,
    PLACE,
    RowKernel,
    build_gate_kernel,
    build_norm_kernel,
    build_place_kernel,
)
from tandem_engine.kernels.cpu.tensors import dtype_of
from tandem_engine.kernels.cpu.threads import PHASE_BYTES, team
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.attention.backend import Attend, AttentionSpec, NotifyingPlan, distinct
from tandem_engine.model.attention.cpu import CpuPlan, PagedQueries
from tandem_engine.model.cpu.adapters import AdapterTables, AdapterTasks
from tandem_engine.model.cpu.arrays import ModelArrays, plain_attention
from tandem_engine.model.layers.attention import RotaryTable
from tandem_engine.model.layers.linear import Delta, TokenEmbedding, padded_tokens, project
from tandem_engine.model.layers.mlp import FeedForward
from tandem_engine.model.layers.norm import Norm
from tandem_engine.model.weights import Weights

if TYPE_CHECKING:
    from tandem_engine.model.blocks import Block


class RowCalls:
    """Of one step. Results that are not given a place are overwritten by the next call of the same kind."""

    tokens: int
    query: Tensor
    """[padded T, H, D] float32: what attention is to look for, and zeros."""

    def __init__(self, model: ModelArrays, plan: CpuPlan, positions: Tensor) -> None:
        """`positions` [T] of the tokens: dense, and kept."""
        config, dtype, pages = model.config, dtype_of(model.dtype), plan.kernels.pages
        group, self.tokens = config.num_heads // config.num_kv_heads, len(positions)
        padded = padded_tokens(self.tokens)
        self.query = torch.zeros((padded, config.num_heads, config.head_dim))
        self._plan, self._positions = plan, positions
        self._normed = torch.zeros((padded, config.hidden_size), dtype=model.dtype)
        self._inner = torch.empty((padded, config.intermediate_size), dtype=model.dtype)
        self._weights = {name: (weight.ctypes.data, weight[0].nbytes) for name, weight in model.norms.items()}
        self._norm = _Call(build_norm_kernel(dtype), NORM)
        self._norm.set(size=config.hidden_size, eps=config.rms_eps)
        self._place = _Call(build_place_kernel(dtype, config.head_dim, group), PLACE)
        of_model = ("angles", "num_positions", "head_norm", "num_layers", "num_kv_heads", "eps")
        self._place.set(**{name: model.constant[name][0] for name in of_model})
        self._place.set(page_size=pages.shape[4], pages=pages.ctypes.data, slots=plan.slots.ctypes.data)
        self._place.set(tokens=self.tokens, positions=positions.data_ptr(), query=self.query.data_ptr())
        self._gate = _Call(build_gate_kernel(dtype), GATE)
        self._gate.set(inner=config.intermediate_size)

    def norm(self, hidden: Tensor, delta: Tensor | None, name: str, layer: int, *, out: Tensor | None = None) -> Tensor:
        """hidden [n, E] += delta, and its norm by a weight of `STEP`: [padded n, E], or `out`."""
        tokens = len(hidden)
        normed = _first(self._normed, padded_tokens(tokens)) if out is None else out
        weight, row = self._weights[name]
        self._norm(
            tokens=tokens,
            hidden=hidden.data_ptr(),
            delta=0 if delta is None else delta.data_ptr(),
            weight=weight + layer * row,
            out=normed.data_ptr(),
        )
        return normed

    def place(self, layer: int, qkv: Tensor) -> None:
        """q of qkv [padded T, (H + 2 KV) · D] to `query`, k and v to their pages."""
        self._place(layer=layer, qkv=qkv.data_ptr())

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of [n, 2 I]"""
        inner = _first(self._inner, len(gate_up))
        self._gate(tokens=len(gate_up), gate_up=gate_up.data_ptr(), out=inner.data_ptr())
        return inner


class _Call:
    """A kernel and its record."""

    def __init__(self, kernel: RowKernel, fields: "np.dtype[Any]") -> None:
        self._work = np.zeros(1, fields)
        self._record = self._work[0]
        self._run = team().run
        self._given = (kernel.address, self._work.ctypes.data, torch.get_num_threads())

    def set(self, **fields: Any) -> None:
        for name, value in fields.items():
            self._record[name] = value

    def __call__(self, **fields: int) -> None:
        self._record["next_task"] = 0
        self.set(**fields)
        self._run(*self._given)


def _first(rows: Tensor, count: int) -> Tensor:
    """Some of them, or new ones if there are not as many: a batch with a token twice needs more than there are."""
    if count > len(rows):
        return torch.zeros((count, rows.shape[1]), dtype=rows.dtype)
    return rows if count == len(rows) else rows[:count]


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeStep:
    """A step for oneDNN and the kernels over rows."""

    model: ModelArrays
    plan: CpuPlan
    wrote: Callable[[int], object] | None
    """Notified of each layer whose K and V are stored, if pages are sent during the step."""
    adapters: StepAdapters | None = None

    def forward(self, input_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        self._require_angles(positions)
        calls = RowCalls(self.model, self.plan, positions.contiguous())
        hidden, delta = self.model.embedding(input_ids), None
        last = len(self.model.blocks) - 1
        for layer, block in enumerate(self.model.blocks):
            feed_forward = block.feed_forward
            assert isinstance(feed_forward, FeedForward), f"{type(feed_forward).__name__} in a model without experts"
            normed = calls.norm(hidden, delta, "attention_norm", layer)
            attention = plain_attention(block)
            calls.place(layer, project(attention.qkv, normed, self._adds(Site.QKV, layer)))
            gathered = self._attend(calls, layer)
            if layer == last:
                # From here on a token serves only itself: most of a prompt need go no further.
                hidden = hidden.index_select(0, wanted)
                gathered = gathered.index_select(0, _padded(wanted))
            delta = project(attention.output, gathered.to(hidden.dtype), self._adds(Site.OUTPUT, layer))
            normed = calls.norm(hidden, delta, "feed_forward_norm", layer)
            gate_up = project(feed_forward.gate_up, normed, self._adds(Site.GATE_UP, layer))
            delta = project(feed_forward.down, calls.gate(gate_up), self._adds(Site.DOWN, layer))
        return calls.norm(hidden, delta, "norm", 0, out=torch.empty_like(hidden))

    def _adds(self, site: Site, layer: int) -> Delta | None:
        """What adapters add to a product. The last layer's, but for q, k and v, has the wanted rows alone."""
        if self.adapters is None:
            return None
        wanted = site is not Site.QKV and layer == len(self.model.blocks) - 1
        return self.adapters.delta(site, layer, wanted=wanted)

    def _require_angles(self, positions: Tensor) -> None:
        least, most = torch.aminmax(positions)
        if int(least) < 0 or int(most) >= int(self.model.constant["num_positions"][0]):
            raise IndexError(f"positions {int(least)} to {int(most)} lie beyond the rotary table")

    def _attend(self, calls: RowCalls, layer: int) -> Tensor:
        """What all tokens gather, float32 [padded T, H · D]."""
        gathered = self.plan.gather(layer, calls.query).flatten(1)
        if len(gathered) > calls.tokens:
            gathered[calls.tokens :].zero_()
        if self.wrote is not None:
            self.wrote(layer)
        return gathered


def _padded(wanted: Tensor) -> Tensor:
    """With as many more indices, of the first token, as `padded_tokens` asks for."""
    return F.pad(wanted, (0, padded_tokens(len(wanted)) - len(wanted)))


PARALLEL_BYTES = 16 << 20
"""Weights of a step from which other threads pay: less takes no longer than the threads wait for one another."""

TASKS_PER_THREAD = 2
"""Of attention, so many at least where its heads can be told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallStep:
    """A step for the kernel."""

    kernel: StepKernel
    model: ModelArrays
    plan: CpuPlan
    queries: PagedQueries
    scale: float
    """Of attention scores."""
    adapters: AdapterTasks | None = None
    """For a kernel of steps with adapters."""

    def forward(self, input_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        model, pages, queries = self.model, self.plan.kernels.pages, self.queries
        tokens, threads = len(input_ids), self._threads()
        given = {
            name: each if each.is_contiguous() else each.contiguous()
            for name, each in (("input_ids", input_ids), ("positions", positions), ("wanted", wanted))
        }
        out = torch.empty((len(wanted), model.config.hidden_size), dtype=model.dtype)
        arrays = self._scratch(tokens) | {"slots": self.plan.slots, "pages": pages}
        arrays |= {"page_table": queries.page_table, "tasks": queries.tasks, "queries": queries.queries}
        arrays |= {"groups": queries.groups, "members": queries.members}
        record = model.constant.copy()
        step = record[0]
        for name, array in arrays.items():
            step[name] = array.ctypes.data
        for name, tensor in given.items():
            step[name] = tensor.data_ptr()
        step["out"], step["tokens"], step["wanted_tokens"] = out.data_ptr(), tokens, len(wanted)
        step["page_size"], step["table_width"] = pages.shape[4], queries.page_table.shape[1]
        step["num_tasks"], step["num_groups"] = len(queries.tasks), len(queries.groups)
        step["num_queries"] = len(queries.queries)
        step["head_parts"] = self._head_parts(threads)
        step["scale"] = self.scale
        if self.adapters is not None:
            self.adapters.write(step)
        team().run(self.kernel.address, record.ctypes.data, threads)
        if step["refused"]:
            raise IndexError("a token id lies outside of the vocabulary, or a position beyond the rotary table")
        return out

    def _threads(self) -> int:
        return torch.get_num_threads() if self.model.weight_bytes >= PARALLEL_BYTES else 1

    def _head_parts(self, threads: int) -> int:
        """See `STEP`. All heads of a page together come from memory faster, where there are tasks enough."""
        few = threads > 1 and len(self.queries.groups) < TASKS_PER_THREAD * threads
        return self.model.config.num_kv_heads if few else 1

    def _phases(self) -> int:
        return phases_of(self.model.config.num_layers, adapted=self.adapters is not None)

    def _scratch(self, tokens: int) -> dict[str, Array]:
        """See `STEP`, by its names."""
        config = self.model.config
        heads, head_dim = config.num_heads, config.head_dim
        return {
            "phases": np.zeros((self._phases(), PHASE_BYTES), np.uint8),
            "hidden": np.empty((tokens, config.hidden_size), np.float32),
            "qkv": np.empty((tokens, heads + 2 * config.num_kv_heads, head_dim), np.float32),
            "query": np.empty((tokens, heads, head_dim), np.float32),
            "partial": np.empty((len(self.queries.tasks), heads, head_dim + STATISTICS), np.float32),
            "gate_up": np.empty((tokens, 2 * config.intermediate_size), np.float32),
        }


FEW_TOKENS = 32
"""With more of them oneDNN's products are faster by more than the calls between them cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedStack:
    """A decoder up to its last norm."""

    kernel: LateKernel
    """Of small steps. Until it is there they are large ones."""
    arrays: ModelArrays
    adapted: LateKernel | None = None
    """The same with adapters; None for a model that has none."""
    tables: AdapterTables = field(default_factory=AdapterTables)

    def step_of(
        self, attend: Attend, tokens: int, adapters: StepAdapters | None = None
    ) -> SmallStep | LargeStep | None:
        """The step of so many tokens that `attend` was planned for, if it is one for compiled code."""
        plan, wrote = (attend.plan, attend.wrote) if isinstance(attend, NotifyingPlan) else (attend, None)
        if not isinstance(plan, CpuPlan) or plan.kernels.pages.dtype != dtype_of(self.arrays.dtype):
            return None
        few = tokens <= FEW_TOKENS and wrote is None
        view = plan.read_in_place() if few else None
        late = self.kernel if adapters is None else self.adapted
        kernel = None if view is None or late is None else late.get()
        if view is None or view.paged is None or kernel is None:
            return LargeStep(model=self.arrays, plan=plan, wrote=wrote, adapters=adapters)
        return SmallStep(
            kernel=kernel,
            model=self.arrays,
            plan=plan,
            queries=view.paged,
            scale=view.spec.scale,
            adapters=None if adapters is None else self._tasks(adapters, tokens),
        )

    def _tasks(self, adapters: StepAdapters, tokens: int) -> AdapterTasks:
        config = self.arrays.config
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        outputs = max(heads, config.hidden_size, 2 * config.intermediate_size)
        return self.tables.tasks_of(adapters, tokens=tokens, layers=config.num_layers, outputs=outputs)


def fuse(
    config: ModelConfig,
    weights: Weights,
    *,
    embedding: TokenEmbedding,
    blocks: "Sequence[Block]",
    rotary: RotaryTable,
    norm: Norm,
    specs: Sequence[AttentionSpec],
    adapted: bool,
) -> FusedStack | None:
    """The kernel for a decoder of these parts, or None when it does not cover the model.

    `adapted`: tokens may have adapters.
    """
    if not (_is_here(weights) and covers(config, weights.dtype, specs)):
        return None
    arrays = ModelArrays.of(config, weights.dtype, embedding=embedding, blocks=blocks, rotary=rotary, norm=norm)
    if arrays is None:
        return None
    kind = (dtype_of(weights.dtype), config.head_dim, config.num_heads // config.num_kv_heads)
    return FusedStack(
        kernel=LateKernel(build_step_kernel, *kind),
        arrays=arrays,
        adapted=LateKernel(build_step_kernel, *kind, adapted=True) if adapted else None,
    )


def covers(config: ModelConfig, dtype: torch.dtype, specs: Sequence[AttentionSpec]) -> bool:
    """Whether the kernel computes such a model, where that is whole on a CPU and its projections are not quantized."""
    supported = dtype in (torch.float32, torch.bfloat16)
    return supported and is_plain(config, specs) and _has_whole_steps(config, dtype)


def is_plain(config: ModelConfig, specs: Sequence[AttentionSpec]) -> bool:
    """Whether the kernel has all that the model computes."""
    kinds, _ = distinct(specs)
    return (
        config.norm is NormKind.PLAIN
        and config.norm_placement is NormPlacement.BEFORE
        and config.qk_norm in (None, QkNorm.HEADS)
        and config.query_scale is None
        and not config.attention_sinks
        and config.residual_scale == 1.0
        and config.activation is Activation.SILU
        and config.moe is None
        and config.delta is None
        and config.varied is None
        and not config.output_gate
        and config.second_rope is None
        and config.embedding_scale == 1.0
        and len(kinds) == 1
        and kinds[0].soft_cap is None
        and kinds[0].value_width is None
    )


def _is_here(weights: Weights) -> bool:
    return weights.group.size == 1 and weights.device.type == "cpu"


def _has_whole_steps(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether no projection ends with a part of a step; an even number of inputs is all that it takes."""
    inputs = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    return all(each % steps_of(dtype) == 0 for each in inputs)
