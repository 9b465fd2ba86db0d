"""Experts of packed weights against float64, alone and in company, and as blocks of a decoder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import Quantization
from tandem_engine.kernels.interface import INT4, INT8, PACKED_FLOAT8, PAIRED, PackedWeight
from tandem_engine.kernels.triton import quantized_gemm, quantized_moe
from tandem_engine.kernels.triton.fused_moe import ExpertBiases, fused_experts
from tandem_engine.kernels.triton.norm_activation import Clamp, product_constants
from tandem_engine.model.layers.mlp import Choice
from tandem_engine.model.layers.triton import DeviceQuantizedLinear
from tandem_engine.model.layers.triton_experts import DeviceExperts, ExpertMatrices, ExpertStacks, read_experts
from tandem_engine.model.quantization.levels import Levels
from tandem_testing.quantized_files import KERNEL_KINDS, MIXTRAL, QWEN3_MOE, mixtral_names, write_quantized
from tandem_testing.triton_kernels.ahead_of_time import compile_kernel
from tandem_testing.triton_kernels.checks import HOPPER
from tandem_testing.triton_kernels.expert_kernels import layers_by_kernels, logits_through
from tandem_testing.triton_kernels.quantized_kernels import CODINGS, loaded, only_for, random_levels, shape_alone
from tandem_testing.triton_kernels.tensors import random_floats, units_apart

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
FEW, MANY = 5, 30
"""Tokens that 3 experts get in blocks of 16, and of 64."""
EXPERTS, CHOSEN = 3, 2
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh")}


def levels_of_experts(
    coding: str, outputs: int, inputs: int, group_size: int, *, symmetric: bool, seed: int = 1, count: int = EXPERTS
) -> list[Levels]:
    """As `random_levels`; numbers of eight bits are scaled as those of four are."""
    drawn = [
        random_levels(coding, outputs, inputs, min(group_size, inputs), symmetric=symmetric, seed=10 * seed + expert)
        for expert in range(count)
    ]
    return drawn if coding in PAIRED else [replace(levels, scales=levels.scales / 16) for levels in drawn]


def in_another_order(levels: Sequence[Levels]) -> list[Levels]:
    """Inputs of each matrix belong to groups anywhere, of each to others."""
    result = []
    for seed, each in enumerate(levels):
        order = torch.randperm(each.shape[1], generator=torch.Generator().manual_seed(seed))
        result.append(replace(each, groups=(torch.arange(each.shape[1]) // each.group_size)[order]))
    return result


def stacks_of(gate_up: Sequence[Levels | Tensor], down: Sequence[Levels | Tensor], device: str) -> ExpertStacks:
    """As a layer of `device` holds them."""
    place = torch.device(device)

    def held(expert: int) -> ExpertMatrices:
        return ExpertMatrices(gate_up[expert].to(place), down[expert].to(place))

    def plain(expert: int) -> ExpertMatrices:
        return ExpertMatrices(*(values_of(stack[expert]).to(place) for stack in (gate_up, down)))

    return read_experts(held, plain, count=len(gate_up), dtype=FLOAT32, device=place)


def values_of(matrix: Levels | Tensor) -> Tensor:
    return matrix.values() if isinstance(matrix, Levels) else matrix.float()


def choice_of(tokens: int, dtype: torch.dtype, device: str, *, count: int = EXPERTS, chosen: int = CHOSEN) -> Choice:
    scores = random_floats(tokens, count, seed=12, dtype=FLOAT32, device="cpu").softmax(dim=1)
    weights, ids = scores.topk(chosen, dim=1)
    return Choice(ids.to(device), weights.to(dtype).to(device))


def computed(x: Tensor, choice: Choice, stacks: ExpertStacks, activation: str = "silu", **options: Any) -> Tensor:
    """`options`: of `fused_experts`."""
    return fused_experts(x, *choice, stacks.gate_up, stacks.down, activation=activation, order=stacks.order, **options)


def in_float64(
    x: Tensor,
    choice: Choice,
    gate_up: Sequence[Levels | Tensor],
    down: Sequence[Levels | Tensor],
    activation: str,
    *,
    biases: ExpertBiases | None = None,
    clamp: Clamp | None = None,
) -> Tensor:
    """Expert after expert, rounded to x's dtype where `model.layers.mlp` rounds and nowhere else."""

    def rounded(numbers: Tensor) -> Tensor:
        return numbers.to(x.dtype).double()

    def added(stack: Tensor | None, expert: int) -> Tensor | float:
        return 0.0 if stack is None else stack[expert].cpu().double()

    of_gate_up, of_down = biases or (None, None)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for rank in range(choice.experts.shape[1]):
        for token, expert in enumerate(choice.experts[:, rank].tolist()):
            both = values_of(gate_up[expert]).double() @ x[token].cpu().double() + added(of_gate_up, expert)
            gate, up = rounded(both).chunk(2)
            if clamp is None:
                inner = rounded(rounded(ACTIVATIONS[activation](gate)) * up)
            else:
                gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
                inner = rounded(rounded(gate * torch.sigmoid(clamp.alpha * gate)) * rounded(up + 1))
            result = rounded(values_of(down[expert]).double() @ inner + added(of_down, expert))
            total[token] += rounded(result * choice.weights[token, rank].cpu().double())
    return total


