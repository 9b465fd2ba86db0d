"""Host tensors seen by numpy without a new reference to them.

A step begins with a little work on the arrays of its batch, and keeps the interpreter lock through it, for the
scheduler's thread waits for the lock with the results of the step before. Were it let go before the layers compute,
the scheduler would run first and the step wait, where both could run at once. torch lets go of it whenever a tensor's
Python object is freed, and `Tensor.numpy` makes one for the array to hold.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def borrowed(tensor: Tensor) -> npt.NDArray[Any]:
    """The int64 numbers of a dense host tensor. The caller keeps the tensor as long as the array."""
    assert tensor.dtype is torch.int64, f"{tensor.dtype} is not int64"
    assert tensor.is_contiguous(), f"strides of {tensor.stride()}"
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else bytearray()
    return np.ndarray(tuple(tensor.shape), np.int64, buffer=memory)
