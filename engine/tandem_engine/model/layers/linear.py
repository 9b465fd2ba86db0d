"""Affine projections and token embeddings: plain, sharded over ranks, and with quantized weights.

    Linear, PackedLinear        checkpoints store [out, in], the layout of GEMMs on a GPU. On an x86 CPU a weight is
                                reordered once, at load, into oneDNN's blocked layout. oneDNN multiplies many tokens,
                                kernels that read the same memory a few (`kernels.cpu.gemm`)
    Embedding                   where a model also scores tokens by this table and it is in panels, a large table is in
                                memory once: rows are gathered from the panels
    RowParallel                 each rank multiplies its share of the inputs; the sum over the ranks is the product
    VocabularyEmbedding, -Head  each rank looks up, or scores, its own range of token ids
    quantized_projection        weights of eight or four bits that stay so in memory

Sharded layers give every rank the whole result, with the same bits. Column-parallel projections need no special layer:
a rank computes its share of the outputs, which is exactly the share of inputs of the next row-parallel projection.

Triton kernels read quantized weights as stored (`kernels.triton.quantized_gemm`, `kernels.triton.quantized_moe`); on a
CPU compiled code reads int8 with one scale for each output (`cpu`). Weights without such a kernel are converted to the
model's dtype when they are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.kernels.interface import by_triton, depth_for
from tandem_engine.model.quantization.levels import INT8_MIDDLE, Levels
from tandem_engine.parallel.group import TpGroup

if TYPE_CHECKING:
    from tandem_engine.kernels.cpu.panels import PanelLinear, Panels


Projection = Callable[[Tensor], Tensor]
"""[T, in] to [T, out]."""


class Delta(Protocol):
    """What adapters add to a product."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Add to rows of `out`, in place, what adapters make of these rows of `x`. Padding stays as it is."""
        ...

    def columns(self, first: int, stop: int) -> "Delta":
        """Of outputs [first, stop) alone, where those of a site come from several products. No part crosses a bound."""
        ...


def project(projection: Projection, x: Tensor, delta: Delta | None) -> Tensor:
    """`projection` of `x`, and what adapters add to it."""
    if delta is None:
        return projection(x)
    if isinstance(projection, RowParallel):
        # Before the sum: what each rank's inputs add is summed with what they are multiplied to.
        return projection.group.all_reduce(project(projection.local, x, delta))
    if isinstance(projection, ScaledProjection):
        return project(projection.projection, x, delta).mul_(projection.factor)
    out = projection(x)
    delta(x, out)
    return out


TYPICAL_TOKENS = 32
"""Batch that the blocked layout is chosen for. 32 and 256 choose the same; 1 chooses one that only suits 1."""

FEW_TOKENS = 32
"""So many at most take our own kernel, which is 10 to 15 % slower from 8 on; with more, oneDNN's lead would grow."""

NEAR_TOKENS, NEAR, FAR = 128, 4, 32
"""oneDNN compiles its product again for each number of rows, which takes as long as the product itself. So it is given
multiples of `NEAR` up to `NEAR_TOKENS`, which batches of decodes have, and of `FAR` beyond."""

MIN_PACKED_ELEMENTS = 1 << 16
"""Below, the ten microseconds that a packed call costs beyond `F.linear` outweigh what it saves."""


