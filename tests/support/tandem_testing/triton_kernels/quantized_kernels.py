"""Products by quantized weights against float64, alone and in company, and as layers of a decoder."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tandem_engine.config import Quantization
from tandem_engine.kernels.interface import INT4, INT8, PACKED_E2M1, PACKED_FLOAT8, PAIRED, PackedWeight
from tandem_engine.kernels.triton import quantized_gemm
from tandem_engine.kernels.triton.quantized_gemm import quantized_linear
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.decoder import Decoder
from tandem_engine.model.layers.mlp import FeedForward
from tandem_engine.model.layers.triton import DeviceQuantizedLinear, packed_weight
from tandem_engine.model.loader import load_model
from tandem_engine.model.quantization.levels import Levels
from tandem_testing.quantized_files import KERNEL_KINDS, write_quantized
from tandem_testing.triton_kernels.ahead_of_time import compile_kernel
from tandem_testing.triton_kernels.checks import HOPPER
from tandem_testing.triton_kernels.expert_kernels import layers_by_kernels, logits_through
from tandem_testing.triton_kernels.tensors import random_floats, units_apart

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
CODINGS = (INT4, INT8, PACKED_FLOAT8)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}


def random_levels(coding: str, outputs: int, inputs: int, group_size: int, *, symmetric: bool, seed: int = 1) -> Levels:
    """Every code occurs; scales are positive and of several sizes."""
    dice = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group_size)
    scales = torch.rand((outputs, groups), generator=dice) * 0.02 + 0.001
    bits = 4 if coding in PAIRED else 8
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=dice, dtype=torch.uint8)
    if coding == PACKED_E2M1:
        return Levels(bits=4, codes=codes, scales=scales.bfloat16(), zeros=None, group_size=group_size)
    if coding == PACKED_FLOAT8:
        codes[(codes & 0x7F) == 0x7F] = 0x42
        return Levels(bits=8, codes=codes.view(torch.float8_e4m3fn), scales=scales, zeros=None, group_size=group_size)
    zeros = torch.randint(0, 1 << bits, (outputs, groups), generator=dice, dtype=torch.uint8)
    zeros = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
    return Levels(bits=bits, codes=codes, scales=scales.half(), zeros=zeros, group_size=group_size)


def packed(levels: Levels, device: str) -> PackedWeight:
    return packed_weight(levels.to(torch.device(device))).lean()


def product_agrees(
    device: str, dtype: torch.dtype, levels: Levels, *, tokens: int, bias: bool = False, seed: int = 5
) -> None:
    """Within the rounding of the result, and of float32 sums."""
    outputs, inputs = levels.shape
    x = random_floats(tokens, inputs, seed=seed, dtype=dtype, device=device)
    added = random_floats(outputs, seed=seed + 1, dtype=dtype, device=device) if bias else None
    found = quantized_linear(x, packed(levels, device), added)
    exact = x.double().cpu() @ levels.values().double().t()
    if added is not None:
        exact += added.double().cpu()
    size = float(exact.abs().mean())
    if dtype is FLOAT32:
        assert float((found.double().cpu() - exact).abs().max()) <= 4e-6 * size * inputs**0.5
    else:
        # Half a unit of the last place, and a little for sums that end near the middle between two numbers.
        assert units_apart(found, exact.to(dtype), at_least=size / 8) <= 1.0


def check_products_of_all_codings(device: str) -> None:
    for coding in CODINGS:
        for dtype, symmetric in ((FLOAT32, True), (BFLOAT16, False), (BFLOAT16, True)):
            levels = random_levels(coding, 70, 256, 128, symmetric=symmetric)
            product_agrees(device, dtype, levels, tokens=3, bias=symmetric)


def check_groups_of_any_size(device: str) -> None:
    """Smaller than a step, several of one step, one for all; and inputs that are no whole number of steps."""
    for coding in CODINGS:
        for inputs, group_size in ((192, 32), (256, 64), (192, 192), (128, 128)):
            levels = random_levels(coding, 20, inputs, group_size, symmetric=False, seed=inputs + group_size)
            product_agrees(device, FLOAT32, levels, tokens=2)
    for coding in (INT8, PACKED_FLOAT8):
        product_agrees(device, FLOAT32, random_levels(coding, 20, 100, 100, symmetric=False), tokens=2)
        product_agrees(device, FLOAT32, random_levels(coding, 20, 90, 64, symmetric=False), tokens=2)


def check_float16(device: str) -> None:
    for coding in CODINGS:
        product_agrees(device, FLOAT16, random_levels(coding, 24, 128, 64, symmetric=False), tokens=2)


def check_every_code_is_the_number_that_it_stands_for(device: str) -> None:
    """All codes against all zero points, through products with one."""
    one = torch.eye(128, dtype=BFLOAT16, device=device)
    for coding, values in ((INT4, 16), (INT8, 256), (PACKED_FLOAT8, 256), (PACKED_E2M1, 16)):
        outputs = 2 * values
        codes = (torch.arange(128)[None] + 3 * torch.arange(outputs)[:, None]) % values
        codes = codes.to(torch.uint8)
        scales = torch.ones((outputs, 1))
        if coding == PACKED_FLOAT8:
            codes[(codes & 0x7F) == 0x7F] = 0x01
            levels = Levels(bits=8, codes=codes.view(torch.float8_e4m3fn), scales=scales, zeros=None, group_size=128)
        elif coding == PACKED_E2M1:
            levels = Levels(bits=4, codes=codes, scales=scales, zeros=None, group_size=128)
        else:
            zeros = (torch.arange(outputs) % values).to(torch.uint8)[:, None]
            levels = Levels(bits=4 if coding == INT4 else 8, codes=codes, scales=scales, zeros=zeros, group_size=128)
        found = quantized_linear(one, packed(levels, device)).t().float().cpu()
        assert torch.equal(found, levels.values()), coding


def check_a_token_does_not_depend_on_its_company(device: str) -> None:
    """Splits are added as one program would: one token, a batch, and a prompt give it the same bits."""
    levels = random_levels(INT4, 70, 2048, 128, symmetric=False)
    weight = packed(levels, device)
    assert quantized_gemm.split_of(70, 2048, weight.step) < 2048, "its inputs are split"
    x = random_floats(140, 2048, seed=3, dtype=BFLOAT16, device=device)
    for tokens in (20, 140):
        tiles = [quantized_gemm.tile_of(each, BFLOAT16, one_group=True) for each in (1, tokens)]
        assert tiles[0] != tiles[1]
    prompt, batch = quantized_linear(x, weight), quantized_linear(x[:20], weight)
    alone = torch.cat([quantized_linear(x[token : token + 1], weight) for token in range(3)])
    assert torch.equal(prompt[:20], batch)
    assert torch.equal(batch[:3], alone)


def check_no_tokens_and_strides(device: str) -> None:
    weight = packed(random_levels(INT8, 20, 64, 64, symmetric=True), device)
    wide = random_floats(3, 96, seed=4, dtype=FLOAT32, device=device)
    assert quantized_linear(wide[:0, :64], weight).shape == (0, 20)
    assert torch.equal(quantized_linear(wide[:, :64], weight), quantized_linear(wide[:, :64].contiguous(), weight))


def check_decoders_of_packed_weights_are_those_of_their_values(device: str) -> None:
    """From files, with merged projections, through prompts and decodes: pairs, another order of inputs, float8."""
    for kind in ("awq", "gptq, in another order", "fp8"):
        with TemporaryDirectory(prefix="tandem-quantized-") as folder:
            write_quantized(Path(folder), kind, kinds=KERNEL_KINDS, **SIZES)
            plain = loaded(folder, Quantization.DEQUANTIZE, "cpu")
            with layers_by_kernels(device):
                packed_model = loaded(folder, Quantization.AUTO, device)
                found, written = logits_through(packed_model, device)
            for block in packed_model.blocks:
                assert isinstance(block.feed_forward, FeedForward)
                for part in (block.attention.qkv, block.attention.output, block.feed_forward.down):
                    assert isinstance(part, DeviceQuantizedLinear), kind
        expected, stored = logits_through(plain, "cpu")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(written, stored, rtol=1e-4, atol=1e-4)


def loaded(folder: str, quantization: Quantization, device: str) -> Decoder:
    place = torch.device(device)
    config = read_model_config(folder, quantization=quantization, device=place)
    model = load_model(folder, config, FLOAT32, place, progress=False, quantization=quantization)
    assert isinstance(model, Decoder)
    return model


def compile_quantized_gemm(arch: int) -> None:
    """The projections of Llama-3.1-8B, in formats that checkpoints have."""
    cases = (
        (INT4, 128, False, "bf16", quantized_gemm.FEW[0]),
        (INT4, 128, False, "bf16", quantized_gemm.MANY),
        (INT4, 32, True, "bf16", quantized_gemm.FEW[1]),
        (INT4, 32, True, "bf16", quantized_gemm.MANY_OF_SMALL_GROUPS),
        (INT4, 64, False, "bf16", quantized_gemm.MANY_OF_SMALL_GROUPS),
        (INT8, 4096, True, "bf16", quantized_gemm.FEW[0]),
        (PACKED_FLOAT8, 128, True, "bf16", quantized_gemm.MANY),
        (INT4, 128, False, "fp32", quantized_gemm.IN_FLOAT32),
    )
    numbers = dict.fromkeys(("outputs", "inputs", "row_bytes", "group_size"), "i32:16")
    numbers |= dict.fromkeys(("num_tokens", "steps", "splits"), "i32")
    for coding, group_size, symmetric, dtype, tile in cases:
        constants = quantized_gemm.constants_of(shape_alone(coding, group_size, symmetric=symmetric))
        constants |= {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "BIAS": True, "BLOCK": quantized_gemm.COMBINE}
        types = {
            **dict.fromkeys(("x", "out", "bias"), f"*{dtype}:16"),
            **dict.fromkeys(("codes", "zeros"), "*u8:16"),
            "scales": "*fp16:16",
            "partials": "*fp32:16",
            **numbers,
        }
        few = tile in quantized_gemm.FEW
        kernel = quantized_gemm.split_kernel if few else quantized_gemm.whole_kernel
        built = compile_kernel(
            kernel, *only_for(kernel, types, constants), arch=arch, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
        built.assert_fits()
        # Codes are on their way while others are multiplied, several of them at a time.
        assert "cp.async.cg" in built.ptx, built.what
        if dtype == "bf16":
            assert ("wgmma" if arch == HOPPER else "mma.sync") in built.ptx, built.what
    combine = quantized_gemm.combine_kernel
    compile_kernel(combine, *only_for(combine, types, constants), arch=arch).assert_fits()


def only_for(kernel: Any, *named: dict[str, Any]) -> list[dict[str, Any]]:
    """What the kernel takes of each."""
    return [{name: value for name, value in each.items() if name in kernel.arg_names} for each in named]


def shape_alone(coding: str, group_size: int, *, symmetric: bool) -> PackedWeight:
    """Of a matrix of 4096 inputs, without its numbers."""
    inputs, groups = 4096, 4096 // group_size
    zeros = None if symmetric else torch.empty((groups, 1), dtype=torch.uint8)
    made = PackedWeight.pack(
        torch.zeros((1, inputs), dtype=torch.uint8), torch.ones((1, groups)), None, coding=coding,
        group_size=group_size,
    )  # fmt: skip
    return replace(made, zeros=zeros)