def agrees(
    device: str,
    dtype: torch.dtype,
    gate_up: Sequence[Levels | Tensor],
    down: Sequence[Levels | Tensor],
    *,
    tokens: int,
    activation: str = "silu",
    chosen: int = CHOSEN,
    **options: Any,
) -> None:
    """Within the rounding of the result, and of float32 sums before each of the roundings on the way."""
    x = random_floats(tokens, gate_up[0].shape[1], seed=5, dtype=dtype, device=device)
    choice = choice_of(tokens, dtype, device, count=len(gate_up), chosen=chosen)
    found = computed(x, choice, stacks_of(gate_up, down, device), activation, **options)
    exact = in_float64(x, choice, gate_up, down, activation, **options)
    size = float(exact.abs().mean())
    assert size > 0.01, "there is something to compare"
    if dtype is FLOAT32:
        assert float((found.double().cpu() - exact).abs().max()) <= 1e-5 * size
    else:
        # Results of two experts are rounded before they are added, and may be larger than their sum.
        assert units_apart(found, exact.to(dtype), at_least=float(exact.abs().max())) <= 2.0


def check_packed_experts_of_all_codings(device: str) -> None:
    for coding in CODINGS:
        for dtype, tokens, symmetric in ((FLOAT32, FEW, False), (BFLOAT16, FEW, True), (BFLOAT16, MANY, False)):
            gate_up = levels_of_experts(coding, 128, 192, 64, symmetric=symmetric)
            down = levels_of_experts(coding, 192, 64, 64, symmetric=symmetric, seed=2)
            agrees(device, dtype, gate_up, down, tokens=tokens)


def check_groups_of_experts_of_any_size(device: str) -> None:
    """Several of a step, one for all; inputs that are no whole number of steps; float16; and another activation."""
    for coding in CODINGS:
        gate_up = levels_of_experts(coding, 384, 64, 32, symmetric=False)
        agrees(device, FLOAT16, gate_up, levels_of_experts(coding, 64, 192, 32, symmetric=False), tokens=FEW)
        whole = levels_of_experts(coding, 128, 128, 1 << 20, symmetric=True)
        down = levels_of_experts(coding, 128, 64, 1 << 20, symmetric=True)
        agrees(device, BFLOAT16, whole, down, tokens=MANY, activation="gelu_tanh")
    for coding in (INT8, PACKED_FLOAT8):
        gate_up = levels_of_experts(coding, 180, 100, 64, symmetric=False)
        agrees(device, FLOAT32, gate_up, levels_of_experts(coding, 100, 90, 64, symmetric=False), tokens=FEW)


def check_experts_whose_inputs_have_an_order_of_their_own(device: str) -> None:
    gate_up = levels_of_experts(INT4, 128, 128, 32, symmetric=False)
    down = levels_of_experts(INT4, 128, 64, 32, symmetric=False, seed=2)
    for of_gate_up, of_down in (
        (in_another_order(gate_up), in_another_order(down)),
        (gate_up, in_another_order(down)),
        # The orders of act-order are of experts each: some may have none.
        ([gate_up[0], *in_another_order(gate_up)[1:]], down),
    ):
        agrees(device, FLOAT32, of_gate_up, of_down, tokens=FEW)
    assert stacks_of(gate_up, in_another_order(down), device).order is None


