"""A token by the gated delta rule: against float64, in company, and compiled for the shapes of real models."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.kernels.interface import DeltaWeights
from tandem_engine.kernels.triton.delta_step import delta_constants, delta_step, delta_step_kernel, warps_of
from tandem_engine.memory.state_pool import StatePool, StateSpec
from tandem_testing.triton_kernels.ahead_of_time import compile_kernel
from tandem_testing.triton_kernels.tensors import random_floats

TAPS, EPS, SLOTS = 4, 1e-6, 6
LAYER = 1
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Of outputs whose mean square is 1, times a gate."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Of a layer."""

    keys: int = 2
    values: int = 6
    key_size: int = 12
    value_size: int = 20
    dtype: torch.dtype = torch.float32

    @property
    def key_width(self) -> int:
        return self.keys * self.key_size

    @property
    def value_width(self) -> int:
        return self.values * self.value_size

    @property
    def channels(self) -> int:
        return 2 * self.key_width + self.value_width


@dataclass(kw_only=True)
class Layer:
    """One of two layers of a pool, and its numbers."""

    heads: Heads
    weights: DeltaWeights
    pool: StatePool
    device: str

    @classmethod
    def make(cls, heads: Heads, device: str) -> "Layer":
        def floats(*shape: int, seed: int) -> Tensor:
            return random_floats(*shape, seed=seed, dtype=torch.float32, device=device)

        spec = StateSpec(
            layers=2,
            history=TAPS - 1,
            channels=heads.channels,
            heads=heads.values,
            key_size=heads.key_size,
            value_size=heads.value_size,
            dtype=heads.dtype,
        )
        pool = StatePool(spec, rows=SLOTS - 1, device=device)
        pool.inputs.copy_(floats(*pool.inputs.shape, seed=1))
        pool.matrices.copy_(floats(*pool.matrices.shape, seed=2))
        weights = DeltaWeights(
            conv=floats(TAPS, heads.channels, seed=3),
            decay=-floats(heads.values, seed=4).exp(),
            bias=floats(heads.values, seed=5),
            norm=floats(heads.value_size, seed=6),
            eps=EPS,
        )
        return cls(heads=heads, weights=weights, pool=pool, device=device)

    def token(self, rows: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Projections of a token of each of so many sequences, further apart than they are wide."""
        heads = self.heads
        width = heads.channels + heads.value_width
        made = random_floats(rows, width + 7, seed=seed, dtype=heads.dtype, device=self.device)
        rates = random_floats(rows, 2 * heads.values, seed=seed + 1, dtype=heads.dtype, device=self.device, scale=12.0)
        return made[:, :width], rates

    def step(self, projected: Tensor, rates: Tensor, rows: Tensor, fresh: Tensor) -> Tensor:
        inputs, matrices = self.pool.inputs[:, LAYER], self.pool.matrices[:, LAYER]
        return delta_step(projected, rates, inputs, matrices, rows, fresh, self.weights)

    def expected(self, projected: Tensor, rates: Tensor, rows: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, inputs and matrices of the sequences, in float64."""
        heads = self.heads
        conv, decay, bias, norm = (each.double() for each in self.weights[:4])
        weights = DeltaWeights(conv, decay, bias, norm, self.weights.eps)
        shape = (-1, heads.values, heads.value_size)
        mixed, z = projected.double().split_with_sizes((heads.channels, heads.value_width), dim=1)
        old = self.pool.inputs[rows, LAYER].double().masked_fill(fresh[:, None, None], 0.0)
        state = self.pool.matrices[rows, LAYER].double().masked_fill(fresh[:, None, None, None], 0.0)
        window = torch.cat((old, mixed[:, None]), dim=1)
        rounded = F.silu((window * weights.conv).sum(1)).float().to(heads.dtype).double()
        q, k, v = rounded.split_with_sizes((heads.key_width, heads.key_width, heads.value_width), dim=1)
        q, k = (
            F.normalize(each.view(-1, heads.keys, heads.key_size), dim=-1).repeat_interleave(
                heads.values // heads.keys, dim=1
            )
            for each in (q, k)
        )
        b, a = rates.double().chunk(2, dim=1)
        state = state * (weights.decay * F.softplus(a + weights.bias)).exp()[..., None, None]
        change = (v.view(shape) - torch.einsum("nhk,nhkv->nhv", k, state)) * b.sigmoid()[..., None]
        state = state + k[..., None] * change[:, :, None]
        read = torch.einsum("nhk,nhkv->nhv", q, state) * heads.key_size**-0.5
        normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + EPS) * weights.norm
        return (normed * F.silu(z).view(shape)).flatten(1), window[:, 1:], state


