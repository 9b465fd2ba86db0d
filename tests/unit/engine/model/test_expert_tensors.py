"""Three namings of the same experts load as the same model."""

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.checkpoint_files import open_tensors
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.loader import load_model
from tandem_engine.model.tensor_names import canonical_experts, expert_name
from tandem_testing.checkpoint_files import random_tensors, write_checkpoint, write_config
from tandem_testing.quantized_files import mixtral_names

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
LAYERS, EXPERTS = 2, 3


@pytest.fixture
def ours(tmp_path):
    """A checkpoint under our names, which are those of Qwen3-MoE."""
    return write_checkpoint(tmp_path, **MIXTRAL)


def published(tensors):
    return {mixtral_names(name): tensor for name, tensor in tensors.items()}


def stacked(tensors):
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        of = {
            projection: torch.stack([tensors[prefix + expert_name(expert, projection)] for expert in range(EXPERTS)])
            for projection in ("gate_proj", "up_proj", "down_proj")
        }
        result[f"{prefix}mlp.experts.gate_up_proj"] = torch.cat((of["gate_proj"], of["up_proj"]), dim=1)
        result[f"{prefix}mlp.experts.down_proj"] = of["down_proj"]
    return result


@pytest.mark.parametrize("naming", [published, stacked])
def test_expert_naming_does_not_change_tensors_or_fingerprint(tmp_path, ours, naming):
    fingerprint = read_model_config(tmp_path).fingerprint
    (tmp_path / "model.safetensors").unlink()
    renamed = naming(ours)
    assert set(renamed) != set(ours)
    save_file(renamed, tmp_path / "model.safetensors")
    tensors = canonical_experts(open_tensors(open_directory(tmp_path)))
    assert tensors.keys() == ours.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.read(), ours[name]), name
    assert read_model_config(tmp_path).fingerprint == fingerprint


def test_missing_expert_is_refused_by_name(tmp_path, ours):
    del ours["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(ours, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack tensor model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("shape", [(3, 47, 16), (3, 48), (1 << 20, 0, 16)])
def test_stack_of_an_odd_shape_is_refused_by_its_own_name(tmp_path, ours, shape):
    odd = {**stacked(ours), "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(shape)}
    save_file(odd, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="experts"):
        read_model_config(tmp_path)


def test_layers_without_experts_keep_their_feed_forward_block(tmp_path):
    moe = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "mlp_only_layers": [0]}
    write_config(tmp_path, architectures=["Qwen3MoeForCausalLM"], **moe)
    tensors = random_tensors(tmp_path)
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    assert "model.layers.1.mlp.up_proj.weight" not in tensors
    assert tensors["model.layers.1.mlp.experts.2.down_proj.weight"].shape == (16, 6)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(tmp_path, read_model_config(tmp_path), torch.float32, progress=False)
    assert [len(getattr(block.feed_forward, "experts", ())) for block in model.blocks] == [0, 3]
