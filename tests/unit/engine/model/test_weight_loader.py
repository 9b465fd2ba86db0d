"""Weights arrive stacked, cast and sound, or loading fails by name."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.checkpoint_files import open_tensors
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.loader import WeightReader, load_model, resolve_dtype
from tandem_testing.checkpoint_files import COMPUTED, random_tensors, write_checkpoint, write_config
from tandem_testing.dense_attention import DenseAttend


def load(directory, dtype=torch.float32, **options):
    return load_model(directory, read_model_config(directory), dtype, progress=False, **options)


def logits(model, ids=(1, 2, 3)) -> torch.Tensor:
    count = len(ids)
    with torch.inference_mode():
        attend = DenseAttend(extend_lens=[count], specs=model.attention)
        return model.logits(model.forward(torch.tensor(ids), torch.arange(count), attend, torch.arange(count)))


@pytest.fixture
def read_bytes() -> list[int]:
    return []


@pytest.fixture
def reader(tmp_path, read_bytes):
    write_checkpoint(tmp_path, **COMPUTED)
    return WeightReader(
        tensors=open_tensors(open_directory(tmp_path)),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        advance=read_bytes.append,
    )


def test_tensors_are_stacked_in_requested_order_and_cast(reader, tmp_path):
    tensors = random_tensors(tmp_path)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in ("v", "q", "k")]
    stacked = reader.stacked(*names)
    assert stacked.is_contiguous()
    assert torch.equal(stacked, torch.cat([tensors[name] for name in names]).bfloat16())


def test_progress_counts_stored_bytes(reader, read_bytes):
    reader.stacked("model.norm.weight")
    reader.stacked("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    assert read_bytes == [16 * 4, 24 * 16 * 4, 24 * 16 * 4]


def test_progress_counts_repeated_reads_once(reader, read_bytes):
    """Experts of which some cannot be packed are read again as they are: it went beyond 100 %."""
    for name in ("model.norm.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"):
        reader.stacked(name)
    assert read_bytes == [16 * 4, 24 * 16 * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_float32_for_any_weight_dtype(tmp_path, dtype):
    write_checkpoint(tmp_path, **COMPUTED)
    result = logits(load(tmp_path, dtype))
    assert result.dtype == torch.float32
    assert result.shape == (3, 20)
    assert result.isfinite().all()


def test_tied_embeddings_are_the_output_head(tmp_path):
    tensors = write_checkpoint(tmp_path, **COMPUTED)
    (tied := tmp_path / "tied").mkdir()
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    write_config(tied, **COMPUTED, tie_word_embeddings=True)
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, tied / "model.safetensors")
    assert torch.equal(logits(load(tied)), logits(load(tmp_path)))


def test_leftovers_of_older_exporters_are_skipped(tmp_path):
    write_config(tmp_path, **COMPUTED, tie_word_embeddings=True)
    tensors = random_tensors(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((2,), torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    assert logits(load(tmp_path)).isfinite().all()


def test_missing_tensor_is_refused_by_name(tmp_path):
    tensors = write_checkpoint(tmp_path, **COMPUTED)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        read_model_config(tmp_path)


def test_missing_output_head_hints_at_tied_embeddings(tmp_path):
    tensors = write_checkpoint(tmp_path, **COMPUTED)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight; set tie_word_embeddings to true"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "lora_A"]
)
def test_tensor_with_no_place_in_the_model_is_refused_by_name(tmp_path, name):
    tensors = write_checkpoint(tmp_path, **COMPUTED)
    save_file({**tensors, name: torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}'"):
        read_model_config(tmp_path)


def test_weight_shape_unlike_config_is_rejected_before_loading(tmp_path):
    write_checkpoint(tmp_path, **COMPUTED)
    write_config(tmp_path, **COMPUTED, vocab_size=21)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has shape \[20, 16\]; config\.json implies \[21"):
        read_model_config(tmp_path)


def test_weights_replaced_since_the_config_was_read_are_refused(tmp_path):
    write_checkpoint(tmp_path, **COMPUTED)
    config = dataclasses.replace(read_model_config(tmp_path), num_layers=1)
    with pytest.raises(CheckpointError, match="no part of a llama model"):
        load_model(tmp_path, config, torch.float32, progress=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_weight_that_is_not_finite_is_refused_by_name(tmp_path, name, value):
    tensors = write_checkpoint(tmp_path, **COMPUTED)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} holds NaN or infinity as float32"):
        load(tmp_path)


def test_weight_that_overflows_the_target_dtype_is_refused(tmp_path):
    tensors = write_checkpoint(tmp_path, **COMPUTED)
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    assert logits(load(tmp_path)).isfinite().all()
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN or infinity as float16"):
        load(tmp_path, torch.float16)


def test_weights_that_were_never_written_are_refused(tmp_path):
    tensors = {name: torch.zeros_like(tensor) for name, tensor in write_checkpoint(tmp_path, **COMPUTED).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is all zero"):
        load(tmp_path)


def test_shorter_context_gives_the_same_logits(tmp_path):
    write_checkpoint(tmp_path, **COMPUTED)
    assert torch.equal(logits(load(tmp_path, context_length=3)), logits(load(tmp_path)))


def test_auto_means_the_dtype_of_the_checkpoint(tmp_path):
    write_checkpoint(tmp_path, **COMPUTED, dtype="bfloat16")
    config = read_model_config(tmp_path)
    assert resolve_dtype("auto", config) is torch.bfloat16
    assert resolve_dtype("float32", config) is torch.float32
    with pytest.raises(ConfigError, match="--dtype"):
        resolve_dtype("int8", config)
