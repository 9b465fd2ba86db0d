"""A decoder's arrays as the fused kernels take them.

The kernels read the memory of projections that consist of panels (`kernels.cpu.panels.in_place`). Of others they have a
copy, for models where these copies take at most `MAX_COPIED_BYTES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem_engine.config import ModelConfig
from tandem_engine.kernels.cpu.decoder_step import STEP
from tandem_engine.kernels.cpu.gemm import OUTPUTS
from tandem_engine.kernels.cpu.panels import Panels, pack, steps_of
from tandem_engine.kernels.cpu.pieces import Array
from tandem_engine.kernels.cpu.step_products import PROJECTION_COLUMNS, PROJECTIONS
from tandem_engine.kernels.cpu.tensors import as_numbers
from tandem_engine.model.layers.attention import RotaryTable, SelfAttention
from tandem_engine.model.layers.linear import (
    DenseTable,
    Embedding,
    Linear,
    PackedLinear,
    PanelTable,
    Projection,
    Table,
    TokenEmbedding,
)
from tandem_engine.model.layers.mlp import FeedForward
from tandem_engine.model.layers.norm import Norm, RmsNorm

if TYPE_CHECKING:
    from tandem_engine.model.blocks import Block


MAX_COPIED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArrays:
    """What the kernels need to know of a model of plain blocks."""

    config: ModelConfig
    dtype: torch.dtype
    embedding: TokenEmbedding
    blocks: "tuple[Block, ...]"
    constant: Array
    """[1] `STEP` with what is of the model."""
    norms: dict[str, Array]
    """float32, by their names in `STEP`; with a row for each layer, but for `norm`."""
    owned: tuple[object, ...]
    """What `constant` has the addresses of."""
    weight_bytes: int
    """Of all projections."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        embedding: TokenEmbedding,
        blocks: "Sequence[Block]",
        rotary: RotaryTable,
        norm: Norm,
    ) -> "ModelArrays | None":
        """None for a model of which too much would have to be copied, or whose projections are quantized."""
        projections = [
            part
            for block in blocks
            for part in (plain_attention(block).qkv, plain_attention(block).output, *_pair(block.feed_forward))
        ]
        if not all(isinstance(part, Linear | PackedLinear) for part in projections):
            return None
        if sum(_copied_bytes(part) for part in projections) > MAX_COPIED_BYTES:
            return None
        panels = [_panels(part) for part in projections]
        table, biases = _table(projections, panels)
        norms = _norms(blocks, norm)
        assert isinstance(embedding, Embedding), f"{type(embedding).__name__} on a single rank"
        arrays = {
            "angles": as_numbers(rotary.angles),
            "projections": table,
            **norms,
        }
        return cls(
            config=config,
            dtype=dtype,
            embedding=embedding,
            blocks=tuple(blocks),
            constant=_constant(config, arrays, _places(embedding.table)),
            norms=norms,
            owned=(arrays, biases, panels, embedding),
            weight_bytes=sum(part.count * part.bytes_each for part in panels),
        )


def _places(table: Table) -> dict[str, int]:
    """What `STEP` knows of an embedding."""
    if isinstance(table, PanelTable):
        panel, row, step = (steps_of(table.dtype) * stride for stride in table.words.stride())
        address, size = table.words.data_ptr(), len(table.words) * panel
    else:
        assert isinstance(table, DenseTable), f"{type(table).__name__} of a single rank"
        weight = table.weight
        row, step = weight.stride(0), steps_of(weight.dtype)
        address, panel, size = weight.data_ptr(), row * OUTPUTS, weight.numel()
    return {
        "vocabulary": len(table),
        "embedding": address,
        "embedding_size": size,
        "embedding_panel": panel,
        "embedding_row": row,
        "embedding_step": step,
    }


def _constant(config: ModelConfig, arrays: dict[str, Array], embedding: dict[str, int]) -> Array:
    constant = np.zeros(1, STEP)
    for name, number in embedding.items():
        constant[name] = number
    constant["num_layers"], constant["num_kv_heads"] = config.num_layers, config.num_kv_heads
    constant["size"], constant["inner"] = config.hidden_size, config.intermediate_size
    constant["num_positions"] = len(arrays["angles"])
    constant["eps"] = config.rms_eps
    for name, array in arrays.items():
        constant[name] = array.ctypes.data
    return constant


def _table(projections: Sequence[Projection], panels: Sequence[Panels]) -> tuple[Array, list[Array | None]]:
    """`projections` of `STEP`, and the biases that it points to."""
    biases = [_bias(part) for part in projections]
    table = [
        (part.address, part.bytes_each, 0 if bias is None else bias.ctypes.data)
        for part, bias in zip(panels, biases, strict=True)
    ]
    return np.array(table, np.int64).reshape(-1, PROJECTIONS, PROJECTION_COLUMNS), biases


def _norms(blocks: "Sequence[Block]", norm: Norm) -> dict[str, Array]:
    attention = [plain_attention(block) for block in blocks]
    norms = {
        "attention_norm": _norm_weights([part.norm for part in attention]),
        "feed_forward_norm": _norm_weights([_dense(block.feed_forward).norm for block in blocks]),
        "norm": _norm_weights([norm]),
    }
    head_norms = [part.qk_norm for part in attention if part.qk_norm is not None]
    return norms | {"head_norm": _norm_weights(head_norms)} if head_norms else norms


def plain_attention(block: "Block") -> SelfAttention:
    """Of a block that kernels compute."""
    part = block.attention
    assert isinstance(part, SelfAttention), f"{type(part).__name__} in a model of plain blocks"
    return part


def _dense(part: object) -> FeedForward:
    assert isinstance(part, FeedForward), f"{type(part).__name__} in a model without experts"
    return part


def _pair(part: object) -> tuple[Projection, Projection]:
    feed_forward = _dense(part)
    return feed_forward.gate_up, feed_forward.down


def _copied_bytes(projection: Projection) -> int:
    """Of the panels that the kernel would need for itself."""
    if isinstance(projection, PackedLinear):
        return 0 if projection.few is not None else projection.packed.numel() * projection.packed.itemsize
    return _plain(projection).weight.nbytes


def _panels(projection: Projection) -> Panels:
    if isinstance(projection, PackedLinear):
        return pack(projection.packed.to_dense()) if projection.few is None else projection.few.panels
    return pack(_plain(projection).weight)


def _plain(projection: Projection) -> Linear:
    assert isinstance(projection, Linear), f"{type(projection).__name__} on a single rank"
    return projection


def _norm_weights(norms: Sequence[Norm]) -> Array:
    """float32, one below the other."""
    return np.stack([_norm_weight(norm) for norm in norms])


def _norm_weight(norm: Norm) -> Array:
    assert isinstance(norm, RmsNorm), f"{type(norm).__name__} is no plain norm"
    return norm.weight.float().numpy()


def _bias(projection: Projection) -> Array | None:
    """float32"""
    bias = projection.bias if isinstance(projection, PackedLinear) else _plain(projection).bias
    return None if bias is None else bias.float().numpy()
