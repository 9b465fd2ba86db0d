"""Matrix products that compiled code multiplies itself, without a call out of it.

    out = x Wᵀ        or, added:        out += x Wᵀ

W is cut into panels of `PANEL` outputs that lie together (`pack`), so a panel is read as one run of bytes. A tile of
`TILE_ROWS` rows of x by one panel is summed in registers (`attention.vectors`): each value of W that is loaded serves
all of its rows. The last rows come in tiles of 4, 2 and 1.

Every output is summed over the inputs in their order, whatever tile it falls into. So a row's result is the same to
the bit alone and in any batch.
"""

import numpy as np
import torch

from tandem_engine.attention.cpu_kernels import Array, inlined
from tandem_engine.attention.vectors import FLOAT_BYTES, PANEL, product

_ONES = np.ones(PANEL, np.float32)


def pack(weight: torch.Tensor) -> Array:
    """float32 W [out, in] as panels [out / PANEL, in, PANEL], a copy. `out` is a multiple of `PANEL`."""
    outputs, inputs = weight.shape
    assert outputs % PANEL == 0, f"{outputs} outputs are no multiple of {PANEL}"
    return np.ascontiguousarray(weight.float().numpy().reshape(-1, PANEL, inputs).transpose(0, 2, 1))


@inlined
def multiply(x: Array, panels: Array, out: Array, added: bool) -> None:
    """out [T, N] = x [T, K] times the panels [N / PANEL, K, PANEL] of a weight, on top of `out` when `added`.

    All are dense float32; `out` is not `x`. For compiled code.
    """
    rows, depth, outputs = x.shape[0], x.shape[1], out.shape[1]
    factor = _ONES.ctypes.data if added else 0
    for index in range(panels.shape[0]):
        target = out.ctypes.data + index * PANEL * FLOAT_BYTES
        product(x.ctypes.data, depth, 1, panels[index].ctypes.data, target, outputs, rows, depth, factor)
