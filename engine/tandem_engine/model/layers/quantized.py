"""Projections by weights of eight or four bits, which stay that in memory.

On a device kernels of Triton read them as they are (`kernels.quantized_gemm`, `kernels.quantized_moe`); on a CPU
compiled code reads int8 with one scale for each output (`int8_linear`). What has no kernel is put together in the
model's dtype by whoever reads it.
"""

import torch
from torch import Tensor

from tandem_engine.kernels.dispatch import by_triton
from tandem_engine.kernels.packed_weight import depth_for
from tandem_engine.model.layers.linear import Projection
from tandem_engine.model.quantization.levels import INT8_MIDDLE, Levels


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
        from tandem_engine.model.layers.on_device import DeviceQuantizedLinear

        on_device: Projection = DeviceQuantizedLinear.of(levels, bias, dtype)
        return on_device
    # Only an engine on a CPU needs numba.
    from tandem_engine.model.layers.int8_linear import Int8Linear

    return Int8Linear.of(levels, bias, dtype)
