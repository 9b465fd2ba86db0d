"""Writers of quantized checkpoints: numbers packed one by one, as the formats' papers and libraries say.

Each takes the plain matrices of a model and gives the tensors of a file, and what they are worth.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem_engine.model.tensor_names import LM_HEAD
from tandem_testing.checkpoint_files import random_tensors, write_config

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs is in which place of a word, lowest first (AutoAWQ, packing_utils.py)."""


class Quantized(NamedTuple):
    """One matrix."""

    parts: dict[str, Tensor]
    """By suffix."""
    worth: Tensor
    """float32 [outputs, inputs]."""


def packed(levels: Tensor, bits: int, *, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned `levels` in words along `dim`, the rest of the last one zero."""
    rows = (levels if dim == 1 else levels.t()).tolist()
    per_word = 32 // bits
    words = []
    for row in rows:
        filled = row + [0] * (-len(row) % per_word)
        line = []
        for start in range(0, len(filled), per_word):
            places = order or range(per_word)
            word = sum(filled[start + index] << (bits * place) for place, index in enumerate(places))
            line.append(word - (1 << 32) if word >= 1 << 31 else word)
        words.append(line)
    made = torch.tensor(words, dtype=torch.int32)
    return (made if dim == 1 else made.t()).contiguous()


def levels_of(matrix: Tensor, bits: int, group_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned levels [out, in], zero points [out, groups] and scales [out, groups] of any values: they are drawn."""
    dice = torch.Generator().manual_seed(seed)
    outputs, inputs = matrix.shape
    groups = 1 if group_size == -1 else inputs // group_size
    levels = torch.randint(0, 1 << bits, (outputs, inputs), generator=dice)
    zeros = torch.randint(1, 1 << bits, (outputs, groups), generator=dice)
    scales = (torch.rand((outputs, groups), generator=dice) * 0.02 + 0.001).half()
    return levels, zeros, scales


def worth(levels: Tensor, zeros: Tensor, scales: Tensor, group: Tensor) -> Tensor:
    return (levels - zeros[:, group]).float() * scales.float()[:, group]


def in_order(inputs: int, groups: int) -> Tensor:
    return torch.arange(inputs) // (inputs // groups)


def awq(matrix: Tensor, seed: int, *, group_size: int = 8) -> Quantized:
    levels, zeros, scales = levels_of(matrix, 4, group_size, seed)
    parts = {
        "qweight": packed(levels.t(), 4, dim=1, order=AWQ_ORDER),
        "qzeros": packed(zeros.t(), 4, dim=1, order=AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return Quantized(parts, worth(levels, zeros, scales, in_order(matrix.shape[1], zeros.shape[1])))


def gptq(matrix: Tensor, seed: int, *, bits: int = 4, group_size: int = 8, ordered: bool = True) -> Quantized:
    levels, zeros, scales = levels_of(matrix, bits, group_size, seed)
    group = in_order(matrix.shape[1], zeros.shape[1])
    if not ordered:
        # As of layers with the same inputs: it follows from these.
        group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(len(group)))]
    parts = {
        "qweight": packed(levels.t(), bits, dim=0),
        "qzeros": packed((zeros - 1).t(), bits, dim=1),
        "scales": scales.t().contiguous(),
        "g_idx": group.int(),
    }
    return Quantized(parts, worth(levels, zeros, scales, group))


def gptq_v2(matrix: Tensor, seed: int) -> Quantized:
    levels, zeros, scales = levels_of(matrix, 8, -1, seed)
    parts = {
        "qweight": packed(levels.t(), 8, dim=0),
        "qzeros": packed(zeros.t(), 8, dim=1),
        "scales": scales.t().contiguous(),
    }
    return Quantized(parts, worth(levels, zeros, scales, in_order(matrix.shape[1], 1)))


def pack_quantized(matrix: Tensor, seed: int, *, group_size: int = 8, symmetric: bool = True) -> Quantized:
    levels, zeros, scales = levels_of(matrix, 4, group_size, seed)
    zeros = torch.full_like(zeros, 8) if symmetric else zeros
    parts = {
        "weight_packed": packed(levels, 4, dim=1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = packed(zeros, 4, dim=0)
    return Quantized(parts, worth(levels, zeros, scales, in_order(matrix.shape[1], zeros.shape[1])))


def int_quantized(matrix: Tensor, seed: int) -> Quantized:
    levels, _, scales = levels_of(matrix, 8, -1, seed)
    parts = {"weight": (levels - 128).to(torch.int8), "weight_scale": scales}
    return Quantized(parts, (levels - 128).float() * scales.float())


def float_quantized(matrix: Tensor, seed: int) -> Quantized:
    scale = torch.tensor([0.25], dtype=torch.bfloat16)
    weight = matrix.to(torch.float8_e4m3fn)
    return Quantized({"weight": weight, "weight_scale": scale, "input_scale": scale.clone()}, weight.float() * 0.25)


def fp8_blocks(matrix: Tensor, seed: int, *, rows: int = 16, columns: int = 12) -> Quantized:
    weight = matrix.to(torch.float8_e4m3fn)
    outputs, inputs = matrix.shape
    counts = (-(-outputs // rows), -(-inputs // columns))
    scales = torch.rand(counts, generator=torch.Generator().manual_seed(seed)) + 0.1
    each = torch.stack([scales[torch.arange(outputs) // rows, column // columns] for column in range(inputs)], dim=1)
    return Quantized({"weight": weight, "weight_scale_inv": scales}, weight.float() * each)


def float_blocks(matrix: Tensor, seed: int, **block: int) -> Quantized:
    """As compressed-tensors has them."""
    parts, value = fp8_blocks(matrix, seed, **block)
    return Quantized({"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, value)


def of_compressed_tensors(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
Writer = Callable[[Tensor, int], Quantized]
KINDS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}),
    "gptq, in another order": (
        lambda matrix, seed: gptq(matrix, seed, ordered=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True},
    ),
    "gptq_v2, 8 bits": (
        gptq_v2,
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
    "pack-quantized": (pack_quantized, of_compressed_tensors("pack-quantized", symmetric=True, **W4)),
    "pack-quantized, zero points": (
        lambda matrix, seed: pack_quantized(matrix, seed, symmetric=False),
        of_compressed_tensors("pack-quantized", symmetric=False, **W4),
    ),
    "int-quantized": (
        int_quantized,
        of_compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "float-quantized": (
        float_quantized,
        of_compressed_tensors("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "float-quantized, blocks": (
        float_blocks,
        of_compressed_tensors("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 12]),
    ),
    "fp8": (fp8_blocks, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 12]}),
}
W4_OF_32 = W4 | {"group_size": 32}
KERNEL_KINDS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (partial(awq, group_size=32), KINDS["awq"][1] | {"group_size": 32}),
    "gptq": (partial(gptq, group_size=64), KINDS["gptq"][1] | {"group_size": 64}),
    "gptq, in another order": (
        partial(gptq, group_size=32, ordered=False),
        KINDS["gptq, in another order"][1] | {"group_size": 32},
    ),
    "gptq, 2 bits": (partial(gptq, bits=2, group_size=32), KINDS["gptq"][1] | {"bits": 2, "group_size": 32}),
    "gptq_v2, 8 bits": KINDS["gptq_v2, 8 bits"],
    "pack-quantized": (
        partial(pack_quantized, group_size=32),
        of_compressed_tensors("pack-quantized", symmetric=True, **W4_OF_32),
    ),
    "int-quantized": KINDS["int-quantized"],
    "float-quantized": KINDS["float-quantized"],
    "fp8": (partial(fp8_blocks, rows=48, columns=64), KINDS["fp8"][1] | {"weight_block_size": [48, 64]}),
}
"""In groups of sizes that kernels have, of models whose matrices have a multiple of 64 inputs."""

_SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_experts_per_tok": 2}
MIXTRAL = _SMALL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 3,
    "intermediate_size": 64,
}
QWEN3_MOE = _SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "moe_intermediate_size": 128,
    "head_dim": 16,
    "norm_topk_prob": True,
}
"""Models of experts whose matrices `KERNEL_KINDS` can be."""


def mixtral_names(name: str) -> str:
    """As published checkpoints of Mixtral name the tensor that we call `name`."""
    projections = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    parts = name.replace(".mlp.", ".block_sparse_moe.").split(".")
    return ".".join(projections.get(part, part) for part in parts)


def write_quantized(
    directory: Path,
    kind: str,
    *,
    kinds: Mapping[str, tuple[Writer, dict[str, Any]]] = KINDS,
    head: bool = False,
    rename: Callable[[str], str] | None = None,
    **config: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint whose projections are quantized; returns what its files hold, and what all tensors are worth.

    Args:
        head: whether the output matrix is quantized too.
        rename: names in the file for ours.
    """
    writer, scheme = kinds[kind]
    write_config(directory, **config)
    held: dict[str, Tensor] = {}
    worths: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(random_tensors(directory).items()):
        if name.endswith(("_proj.weight", "_with_mqa.weight")) or (head and name == LM_HEAD):
            quantized = writer(tensor, number)
            worths[name] = quantized.worth
            prefix = name.removesuffix("weight")
            held |= {prefix + suffix: part for suffix, part in quantized.parts.items()}
        else:
            held[name] = worths[name] = tensor
    held = held if rename is None else {rename(name): tensor for name, tensor in held.items()}
    save_file(held, directory / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"quantization_config": scheme}))
    return held, worths
