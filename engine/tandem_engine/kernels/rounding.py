"""Numbers as a tensor of the model's dtype would hold them, without the tensor.

transformers computes a block operation by operation, each of which rounds its result to the model's dtype. A kernel
that fuses operations keeps float32 in registers and rounds at the same places, so that it gives the same tokens.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """`x` in float32, rounded to DTYPE and back."""
    return x.to(DTYPE).to(x.dtype)
