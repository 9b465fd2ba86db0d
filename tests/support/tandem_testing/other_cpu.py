"""What a CPU without AVX-512 computes, in a process to which `tools/as_cpu.sh` presents one.

tools/as_cpu.sh avx2 python -m tandem_testing.other_cpu products attention
"""

import sys

import numpy as np
import torch

from tandem_engine.kernels.cpu.pieces import compiled_kernel
from tandem_engine.kernels.cpu.vectors import LANES, MULTIPLIES_PAIRS, PANEL, TILE_ROWS, product, product_of_pairs
from tandem_engine.model.attention.cpu import CpuAttention
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_testing.forward_builders import NUM_HEADS, PLAIN, PageDealer, make_batch, make_pool, make_qkv

DEPTH, ROWS = 37, TILE_ROWS + 3


def attention() -> None:
    """Prompts, chunks and decodes over pages, as torch computes them."""
    pools = [make_pool(num_pages=320) for _ in range(2)]
    dealer = PageDealer(pool=pools[0])
    sequences = [dealer.seq(45, 12), dealer.seq(40, 1), dealer.decode(1), dealer.decode(64)]
    batch, qkv = make_batch(sequences), make_qkv(sum(seq.extend_len for seq in sequences))
    expected = TorchReferenceBackend(pools[0], specs=PLAIN).plan(batch)(1, *qkv)
    found = CpuAttention(pools[1], num_heads=NUM_HEADS, specs=PLAIN).plan(batch)(1, *qkv)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def products() -> None:
    """Of all sizes of tiles, in float32 and in pairs of bfloat16."""

    @compiled_kernel
    def multiply(x, panel, out, factor):
        product(
            x.ctypes.data, x.shape[1], 1, panel.ctypes.data, out.ctypes.data, out.shape[1],
            x.shape[0], x.shape[1], factor,
        )  # fmt: skip

    @compiled_kernel
    def multiply_pairs(x, panel, out, factor):
        product_of_pairs(
            x.ctypes.data, x.shape[1], 1, panel.ctypes.data, out.ctypes.data, out.shape[1],
            x.shape[0], x.shape[1], factor,
        )  # fmt: skip

    dice = np.random.default_rng(0)
    x, panel = dice.standard_normal((ROWS, DEPTH), np.float32), dice.standard_normal((DEPTH, PANEL), np.float32)
    out = np.empty((ROWS, PANEL), np.float32)
    multiply(x, panel, out, 0)
    np.testing.assert_allclose(out, x @ panel, rtol=1e-4, atol=1e-4)
    rows, columns = (
        torch.from_numpy(dice.standard_normal(shape, np.float32)).bfloat16()
        for shape in ((ROWS, 2 * DEPTH), (DEPTH, PANEL, 2))
    )
    multiply_pairs(words_of(rows).reshape(ROWS, DEPTH), words_of(columns).reshape(DEPTH, PANEL), out, 0)
    expected = rows.double() @ columns.double().transpose(1, 2).reshape(2 * DEPTH, PANEL)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-3)


def words_of(numbers: torch.Tensor) -> np.ndarray:
    """Pairs of bfloat16 as words of 32 bits."""
    return numbers.view(torch.int16).numpy().view(np.uint32)


CHECKS = {check.__name__: check for check in (products, attention)}


def main() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    lanes = 16 if capability == "AVX512" else 8
    assert (lanes, False) == (LANES, MULTIPLIES_PAIRS), f"{LANES} lanes, pairs {MULTIPLIES_PAIRS} on {capability}"
    for name in sys.argv[1:]:
        CHECKS[name]()
    sys.stdout.write(f"{', '.join(sys.argv[1:])} agree on {capability}\n")


if __name__ == "__main__":
    main()
