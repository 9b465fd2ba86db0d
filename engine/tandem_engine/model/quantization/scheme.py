"""From `quantization_config` in a config.json, and `--quantization`, to the formats of weights in files and in memory.

Unknown settings are rejected. The format in memory is part of a model's identity: the same checkpoint held in two ways
computes KV that differs by roundings, or, once rounded to int8, by more. Pages are never exchanged between them.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import Quantization
from tandem_engine.kernels.interface import by_triton
from tandem_engine.model.checkpoint_files import StoredTensor
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.known_fields import MXFP4_ARCHITECTURE
from tandem_engine.model.quantization.compressed_tensors import CompressedTensors, Strategy
from tandem_engine.model.quantization.formats import Awq, Fp8Blocks, Gptq, Mxfp4
from tandem_engine.model.quantization.levels import Levels


class WeightFormat(Protocol):
    """How one matrix is stored as several tensors, which share a prefix."""

    @property
    def required(self) -> tuple[str, ...]:
        """Suffixes of the tensors that a matrix needs; a module that has the first of them is one."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Suffixes that it may have besides."""
        ...

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """[outputs, inputs] of the matrix. Raises `CheckpointError` unless all parts fit each other and the config."""
        ...

    def levels(self, parts: Mapping[str, Tensor]) -> Levels:
        """The matrix. Raises `ValueError` for contents that no writer would write."""
        ...


FIELD = "quantization_config"
MXFP4 = "mxfp4"
MXFP4_FIELDS = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})
"""Which modules are plain is what the tensors show, and `dequantize` is an option of the reader."""

MAX_GROUP = 1 << 20
MAX_BLOCK = 1 << 16
PACKED = "pack-quantized"

BLOCK = "block"
"""Strategy of compressed-tensors for float8 alone."""

FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized")


def read_scheme(fields: ConfigFields) -> WeightFormat | None:
    """The format that a config.json names; None for weights as they are.

    Raises:
        CheckpointError: a method, a number of bits or an option that is not supported; names the field.
    """
    if not fields.has(FIELD):
        return None
    quantization = fields.inner(FIELD)
    method = quantization.choice("quant_method", tuple(METHODS))
    has_mxfp4 = MXFP4_ARCHITECTURE in fields.items("architectures")
    if has_mxfp4 != (method == MXFP4):
        rule = f"must be {MXFP4} in a" if has_mxfp4 else f"may be {MXFP4} only in a"
        quantization.refuse("quant_method", f"{rule} {MXFP4_ARCHITECTURE}")
    return METHODS[method](quantization)


def _awq(fields: ConfigFields) -> Awq:
    fields.choice("version", ("gemm", "GEMM"), default="gemm")
    fields.integer("bits", least=4, most=4)
    if not fields.flag("zero_point", default=True):
        fields.refuse("zero_point", "must be true: weights without zero points are not supported")
    return Awq(group_size=_group_size(fields))


def _gptq(fields: ConfigFields) -> Gptq:
    bits = fields.integer("bits", least=2, most=8)
    if bits not in (2, 4, 8):
        fields.refuse("bits", "must be 2, 4 or 8")
    older = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), default="gptq") == "gptq"
    return Gptq(bits=bits, group_size=_group_size(fields), zero_offset=1 if older else 0)


def _fp8(fields: ConfigFields) -> Fp8Blocks:
    fields.choice("fmt", ("e4m3",), default="e4m3")
    rows, columns = _block(fields, "weight_block_size")
    return Fp8Blocks(rows=rows, columns=columns)


def _compressed_tensors(fields: ConfigFields) -> WeightFormat:
    groups = fields.inner("config_groups")
    if len(groups.values) != 1:
        fields.refuse("config_groups", "must have one group: several formats in one model are not supported")
    group = groups.inner(next(iter(groups.values)))
    packed = fields.choice("format", FORMATS) == PACKED
    weights = group.inner("weights")
    kind = weights.choice("type", ("int", "float"), default="int")
    bits = weights.integer("num_bits", least=2, most=8)
    if bits not in ((2, 4, 8) if packed else (8,)):
        weights.refuse("num_bits", "must be 2, 4 or 8 for packed weights, and 8 for others")
    if packed and kind == "float":
        weights.refuse("type", "must be int for packed weights")
    floating = kind == "float"
    named = weights.choice("strategy", (*Strategy, BLOCK) if floating else tuple(Strategy))
    if named == BLOCK:
        rows, columns = _block(weights, "block_structure")
        return Fp8Blocks(rows=rows, columns=columns, scales="weight_scale")
    strategy = Strategy(named)
    size = _group_size(weights) if strategy is Strategy.GROUP else -1
    return CompressedTensors(bits=bits, packed=packed, floating=floating, strategy=strategy, group_size=size)


def _block(fields: ConfigFields, name: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    sizes = fields.items(name)
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= MAX_BLOCK for size in sizes):
        fields.refuse(name, "must be two positive integers")
    rows, columns = (int(str(size)) for size in sizes)
    return rows, columns


def _group_size(fields: ConfigFields) -> int:
    """Inputs that share a scale; −1 for all of them."""
    size = fields.integer("group_size", least=-1, most=MAX_GROUP)
    if size == 0:
        fields.refuse("group_size", "must be -1, for all inputs, or above 0")
    return size


def _mxfp4(fields: ConfigFields) -> Mxfp4:
    for name, value in fields.values.items():
        if name not in MXFP4_FIELDS and value is not None:
            fields.refuse(name, f"is no option of {MXFP4} that is known")
    return Mxfp4()


METHODS: dict[str, Callable[[ConfigFields], WeightFormat]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    MXFP4: _mxfp4,
}


class Holding(StrEnum):
    """Of projections for which there is a kernel; all other matrices are in the model's dtype."""

    DTYPE = "dtype"
    PACKED = "packed"
    """As the checkpoint stores them."""
    INT8 = "int8"
    """With one scale for each output; plain matrices are rounded to that as they are read."""


def holding_of(requested: Quantization, scheme: WeightFormat | None, device: torch.device) -> Holding:
    """For a checkpoint stored by `scheme`. Raises `ConfigError` for int8 of what is quantized in another way."""
    match requested:
        case Quantization.INT8:
            if scheme is not None and not _is_int8(scheme):
                raise ConfigError(
                    "--quantization int8 takes checkpoints that are not quantized, or to int8 with a scale for each "
                    "output; for this one it can be auto or dequantize"
                )
            return Holding.INT8
        case Quantization.AUTO if scheme is not None and by_triton(device):
            return Holding.PACKED
        case _:
            return Holding.DTYPE


def described(scheme: WeightFormat | None, holding: Holding) -> str:
    """What identifies it; empty for plain weights in the model's dtype."""
    stored = "" if scheme is None else repr(scheme)
    return stored if holding is Holding.DTYPE else f"{stored} held {holding}".lstrip()


def _is_int8(scheme: WeightFormat) -> bool:
    return (
        isinstance(scheme, CompressedTensors)
        and not scheme.packed
        and not scheme.floating
        and scheme.strategy is not Strategy.GROUP
    )
