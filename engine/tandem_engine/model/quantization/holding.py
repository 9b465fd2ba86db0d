"""How a model's projections are held in memory: what `--quantization` comes to for a checkpoint and a device.

Which it is belongs to the identity of a model: the same checkpoint held in two ways computes KV that differs by
roundings, or, once rounded to int8, by more. Pages never go between them.
"""

from enum import StrEnum

import torch

from tandem_engine.config import Quantization
from tandem_engine.errors import ConfigError
from tandem_engine.kernels.dispatch import by_triton
from tandem_engine.model.quantization.compressed_tensors import CompressedTensors, Strategy
from tandem_engine.model.quantization.interface import WeightFormat


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
