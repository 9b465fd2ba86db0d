"""Products of rows with one panel of an int8 weight (`panels.pack_int8`): a quarter of the bytes of float32.

A block of the panel becomes float32, or pairs of bfloat16, in the first cache, which is exact, and is multiplied there
like any other (`tiles`). A few tokens are bound by how fast a weight comes from memory, so widening costs them nothing;
many share it. Sums are taken in the order of the inputs, so a row's result is the same to the bit in any batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types as numba_types
from numba.extending import overload

from tandem_engine.attention.phases import array_at
from tandem_engine.attention.pieces import kernel_piece_options
from tandem_engine.model.fused.numbers import cut
from tandem_engine.model.fused.panels import OUTPUTS, WORD_BYTES
from tandem_engine.model.fused.tiles import block_adder

types: Any = numba_types

BLOCK = 64
"""Steps that are widened together: 16 KiB."""


def multiply_int8_panel(x: Any, panel: Any, sums: Any) -> Any:
    """As `tiles.multiply_panel`, where the panel has a byte for each number. For compiled code."""
    raise NotImplementedError("multiply_int8_panel is for compiled code")


def _multiplier(number: type[np.generic], *, pairs: bool) -> Callable[[Any, Any, Any], None]:
    add_block, numbers_of_step = block_adder(pairs=pairs), OUTPUTS * (2 if pairs else 1)

    # numba wants the very same signature, annotations included, of the stub, the chooser and the choices.
    def multiply(x: Any, panel: Any, sums: Any) -> Any:
        rows, steps = x.shape[0], x.shape[1] * x.itemsize // WORD_BYTES
        wide = np.empty(BLOCK * numbers_of_step, number)
        sums[:rows] = np.float32(0.0)
        for first in range(0, steps, BLOCK):
            count = min(BLOCK, steps - first)
            codes = array_at(panel + first * numbers_of_step, (count * numbers_of_step,), types.int8)
            for i in range(count * numbers_of_step):
                wide[i] = cut(np.float32(codes[i]), wide)
            add_block(x.ctypes.data + first * WORD_BYTES, steps, wide.ctypes.data, sums.ctypes.data, count, rows)

    return multiply


_multiply_floats, _multiply_pairs = _multiplier(np.float32, pairs=False), _multiplier(np.uint16, pairs=True)


@overload(multiply_int8_panel, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _multiply_of_dtype(x: Any, panel: Any, sums: Any) -> Any:  # noqa: ARG001
    return _multiply_floats if x.dtype == types.float32 else _multiply_pairs