def padded_tokens(tokens: int) -> int:
    """As how many tokens a number of them is multiplied: what is behind them costs little and means nothing."""
    if tokens <= FEW_TOKENS:
        return tokens
    multiple = NEAR if tokens <= NEAR_TOKENS else FAR
    return -(-tokens // multiple) * multiple


def projection(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """x Wᵀ + b for W [out, in] and b [out]. May keep a reordered copy of W instead of W."""
    if _packing_pays(weight):
        return PackedLinear.pack(weight, bias)
    return Linear(weight=weight, bias=bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """The weight as stored."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinear:
    """The weight in oneDNN's blocked layout, multiplied by the operator `torch.compile` uses for frozen weights."""

    packed: Tensor
    bias: Tensor | None
    few: "PanelLinear | None"
    """The same for `FEW_TOKENS` at most, out of the same memory, where its layout is one that our kernels read."""

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> "PackedLinear":
        # Only an engine on a CPU needs numba.
        from tandem_engine.kernels.cpu.panels import panel_linear

        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)
        return cls(packed=packed, bias=bias, few=panel_linear(packed, weight, bias))

    def __call__(self, x: Tensor) -> Tensor:
        tokens = len(x)
        if self.few is not None and tokens <= FEW_TOKENS:
            return self.few(x)
        padded = padded_tokens(tokens)
        if padded != tokens:
            x = F.pad(x, (0, 0, 0, padded - tokens))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out if padded == tokens else out[:tokens]


def _packing_pays(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < MIN_PACKED_ELEMENTS:
        return False
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


TokenEmbedding = Callable[[Tensor], Tensor]
"""[T] int64 to a fresh [T, hidden] that the caller may write to."""

MIN_SHARED_BYTES = 16 << 20
"""Of a table. A row in panels is a cache line for each word or two; below, memory is not worth even that."""


class Table(Protocol):
    """[rows, hidden]"""

    def __len__(self) -> int: ...

    def __call__(self, rows: Tensor) -> Tensor:
        """[T] int64, each a row of the table, to a fresh [T, hidden]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTable:
    """Implements `Table`: row after row."""

    weight: Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelTable:
    """Implements `Table`: the weight of a projection to its rows."""

    panels: "Panels"
    words: Tensor
    """int32 [panels, outputs of a panel, words of a row], of the same memory."""
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.panels.outputs

    def __call__(self, rows: Tensor) -> Tensor:
        width = self.words.shape[1]
        # Behind the last row there are others, of zeros.
        least, most = torch.aminmax(rows) if len(rows) else (0, 0)
        if not 0 <= int(least) <= int(most) < len(self):
            raise IndexError(f"token ids {int(least)} to {int(most)} lie outside of the table's {len(self)} rows")
        return self.words[rows // width, rows % width].view(self.dtype)


def table_of(weight: Tensor, scores: Projection | None) -> Table:
    """The rows of `weight`; `scores` is the projection by the same weight, if there is one."""
    few = scores.few if isinstance(scores, PackedLinear) else None
    if few is None or weight.nbytes < MIN_SHARED_BYTES:
        return DenseTable(weight=weight)
    return PanelTable(panels=few.panels, words=few.panels.words(weight.dtype), dtype=weight.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """Implements `TokenEmbedding`: rows of a [vocab, hidden] table."""

    table: Table
    scale: Tensor | None = None
    """Factor of the rows, a scalar in the table's dtype: rounded as transformers rounds it."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self.table(token_ids)
        return rows if self.scale is None else rows.mul_(self.scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParallel:
    """Implements `Projection`: [T, in / size] of each rank to [T, out]."""

    local: Projection
    """With the bias on rank 0 alone, so that it is added once."""
    group: TpGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.local(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyEmbedding:
    """Looks up token ids of which this rank holds a range."""

    table: Table
    """[vocab share, hidden]"""
    start: int
    """Token id of the first row."""
    group: TpGroup
    scale: Tensor | None = None
    """As in `Embedding`."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to a fresh [T, hidden]. Exact: all but one rank contribute zero to each row."""
        local = token_ids - self.start
        elsewhere = (local < 0) | (local >= len(self.table))
        rows = self.table(local.masked_fill_(elsewhere, 0))
        self.group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0.0))
        return rows if self.scale is None else rows.mul_(self.scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyHead:
    """Implements `Projection`: hidden states [N, hidden] to logits [N, vocab], from each rank's range."""

    local: Projection
    """To [N, vocab share]."""
    vocab_size: int
    """The padding behind it is cut off."""
    group: TpGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_gather(self.local(x))[:, : self.vocab_size].contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledProjection:
    """Implements `Projection`: another one, whose results are multiplied by a factor."""

    projection: Projection
    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.projection(x).mul_(self.factor)


def can_multiply(levels: Levels, device: torch.device) -> bool:
    """Whether there is a kernel for such a matrix on `device`."""
    if by_triton(device):
        in_order = levels.groups is None or levels.sorted() is not None
        paired = not levels.is_float8 and levels.bits < 8
        return in_order and depth_for(levels.shape[1], levels.group_size, paired=paired) is not None
    one_scale = levels.scales.shape[1] == 1 and levels.groups is None
    # In bfloat16 inputs go in pairs.
    even = levels.shape[1] % 2 == 0
    return device.type == "cpu" and levels.bits == 8 and one_scale and even and levels.zeros_are(INT8_MIDDLE)


def quantized_projection(levels: Levels, bias: Tensor | None, dtype: torch.dtype) -> Projection:
    """x Wᵀ + b for x of `dtype` and a matrix that `can_multiply` has accepted, where its tensors lie."""
    if by_triton(levels.codes.device):
        # Only an engine on a device needs Triton.
        from tandem_engine.model.layers.triton import DeviceQuantizedLinear

        on_device: Projection = DeviceQuantizedLinear.of(levels, bias, dtype)
        return on_device
    # Only an engine on a CPU needs numba.
    from tandem_engine.model.layers.cpu import Int8Linear

    return Int8Linear.of(levels, bias, dtype)
