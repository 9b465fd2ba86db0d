"""Quantized matrices that stay so: whole, merged, and a rank's part; and what that means for a model's identity."""

import argparse
import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.config import LoadFormat, Quantization
from tandem_engine.config.flags import add_engine_flags, engine_config
from tandem_engine.model.checkpoint import open_weights, parse_config, read_model_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.decoder import Decoder
from tandem_engine.model.layers.cpu import Int8Linear
from tandem_engine.model.layers.linear import Linear, can_multiply
from tandem_engine.model.layers.mlp import SparseFeedForward
from tandem_engine.model.loader import WeightReader, load_model
from tandem_engine.model.quantization.levels import Levels, int8_levels
from tandem_engine.model.quantization.scheme import Holding, holding_of, read_scheme
from tandem_engine.model.tensor_names import LM_HEAD
from tandem_engine.parallel.sharding import INPUTS, OUTPUTS, VOCABULARY
from tandem_testing.checkpoint_files import write_checkpoint, write_config
from tandem_testing.quantized_files import KERNEL_KINDS, KINDS, QWEN3_MOE, write_quantized
from tandem_testing.triton_kernels.tensors import kernels_on

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
LAYER = "model.layers.0."
QKV = tuple(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
DOWN = f"{LAYER}mlp.down_proj.weight"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rank:
    """Implements as much of `TpGroup` as reading needs."""

    rank: int
    size: int = 2


def reader(path, holding: Holding, group: object = None) -> WeightReader:
    directory = open_directory(path)
    tensors = open_weights(directory, read_scheme(read_fields(directory)), parse_config(directory))
    rank = {} if group is None else {"group": group}
    return WeightReader(
        tensors=tensors, dtype=torch.float32, device=CPU, advance=lambda _: None, holding=holding, **rank
    )


def values(matrix) -> torch.Tensor:
    assert isinstance(matrix, Levels)
    return matrix.values()


@pytest.mark.parametrize("kind", KERNEL_KINDS)
def test_merged_matrices_equal_their_stored_parts(tmp_path, kind):
    _, worths = write_quantized(tmp_path, kind, kinds=KERNEL_KINDS, **SIZES)
    expected = torch.cat([worths[name] for name in QKV])
    with kernels_on("cpu"):
        assert torch.equal(values(reader(tmp_path, Holding.PACKED).matrix(*QKV)), expected)


@pytest.mark.parametrize("kind", KERNEL_KINDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_has_its_part_with_its_scales(tmp_path, kind, rank):
    _, worths = write_quantized(tmp_path, kind, kinds=KERNEL_KINDS, **SIZES)
    with kernels_on("cpu"):
        held = reader(tmp_path, Holding.PACKED, Rank(rank))
        outputs = values(held.matrix(*QKV, split=OUTPUTS))
        inputs = held.matrix(DOWN, split=INPUTS)
    assert torch.equal(outputs, torch.cat([worths[name].chunk(2)[rank] for name in QKV]))
    expected = worths[DOWN].chunk(2, dim=1)[rank]
    if kind == "gptq, in another order":
        assert torch.equal(inputs, expected), "its groups are spread over both ranks: plain numbers"
    else:
        assert torch.equal(values(inputs), expected)


@pytest.mark.parametrize("rank", range(4))
def test_groups_that_ranks_cut_become_smaller(rank):
    """As of Qwen3-30B-A3B's experts on four: 192 inputs each, in groups of 128."""
    dice = torch.Generator().manual_seed(1)
    codes, zeros = (torch.randint(0, 16, (5, size), generator=dice, dtype=torch.uint8) for size in (768, 6))
    whole = Levels(bits=4, codes=codes, scales=torch.rand((5, 6), generator=dice), zeros=zeros, group_size=128)
    part = whole.part(1, 192 * rank, 192 * (rank + 1))
    assert part is not None
    assert part.group_size == 64
    assert torch.equal(part.values(), whole.values()[:, 192 * rank : 192 * (rank + 1)])
    with kernels_on("cpu"):
        assert can_multiply(part, CPU)


def test_last_group_may_be_cut_where_it_ends():
    whole = int8_levels(torch.randn(3, 100, generator=torch.Generator().manual_seed(2)))
    scales, zeros = whole.scales.repeat(1, 2) * torch.tensor([1.0, 2.0]), whole.zeros.repeat(1, 2)
    whole = replace(whole, scales=scales, zeros=zeros, group_size=64)
    assert torch.equal(whole.part(1, 64, 100).values(), whole.values()[:, 64:])
    assert torch.equal(whole.part(1, 32, 100).values(), whole.values()[:, 32:])


@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized", "float-quantized"])
def test_output_matrix_stays_as_the_checkpoint_has_it(tmp_path, kind):
    """On ranks too, whose last one has outputs that no token has."""
    sizes = SIZES | {"vocab_size": 33}
    _, worths = write_quantized(tmp_path, kind, kinds=KERNEL_KINDS, head=True, **sizes)
    with kernels_on("cpu"):
        whole = reader(tmp_path, Holding.PACKED).matrix(LM_HEAD, split=VOCABULARY, rounded=False)
        first, last = (
            reader(tmp_path, Holding.PACKED, Rank(rank)).matrix(LM_HEAD, split=VOCABULARY, rounded=False)
            for rank in range(2)
        )
    assert torch.equal(values(whole), worths[LM_HEAD])
    assert torch.equal(values(first), worths[LM_HEAD][:17])
    assert torch.equal(values(last), torch.cat((worths[LM_HEAD][17:], torch.zeros(1, 64))))
    assert last.is_float8 or last.zeros_are(1 << (last.bits - 1)), "symmetric as it was"


def test_weights_without_kernel_are_dequantized(tmp_path):
    """Groups of eight inputs; and on a CPU anything but int8 with one scale for each output."""
    _, worths = write_quantized(tmp_path, "awq", **SIZES)
    with kernels_on("cpu"):
        assert torch.equal(reader(tmp_path, Holding.PACKED).matrix(DOWN), worths[DOWN])
    assert torch.equal(reader(tmp_path, Holding.PACKED).matrix(DOWN), worths[DOWN])


def test_int8_does_not_depend_on_how_many_ranks_there_are(tmp_path):
    write_checkpoint(tmp_path, **SIZES)
    whole = values(reader(tmp_path, Holding.INT8).matrix(DOWN))
    halves = [values(reader(tmp_path, Holding.INT8, Rank(rank)).matrix(DOWN, split=INPUTS)) for rank in (0, 1)]
    assert torch.equal(torch.cat(halves, dim=1), whole)


def test_every_projection_of_a_model_is_int8_and_nothing_else(tmp_path):
    tensors = write_checkpoint(tmp_path, **SIZES)
    config = read_model_config(tmp_path, quantization=Quantization.INT8)
    model = load_model(tmp_path, config, torch.float32, progress=False, quantization=Quantization.INT8)
    assert isinstance(model, Decoder)
    (block,) = model.blocks
    parts = (block.attention.qkv, block.attention.output, block.feed_forward.gate_up, block.feed_forward.down)
    assert [type(part) for part in parts] == [Int8Linear] * 4
    assert isinstance(model.lm_head, Linear)
    assert model.fused is None
    x = torch.randn(3, 64)
    exact = x @ torch.cat([tensors[name] for name in QKV]).T
    assert float((block.attention.qkv(x) - exact).abs().max()) < 0.02 * float(exact.abs().max())


def test_experts_are_int8_and_the_scores_of_tokens_are_not(tmp_path):
    tensors = write_checkpoint(tmp_path, **QWEN3_MOE)
    config = read_model_config(tmp_path, quantization=Quantization.INT8)
    model = load_model(tmp_path, config, torch.float32, progress=False, quantization=Quantization.INT8)
    assert isinstance(model, Decoder)
    moe = model.blocks[0].feed_forward
    assert isinstance(moe, SparseFeedForward)
    assert [type(part) for expert in moe.experts for part in (expert.gate_up, expert.down)] == [Int8Linear] * 6
    assert not isinstance(model.lm_head, Int8Linear)
    x = torch.randn(3, 64)
    rounded = int8_levels(tensors[f"{LAYER}mlp.experts.2.up_proj.weight"]).values()
    torch.testing.assert_close(moe.experts[2].gate_up(x)[:, 128:], x @ rounded.T, rtol=1e-5, atol=1e-5)


def test_output_matrix_of_int8_is_multiplied_as_it_is(tmp_path):
    write_quantized(tmp_path, "int-quantized", kinds=KERNEL_KINDS, head=True, **SIZES)
    config = read_model_config(tmp_path, quantization=Quantization.INT8)
    model = load_model(tmp_path, config, torch.float32, progress=False, quantization=Quantization.INT8)
    assert isinstance(model, Decoder)
    assert isinstance(model.lm_head, Int8Linear)


def test_odd_number_of_inputs_is_not_packed_on_a_cpu():
    """In bfloat16 they go in pairs: loading such a model ended in an assertion."""
    assert can_multiply(int8_levels(torch.ones(3, 6)), CPU)
    assert not can_multiply(int8_levels(torch.ones(3, 7)), CPU)


def test_random_weights_are_held_in_int8_too(tmp_path):
    write_config(tmp_path, **SIZES)
    config = read_model_config(tmp_path, load_format=LoadFormat.DUMMY, quantization=Quantization.INT8)
    model = load_model(
        tmp_path, config, torch.bfloat16, progress=False, load_format=LoadFormat.DUMMY, quantization=Quantization.INT8
    )
    assert isinstance(model, Decoder)
    assert isinstance(model.blocks[0].attention.qkv, Int8Linear)


def test_kv_is_never_exchanged_between_ways_to_hold_a_checkpoint(tmp_path):
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    for path in (plain, quantized):
        path.mkdir()
    write_checkpoint(plain, **SIZES)
    write_quantized(quantized, "awq", kinds=KERNEL_KINDS, **SIZES)
    found = [
        read_model_config(plain).fingerprint,
        read_model_config(plain, quantization=Quantization.INT8).fingerprint,
        read_model_config(quantized).fingerprint,
        read_model_config(quantized, device="cuda").fingerprint,
    ]
    assert len(set(found)) == 4
    assert read_model_config(quantized, device="cuda", quantization=Quantization.DEQUANTIZE).fingerprint == found[2]
    assert read_model_config(plain, quantization=Quantization.DEQUANTIZE, device="cuda").fingerprint == found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_int8_of_another_quantization_is_refused(tmp_path, kind):
    write_quantized(tmp_path, kind, **SIZES)
    refused = contextlib.nullcontext() if kind == "int-quantized" else pytest.raises(ConfigError, match="not quantized")
    with refused:
        assert "held int8" in read_model_config(tmp_path, quantization=Quantization.INT8).quantization


def test_nothing_is_packed_without_a_kernel(tmp_path):
    write_quantized(tmp_path, "awq", **SIZES)
    scheme = read_scheme(read_fields(open_directory(tmp_path)))
    assert holding_of(Quantization.AUTO, scheme, CPU) is Holding.DTYPE
    assert holding_of(Quantization.AUTO, scheme, torch.device("cuda")) is Holding.PACKED
    assert holding_of(Quantization.DEQUANTIZE, scheme, torch.device("cuda")) is Holding.DTYPE
    assert holding_of(Quantization.AUTO, None, torch.device("cuda")) is Holding.DTYPE


@pytest.mark.parametrize(("kind", "suffix"), [("awq", "scales"), ("float-quantized", "weight")])
def test_numbers_that_are_none_are_refused(tmp_path, kind, suffix):
    held, _ = write_quantized(tmp_path, kind, kinds=KERNEL_KINDS, **SIZES)
    name = DOWN.removesuffix("weight") + suffix
    held[name].view(torch.uint8)[-1] = 0x7F if suffix == "weight" else 0xFF
    held[name].view(torch.uint8)[-1, -1] = 0x7F
    save_file(held, tmp_path / "model.safetensors")
    with kernels_on("cpu"), pytest.raises(CheckpointError, match=r"down_proj\.weight holds NaN or infinity"):
        reader(tmp_path, Holding.PACKED).matrix(DOWN)


def test_zero_points_of_float8_are_refused_unless_they_are_zero(tmp_path):
    held, worths = write_quantized(tmp_path, "float-quantized", **SIZES)
    name = DOWN.removesuffix("weight") + "weight_zero_point"
    held[name] = torch.zeros(1, dtype=torch.int8)
    save_file(held, tmp_path / "model.safetensors")
    assert torch.equal(reader(tmp_path, Holding.DTYPE).matrix(DOWN), worths[DOWN])
    held[name] += 1
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="weight_zero_point is not zero"):
        reader(tmp_path, Holding.DTYPE).matrix(DOWN)


def test_flag_reaches_the_engine():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    parser.set_defaults(model="m", role="both")
    assert engine_config(parser.parse_args([])).quantization is Quantization.AUTO
    assert engine_config(parser.parse_args(["--quantization", "int8"])).quantization is Quantization.INT8