def check_packed_experts_beside_plain_ones(device: str) -> None:
    """One of both products is by weights in the dtype: a rank may hold parts that cannot be packed."""
    gate_up = levels_of_experts(INT4, 128, 128, 64, symmetric=False)
    down = levels_of_experts(INT4, 128, 64, 64, symmetric=False, seed=2)
    for dtype in (FLOAT32, BFLOAT16):
        plain_gate_up, plain_down = ([each.values().to(dtype) for each in stack] for stack in (gate_up, down))
        agrees(device, dtype, gate_up, plain_down, tokens=FEW)
        agrees(device, dtype, plain_gate_up, in_another_order(down), tokens=FEW)


def check_ranks_share_packed_experts(device: str) -> None:
    """Each has half of the inner dimension, which cuts the groups of down; partial results add up to the whole."""
    gate_up = levels_of_experts(INT4, 256, 128, 64, symmetric=False)
    down = levels_of_experts(INT4, 128, 128, 128, symmetric=False, seed=2)
    x, choice = random_floats(FEW, 128, seed=5, dtype=FLOAT32, device=device), choice_of(FEW, FLOAT32, device)
    total = torch.zeros(FEW, 128, device=device)
    for start in (0, 64):
        shares = [
            Levels.stacked([each.outputs(slice(half + start, half + start + 64)) for half in (0, 128)])
            for each in gate_up
        ]
        inputs = [each.part(1, start, start + 64) for each in down]
        stacks = stacks_of([each for each in shares if each], [each for each in inputs if each], device)
        assert isinstance(stacks.down, PackedWeight)
        assert stacks.down.group_size == 64
        total += computed(x, choice, stacks)
    exact = in_float64(x, choice, gate_up, down, "silu")
    assert float((total.double().cpu() - exact).abs().max()) <= 1e-5 * float(exact.abs().mean())


def check_experts_that_are_not_alike_are_plain(device: str) -> None:
    gate_up = levels_of_experts(INT4, 128, 128, 64, symmetric=False)
    down = levels_of_experts(INT4, 128, 64, 64, symmetric=False, seed=2)
    eight_bits = levels_of_experts(INT8, 128, 128, 64, symmetric=False)
    stacks = stacks_of(gate_up, down, device)
    assert isinstance(stacks.gate_up, PackedWeight)
    assert isinstance(stacks.down, PackedWeight)
    for odd in (eight_bits[2], gate_up[2].values()):
        unlike = stacks_of([*gate_up[:2], odd], down, device)
        assert isinstance(unlike.gate_up, Tensor)
        assert isinstance(unlike.down, Tensor)
        assert torch.equal(unlike.gate_up[1].cpu(), gate_up[1].values())


def check_zero_points_are_kept_if_any_is_not_in_the_middle(device: str) -> None:
    symmetric = levels_of_experts(INT4, 128, 128, 64, symmetric=True)
    down = levels_of_experts(INT4, 128, 64, 64, symmetric=True, seed=2)
    stacks = stacks_of(symmetric, down, device)
    assert isinstance(stacks.gate_up, PackedWeight)
    assert stacks.gate_up.zeros is None
    odd = levels_of_experts(INT4, 128, 128, 64, symmetric=False)
    agrees(device, FLOAT32, [*symmetric[:2], odd[2]], down, tokens=FEW)


def check_a_token_of_packed_experts_does_not_depend_on_its_company(device: str) -> None:
    """Blocks of 16 and of 64 sum alike."""
    for coding in CODINGS:
        gate_up = levels_of_experts(coding, 128, 256, 128, symmetric=False)
        stacks = stacks_of(gate_up, levels_of_experts(coding, 256, 64, 64, symmetric=False, seed=2), device)
        x, choice = random_floats(MANY, 256, seed=3, dtype=BFLOAT16, device=device), choice_of(MANY, BFLOAT16, device)
        rows = [quantized_moe.packed_block_rows(CHOSEN * tokens, EXPERTS, BFLOAT16) for tokens in (1, MANY)]
        assert rows == [quantized_moe.FEW_ROWS, quantized_moe.MANY_ROWS]
        together = computed(x, choice, stacks)
        alone = computed(x[2:3], Choice(choice.experts[2:3], choice.weights[2:3]), stacks)
        assert torch.equal(together[2:3], alone), coding


