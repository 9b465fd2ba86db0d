"""Numbers that numpy does not know, as the integers that compiled loops take their bits from.

bfloat16       uint16   the upper half of a float32
float8 e4m3    uint8    each code stands for a float32, by a table of 256
float8 e5m2    int8     the same; signed only to be told apart
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SEEN_AS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.int8}


def as_array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's memory as numpy sees it."""
    seen = SEEN_AS.get(tensor.dtype)
    array: npt.NDArray[np.generic] = (tensor if seen is None else tensor.view(seen)).numpy()
    return array


def bits_of_codes(dtype: torch.dtype) -> npt.NDArray[np.uint32]:
    """uint32 [256]: the bits of the float32 that each code of a type of 8 bits stands for."""
    bits: npt.NDArray[np.uint32] = torch.arange(256).to(torch.uint8).view(dtype).float().numpy().view(np.uint32)
    return bits
