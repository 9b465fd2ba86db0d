"""Tensors as compiled code sees them: numpy arrays of their memory.

Compiled code itself needs no torch (`kernels.cpu.numbers`), and the processes that compile it do not import it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_engine.kernels.cpu.pieces import Array


def as_numbers(tensor: torch.Tensor) -> Array:
    """The memory of a dense float32 or bfloat16 tensor, as kernels see it."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """As kernels see it."""
    return np.dtype(np.uint16 if dtype is torch.bfloat16 else np.float32)


SEEN_AS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.int8}


def as_array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's memory as numpy sees it."""
    seen = SEEN_AS.get(tensor.dtype)
    array: npt.NDArray[np.generic] = (tensor if seen is None else tensor.view(seen)).numpy()
    return array
