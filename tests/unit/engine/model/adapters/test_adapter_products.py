"""What adapters add to a product of few rows is that of plain numpy, and other rows keep their bits."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem_engine.forward.adapter_rows import AdapterRows, SlotRows
from tandem_engine.kernels.cpu.gemm import OUTPUTS
from tandem_engine.kernels.cpu.step_products import (
    EXPAND_OUTPUTS,
    PROJECTIONS,
    Adapters,
    add_to_panel,
    expand,
    shrink,
)
from tandem_engine.kernels.cpu.tensors import as_numbers
from tandem_engine.kernels.cpu.threads import PHASE_BYTES
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.adapters.weights import AdapterWeights
from tandem_engine.model.cpu.adapters import PRODUCTS, AdapterTables
from tandem_testing import cpu_kernel_reference as reference
from tandem_testing.adapters import random_adapter
from tandem_testing.compiled_pieces import calling
from tandem_testing.random_weights import small_config

TOKENS = 7
LISTS = ([5, 0, 3], [2], [6, 4])
"""Tokens of three adapters; token 1 has none."""

Floats = npt.NDArray[np.float64]


def with_adapters(x: Floats, sums: Floats, adapters: Sequence[AdapterWeights], layer: int, site: Site) -> Floats:
    parts = []
    for weights, tokens in zip(adapters, LISTS, strict=True):
        found = weights.sites.get((layer, site))
        for part in () if found is None else found.parts:
            a, b = found.a[part.rows].double().numpy(), part.b.double().numpy()
            parts.append((tokens, part.outputs, a, b, part.scale))
    return reference.product_with_adapters(x, sums, parts)


@pytest.mark.parametrize("halves", ["", "A", "B", "AB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_add_what_plain_numpy_does(dtype: torch.dtype, halves: str) -> None:
    shrink_rows, expand_rows, add = calling(shrink), calling(expand), calling(add_to_panel)
    # Gate and up are two tasks of `expand`, the border of which is among the outputs of up.
    inner = EXPAND_OUTPUTS // 2 + 76
    config = small_config(intermediate_size=inner)
    adapters = [
        random_adapter(config, seed=1, rank=8, dtype=dtype, halves=halves),
        random_adapter(config, seed=2, rank=1, dtype=dtype, layers=[1], modules=["k_proj", "up_proj"], halves=halves),
        random_adapter(config, seed=3, rank=37, dtype=dtype),
    ]
    rows = tuple(SlotRows(slot, torch.tensor(tokens)) for slot, tokens in enumerate(LISTS))
    tasks = AdapterTables().tasks_of(
        StepAdapters(rows=AdapterRows(tokens=rows, wanted=rows), slots=adapters),
        tokens=TOKENS,
        layers=2,
        outputs=2 * inner,
    )
    given = Adapters(each=tasks.each, tokens=tasks.tokens, low=tasks.low, delta=tasks.delta)
    dice = torch.Generator().manual_seed(4)
    sizes = ((1, Site.QKV, 64, 128), (0, Site.GATE_UP, 64, 2 * inner), (1, Site.DOWN, inner, 64))
    for layer, site, inputs, outputs in sizes:
        x = torch.randn((TOKENS, inputs), generator=dice).to(dtype)
        before = torch.randn((TOKENS, outputs), generator=dice).to(dtype).float()
        sums = np.zeros((TOKENS, OUTPUTS), np.float32)
        place, phases = layer * PROJECTIONS + PRODUCTS[site], np.zeros((2, PHASE_BYTES), np.uint8)
        shrink_rows(phases[0].ctypes.data, place, given, as_numbers(x))
        expand_rows(phases[1].ctypes.data, place, outputs, given)
        found = np.empty((TOKENS, outputs))
        for first in range(0, outputs, OUTPUTS):
            panel = slice(first, min(first + OUTPUTS, outputs))
            sums[:, : panel.stop - first] = before[:, panel]
            add(first, panel.stop - first, place, given, sums, as_numbers(x))
            found[:, panel] = sums[:, : panel.stop - first]
        expected = with_adapters(x.double().numpy(), before.double().numpy(), adapters, layer, site)
        within = 1e-5 if dtype is torch.float32 else 2**-5
        np.testing.assert_allclose(found, expected, atol=within, rtol=within)
        assert np.array_equal(found[1], before[1].numpy())
        assert np.abs(expected - before.numpy()).max() > 10 * within