def check_decoders_of_packed_experts_are_those_of_their_values(device: str) -> None:
    """From files in the names that are published; with an output matrix that is packed too."""
    for kind, sizes, rename in (
        ("awq", MIXTRAL, mixtral_names),
        ("gptq, in another order", QWEN3_MOE, None),
        ("pack-quantized", MIXTRAL, mixtral_names),
    ):
        with TemporaryDirectory(prefix="tandem-quantized-") as folder:
            write_quantized(Path(folder), kind, kinds=KERNEL_KINDS, head=True, rename=rename, **sizes)
            plain = loaded(folder, Quantization.DEQUANTIZE, "cpu")
            with layers_by_kernels(device):
                model = loaded(folder, Quantization.AUTO, device)
                found, written = logits_through(model, device)
            experts = model.blocks[-1].feed_forward
            assert isinstance(experts, DeviceExperts)
            for stack in (experts.weights.gate_up, experts.weights.down):
                assert isinstance(stack, PackedWeight), kind
            assert isinstance(model.lm_head, DeviceQuantizedLinear), kind
        expected, stored = logits_through(plain, "cpu")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(written, stored, rtol=1e-4, atol=1e-4)


def compile_packed_experts(arch: int) -> None:
    """Qwen3-30B-A3B's experts, in formats that checkpoints have."""
    few, many, small = quantized_moe.FEW, quantized_moe.MANY, quantized_moe.MANY_OF_SMALL_GROUPS
    in_float32 = quantized_moe.tiles_of(quantized_moe.FEW_ROWS, FLOAT32, one_group=True)
    cases = (
        (INT4, 128, False, "bf16", few),
        (INT4, 128, False, "bf16", many),
        (INT4, 32, True, "bf16", few),
        (INT4, 64, False, "bf16", small),
        (INT8, 4096, True, "bf16", many),
        (PACKED_FLOAT8, 128, True, "bf16", few),
        (PACKED_FLOAT8, 128, True, "bf16", many),
        (INT4, 128, False, "fp32", in_float32),
    )
    numbers = dict.fromkeys(("outputs", "inputs", "row_bytes", "group_size"), "i32:16")
    numbers |= dict.fromkeys(("num_rows", "num_pairs", "groups"), "i32")
    for coding, group_size, symmetric, dtype, tiles in cases:
        types = {
            **dict.fromkeys(("x", "inner", "results"), f"*{dtype}:16"),
            **dict.fromkeys(("codes", "zeros"), "*u8:16"),
            **dict.fromkeys(("pairs", "owner"), "*i32:16"),
            "scales": "*fp16:16",
            **numbers,
        }
        for kernel, tile in (
            (quantized_moe.packed_gate_up_kernel, tiles.gate_up),
            (quantized_moe.packed_down_kernel, tiles.down),
        ):
            constants: dict[str, Any] = quantized_gemm.constants_of(
                shape_alone(coding, group_size, symmetric=symmetric)
            )
            constants |= {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "CHOSEN": 8, "bias": None}
            constants |= product_constants("silu", None)
            built = compile_kernel(
                kernel, *only_for(kernel, types, constants), arch=arch, num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )  # fmt: skip
            built.assert_fits()
            # Codes are on their way while others are multiplied, 8 or 16 bytes at a time.
            assert "cp.async.c" in built.ptx, built.what
            if dtype == "bf16":
                assert ("wgmma" if arch == HOPPER else "mma.sync") in built.ptx, built.what
    orders = {"x": "*bf16:16", "rows": "*bf16:16", "experts": "*i64:16", "order": "*i32:16"}
    shape = {"CHOSEN": 8, "SIZE": 2048, "BLOCK": quantized_moe.REORDER}
    compile_kernel(quantized_moe.reorder_kernel, orders, shape, arch=arch).assert_fits()
