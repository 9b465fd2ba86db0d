"""Experts of gpt-oss: biases, a clamped gate and numbers of four bits, against float64 and as blocks of a decoder."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tandem_engine.config import Quantization
from tandem_engine.kernels.interface import PACKED_E2M1, PackedWeight
from tandem_engine.kernels.triton import expert_tiles, fused_moe, quantized_gemm, quantized_moe
from tandem_engine.kernels.triton.fused_moe import ExpertBiases
from tandem_engine.kernels.triton.norm_activation import CLAMPED_SWIGLU, Clamp, product_constants
from tandem_engine.model.layers.triton_experts import DeviceExperts
from tandem_testing.mxfp4_files import write_random_mxfp4
from tandem_testing.triton_kernels.ahead_of_time import SHARED_LIMIT, compile_kernel
from tandem_testing.triton_kernels.checks import HOPPER
from tandem_testing.triton_kernels.expert_kernels import layers_by_kernels, logits_through
from tandem_testing.triton_kernels.quantized_expert_kernels import EXPERTS, FEW, MANY, agrees, levels_of_experts
from tandem_testing.triton_kernels.quantized_kernels import loaded, only_for, shape_alone
from tandem_testing.triton_kernels.tensors import random_floats

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
CLAMP = Clamp(alpha=1.702, limit=0.5)
"""A limit that binds."""
GPT_OSS = Clamp(alpha=1.702, limit=7.0)


def biases_of(inner: int, hidden: int, dtype: torch.dtype, device: str) -> ExpertBiases:
    return ExpertBiases(
        random_floats(EXPERTS, 2 * inner, seed=8, dtype=dtype, device=device, scale=0.3),
        random_floats(EXPERTS, hidden, seed=9, dtype=dtype, device=device, scale=0.3),
    )


def check_packed_experts_with_biases_and_a_clamp(device: str) -> None:
    gate_up = levels_of_experts(PACKED_E2M1, 128, 192, 32, symmetric=True)
    down = levels_of_experts(PACKED_E2M1, 192, 64, 32, symmetric=True, seed=2)
    for dtype, tokens in ((FLOAT32, FEW), (BFLOAT16, MANY)):
        biases = biases_of(64, 192, dtype, device)
        agrees(
            device, dtype, gate_up, down, tokens=tokens, activation=CLAMPED_SWIGLU, biases=biases, clamp=CLAMP
        )  # fmt: skip


def check_plain_experts_with_biases_and_a_clamp(device: str) -> None:
    """Down of a rank that is not the first has no bias."""
    levels = levels_of_experts(PACKED_E2M1, 48, 72, 8, symmetric=True)
    gate_up = [each.values() for each in levels]
    down = [each.values() for each in levels_of_experts(PACKED_E2M1, 72, 24, 8, symmetric=True, seed=2)]
    biases = biases_of(24, 72, FLOAT32, device)
    for given in (biases, biases._replace(down=None)):
        agrees(
            device, FLOAT32, gate_up, down, tokens=FEW, activation=CLAMPED_SWIGLU, biases=given, clamp=CLAMP
        )  # fmt: skip


def check_a_clamp_lets_nan_through(device: str) -> None:
    x = torch.ones(1, 64, device=device)
    gate_up = torch.full((1, 64, 64), torch.nan, device=device)
    down = torch.ones(1, 64, 32, device=device)
    chosen = torch.zeros((1, 1), dtype=torch.int64, device=device), torch.ones(1, 1, device=device)
    out = fused_moe.fused_experts(x, *chosen, gate_up, down, activation=CLAMPED_SWIGLU, clamp=CLAMP)
    assert out.isnan().all()


def check_decoders_of_mxfp4_files_are_those_of_their_values(device: str) -> None:
    with TemporaryDirectory(prefix="tandem-mxfp4-") as folder:
        write_random_mxfp4(Path(folder))
        plain = loaded(folder, Quantization.DEQUANTIZE, "cpu")
        with layers_by_kernels(device):
            model = loaded(folder, Quantization.AUTO, device)
            found, written = logits_through(model, device)
        experts = model.blocks[-1].feed_forward
        assert isinstance(experts, DeviceExperts)
        for stack in (experts.weights.gate_up, experts.weights.down):
            assert isinstance(stack, PackedWeight)
            assert (stack.coding, stack.scales.dtype) == (PACKED_E2M1, BFLOAT16)
    expected, stored = logits_through(plain, "cpu")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(written, stored, rtol=1e-4, atol=1e-4)


def compile_packed_experts_of_gpt_oss(arch: int) -> None:
    """32 of 2880 on 2880, 4 for a token, in groups of 32."""
    few, many = quantized_moe.FEW, quantized_moe.MANY_OF_SMALL_GROUPS
    numbers = dict.fromkeys(("outputs", "inputs", "row_bytes", "group_size"), "i32:16")
    types = {
        **dict.fromkeys(("x", "inner", "results", "scales", "bias"), "*bf16:16"),
        **dict.fromkeys(("codes", "zeros"), "*u8:16"),
        **dict.fromkeys(("pairs", "owner"), "*i32:16"),
        **numbers,
        **dict.fromkeys(("num_rows", "num_pairs", "groups"), "i32"),
    }
    for tiles in (few, many):
        for kernel, tile in (
            (quantized_moe.packed_gate_up_kernel, tiles.gate_up),
            (quantized_moe.packed_down_kernel, tiles.down),
        ):
            constants: dict[str, Any] = quantized_gemm.constants_of(shape_alone(PACKED_E2M1, 32, symmetric=True))
            constants |= {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "CHOSEN": 4}
            constants |= product_constants(CLAMPED_SWIGLU, GPT_OSS)
            built = compile_kernel(
                kernel, *only_for(kernel, types, constants), arch=arch, num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )  # fmt: skip
            built.assert_fits()
            assert "cp.async.c" in built.ptx, built.what
            assert ("wgmma" if arch == HOPPER else "mma.sync") in built.ptx, built.what


def compile_plain_experts_of_gpt_oss(arch: int) -> None:
    types = {
        **dict.fromkeys(("x", "weight", "inner", "results", "bias"), "*bf16:16"),
        **dict.fromkeys(("pairs", "owner"), "*i32:16"),
        "num_pairs": "i32",
    }
    gate = product_constants(CLAMPED_SWIGLU, GPT_OSS)
    for tiles in expert_tiles.every_tile(BFLOAT16, shared_bytes=SHARED_LIMIT[arch]):
        for kernel, shape, tile in (
            (fused_moe.gate_up_kernel, fused_moe.gate_up_shape(4, 2880, 2880, gate), tiles.gate_up),
            (fused_moe.down_kernel, fused_moe.down_shape(2880, 2880), tiles.down),
        ):
            constants = shape | fused_moe.tile_constants(tiles.rows, tile)
            built = compile_kernel(
                kernel, *only_for(kernel, types), constants, arch=arch, num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )  # fmt: skip
            built.assert_fits()