def check_tokens_of_sequences_and_of_fresh_ones(device: str) -> None:
    """One token after the other. What a fresh sequence's slot holds is no number; other slots and layers stay."""
    for heads in (Heads(), Heads(keys=3, values=3, key_size=16, value_size=8), Heads(dtype=torch.bfloat16)):
        layer = Layer.make(heads, device)
        rows, fresh = torch.tensor([4, 1, 3], device=device), torch.tensor([False, True, False], device=device)
        layer.pool.bytes_view()[1] = 0xFF
        before = layer.pool.bytes_view().clone()
        for seed in (10, 20, 30):
            projected, rates = layer.token(3, seed=seed)
            expected, inputs, matrices = layer.expected(projected, rates, rows, fresh)
            found = layer.step(projected, rates, rows, fresh)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[heads.dtype] * 4)
            assert torch.equal(layer.pool.inputs[rows, LAYER].double(), inputs)
            torch.testing.assert_close(layer.pool.matrices[rows, LAYER].double(), matrices, rtol=0, atol=2e-5)
            fresh = torch.zeros_like(fresh)
        assert torch.equal(layer.pool.bytes_view()[[0, 2, 5]], before[[0, 2, 5]])
        for kept, part in ((layer.pool.inputs, 0), (layer.pool.matrices, 0)):
            assert kept[[3, 4], part].isfinite().all()
        spare = replace(layer, pool=StatePool(layer.pool.spec, rows=SLOTS - 1, device=device))
        spare.pool.bytes_view().copy_(before)
        assert torch.equal(layer.pool.matrices[[3, 4], 0], spare.pool.matrices[[3, 4], 0])


def check_company_changes_no_bit(device: str) -> None:
    together, alone = (Layer.make(Heads(), device) for _ in range(2))
    rows, fresh = torch.tensor([5, 2], device=device), torch.zeros(2, dtype=torch.bool, device=device)
    projected, rates = together.token(2, seed=40)
    found = together.step(projected, rates, rows, fresh)
    for index in range(2):
        part = slice(index, index + 1)
        assert torch.equal(alone.step(projected[part], rates[part], rows[part], fresh[part]), found[part])
    assert torch.equal(alone.pool.bytes_view(), together.pool.bytes_view())


def compile_for_qwen3_next_and_qwen35(arch: int) -> None:
    """Whole, a rank of four, and keys and values of unequal sizes."""
    for keys, values, key_size, value_size in ((16, 32, 128, 128), (4, 8, 128, 128), (2, 6, 12, 20)):
        constants = delta_constants(keys=keys, values=values, key_size=key_size, value_size=value_size)
        compile_kernel(
            delta_step_kernel,
            {
                **dict.fromkeys(("projected", "inputs", "out"), "*bf16:16"),
                "rates": "*bf16",
                **dict.fromkeys(("matrices", "conv", "decay", "bias", "weight"), "*fp32:16"),
                "rows": "*i64",
                "fresh": "*u8",
                "eps": "fp32",
                **dict.fromkeys(("projected_stride", "rates_stride", "inputs_stride", "matrices_stride"), "i32:16"),
            },
            {**constants, "TAPS": TAPS},
            arch=arch,
            num_warps=warps_of(constants),
        ).assert_fits()
