"""What people publish besides the plain weights of a model: packed weights, a layer that predicts ahead, a draft head.

A draw gets one of them, or none, by its seed, and every second one has config.json in the older spelling. Whatever is
packed stands beside a checkpoint with the numbers that the packed ones stand for, which transformers computes.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem_testing.draft_heads import add_mtp_layer
from tandem_testing.mxfp4_files import write_mxfp4
from tandem_testing.quantized_files import Quantized, Writer, fp8_blocks, of_compressed_tensors, packed
from tandem_testing.random_models.draws import NATIVE, draw
from tandem_testing.random_models.spelling import spell_as_published
from tandem_testing.tiny_checkpoints import TinyModel, write_checkpoint, write_tiny_eagle3

PLAIN, AHEAD, HEAD, MXFP4 = "plain", "layer ahead", "EAGLE-3 head", "mxfp4"
FP8, INT4, INT8 = "fp8 in blocks", "int4", "int8 by channel"
PREDICT_AHEAD = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MXFP4_BLOCK = 32

PACKED_MATRICES = ("_proj.weight", "_with_mqa.weight", "in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight")
"""Ends of the names of matrices that published checkpoints pack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A draw on disk."""

    checkpoint: Path
    seed: int
    form: str
    worth: Path | None = None
    """The same numbers unpacked, where transformers does not read the form."""


def write_draw(family: str, seed: int, folder: Path, *, packed: bool = True) -> Written:
    """Write the draw into `folder`, in a form of its seed.

    `packed`: whether it may be one that transformers reads with other libraries alone.
    """
    tiny, dice = draw(family, seed), Random(f"{family} {seed} form")
    form, older = dice.choice(forms(family, tiny, packed=packed)), family in NATIVE and dice.random() < 0.5
    written = _written(tiny, seed, folder, form)
    for checkpoint in filter(None, (written.checkpoint, written.worth) if older else ()):
        spell_as_published(checkpoint)
    return written


def _written(tiny: TinyModel, seed: int, folder: Path, form: str) -> Written:
    if form in (MXFP4, FP8, INT4, INT8):
        return _packed(tiny, seed, folder, form)
    checkpoint = write_checkpoint(tiny, folder / "model", seed=seed)
    if form == AHEAD:
        add_mtp_layer(checkpoint)
    elif form == HEAD:
        last = tiny.fields["num_hidden_layers"] - 1
        layers = tuple(sorted({0, last // 2, last}))
        write_tiny_eagle3(checkpoint, folder / "model-eagle", layers=layers)
    return Written(checkpoint=checkpoint, seed=seed, form=form)


def forms(family: str, tiny: TinyModel, *, packed: bool) -> tuple[str, ...]:
    """Those in which models of the family are published."""
    if family not in NATIVE:
        return (PLAIN,)
    if family == "gpt_oss":
        return (MXFP4,) if fits_mxfp4(tiny.fields) else (PLAIN, HEAD)
    ahead = (HEAD,) if family not in PREDICT_AHEAD else (AHEAD,) if _has_model_of_layer_ahead(tiny.fields) else ()
    return (PLAIN, *ahead, *((FP8, INT4, INT8) if packed else ()))


def _has_model_of_layer_ahead(fields: Mapping[str, Any]) -> bool:
    """Whether the layer that one is made like (`add_mtp_layer`) has experts, in a model that has some."""
    last = fields["num_hidden_layers"] - 1
    if "linear_num_key_heads" in fields:
        every = fields.get("full_attention_interval", 0)
        last = every - 1 if every else fields["layer_types"].index("full_attention")
    dense = [
        last < fields.get("first_k_dense_replace", 0),
        fields.get("mlp_layer_types", ["sparse"])[-1] == "dense",
        last in fields.get("mlp_only_layers", ()),
        (last + 1) % fields.get("decoder_sparse_step", 1) != 0,
    ]
    return not any(dense)


def fits_mxfp4(fields: Mapping[str, Any]) -> bool:
    """Whether all inputs of experts are whole blocks."""
    return fields["hidden_size"] % MXFP4_BLOCK == fields["intermediate_size"] % MXFP4_BLOCK == 0


def _packed(tiny: TinyModel, seed: int, folder: Path, form: str) -> Written:
    plain = write_checkpoint(tiny, folder / "plain", seed=seed)
    checkpoint, worth = folder / "model", folder / "worth"
    if form == MXFP4:
        write_mxfp4(plain, checkpoint, worth=worth, seed=seed)
    else:
        inputs = [matrix.shape[1] for _, matrix in _matrices(load_file(plain / "model.safetensors"))]
        # A word has eight inputs of four bits, and published matrices have whole words.
        form = INT8 if form == INT4 and any(count % 8 for count in inputs) else form
        _pack(plain, checkpoint, worth, *SCHEMES[form])
    return Written(checkpoint=checkpoint, seed=seed, form=form, worth=worth)


FP8_SCHEME: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 12]}
SCHEMES: dict[str, tuple[Writer, dict[str, Any]]] = {
    FP8: (fp8_blocks, FP8_SCHEME),
    INT4: (
        lambda matrix, _seed: _int4(matrix),
        of_compressed_tensors("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="channel"),
    ),
    INT8: (
        lambda matrix, _seed: _int8(matrix),
        of_compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
}


def _levels(matrix: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The nearest of the levels from -most to most, and the scale of each output [outputs, 1]."""
    scales = (matrix.abs().amax(dim=1, keepdim=True) / most).clamp_min(1e-4).half()
    return (matrix / scales.float()).round().clamp(-most, most), scales


def _int8(matrix: Tensor) -> Quantized:
    levels, scales = _levels(matrix, 127)
    return Quantized({"weight": levels.to(torch.int8), "weight_scale": scales}, levels * scales.float())


def _int4(matrix: Tensor) -> Quantized:
    levels, scales = _levels(matrix, 7)
    parts = {
        "weight_packed": packed((levels + 8).long(), 4, dim=1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(matrix.shape),
    }
    return Quantized(parts, levels * scales.float())


def _matrices(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Those that are packed: of the text part, and no stacks of experts."""
    for name, tensor in tensors.items():
        if name.endswith(PACKED_MATRICES) and tensor.dim() == 2 and "vision" not in name and "visual" not in name:
            yield name, tensor


def _pack(plain: Path, directory: Path, worth: Path, writer: Writer, scheme: dict[str, Any]) -> None:
    """Copy the checkpoint in `plain` twice: packed into `directory`, and with what that stands for into `worth`."""
    tensors = load_file(plain / "model.safetensors")
    held, worths = dict(tensors), dict(tensors)
    for number, (name, matrix) in enumerate(_matrices(tensors)):
        quantized: Quantized = writer(matrix, number)
        del held[name]
        held |= {name.removesuffix("weight") + suffix: part for suffix, part in quantized.parts.items()}
        worths[name] = quantized.worth.to(torch.float32).contiguous()
    for target, kept in ((directory, held), (worth, worths)):
        shutil.copytree(plain, target)
        save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"quantization_config": scheme}))
