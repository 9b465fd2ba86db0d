"""DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash: what their config.json means, and their experts and tensors."""

import math

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.base.errors import CheckpointError, UnsupportedVariantError
from tandem_engine.config import LatentConfig, ModelConfig, Scoring, SharedExpert
from tandem_engine.model.adapters.checkpoint import open_adapter
from tandem_engine.model.checkpoint import parse_config, read_model_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.decoder import attention_specs
from tandem_engine.model.layers.linear import Linear
from tandem_engine.model.layers.mlp import Router
from tandem_engine.model.loader import load_model
from tandem_testing.checkpoint_files import CONFIG, random_tensors, write_config
from tandem_testing.dense_attention import DenseAttend
from tandem_testing.quantized_files import write_quantized

SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
}
V2 = {**SIZES, "architectures": ["DeepseekV2ForCausalLM"]}
V3 = {**SIZES, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2}
GLM = {**SIZES, "architectures": ["Glm4MoeLiteForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {**YARN, "original_max_position_embeddings": 4096, "factor": 32.0, "type": "yarn"},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}


@pytest.fixture
def parse(tmp_path):
    def parse_with(*, without=(), **changes) -> ModelConfig:
        return parse_config(open_directory(write_config(tmp_path, without=without, **changes)))

    return parse_with


def test_deepseek_v3_keeps_one_latent_per_token(parse):
    config = parse(**V3)
    assert config.latent == LatentConfig(
        query_rank=6, rank=12, plain_size=10, rotated_size=4, value_size=8, interleaved=True
    )
    assert (config.num_kv_heads, config.head_dim, config.rotary_heads) == (1, 16, 4)
    assert {(spec.value_width, spec.scale) for spec in attention_specs(config)} == {(12, 14**-0.5)}


def test_deepseek_v3_routes_as_published(parse):
    moe = parse(**V3, topk_method="noaux_tc", scoring_func="sigmoid").moe
    assert (moe.scoring, moe.choice_bias, moe.float32_router, moe.normalize) == (Scoring.SIGMOID, True, True, True)
    assert (moe.groups, moe.kept_groups, moe.group_top, moe.scale) == (4, 2, 2, 2.5)
    moe = parse(**V3, n_shared_experts=2, first_k_dense_replace=1).moe
    assert (moe.shared, moe.dense_layers) == (SharedExpert(intermediate_size=20), (0,))


def test_deepseek_v2_has_groups_only_if_its_method_does(parse):
    groups = {"n_group": 4, "topk_group": 2}
    plain, limited = (parse(**V2, **groups, topk_method=each).moe for each in ("greedy", "group_limited_greedy"))
    assert (plain.groups, plain.kept_groups, plain.normalize, plain.scoring) == (1, 1, False, Scoring.SOFTMAX)
    assert (limited.groups, limited.kept_groups, limited.group_top, limited.choice_bias) == (4, 2, 1, False)
    assert (limited.shared, limited.dense_layers) == (SharedExpert(intermediate_size=20), ())


def test_null_query_rank_is_a_whole_query(parse):
    assert parse(**{**V2, "q_lora_rank": None}).latent.query_rank is None
    assert parse(**V2, without=("q_lora_rank",)).latent.query_rank == 1536


def test_adapters_of_models_with_latents_are_refused(parse, tmp_path):
    with pytest.raises(CheckpointError, match="latent attention"):
        open_adapter(tmp_path, parse(**V3), max_rank=8)


def test_glm_has_its_own_eps_and_dense_layers(parse):
    assert parse(**GLM, without=("rms_norm_eps",)).rms_eps == 1e-5
    assert parse(**GLM).moe.dense_layers == (0,)
    assert parse(**GLM, first_k_dense_replace=1).moe.dense_layers == (0,)
    assert parse(**GLM, mlp_layer_types=["sparse", "dense"]).moe.dense_layers == (1,)


def test_mscale_all_dim_is_a_factor_of_the_scores(parse):
    config = parse(**V3, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    assert config.attention_scale == pytest.approx(14**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert parse(**V3, rope_scaling={**YARN, "mscale_all_dim": 0}).attention_scale == pytest.approx(14**-0.5)


def test_kimi_k2_is_a_deepseek_v3(parse):
    without = tuple(CONFIG.keys() - KIMI_K2.keys() - {"rms_norm_eps", "dtype"})
    config = parse(**KIMI_K2, without=without)
    assert (config.family, config.head_dim, config.moe.num_experts, config.max_position) == (
        "deepseek_v3",
        576,
        384,
        131072,
    )


@pytest.mark.parametrize(
    ("base", "changes", "field"),
    [
        (V3, {"qk_rope_head_dim": 5}, "qk_rope_head_dim"),
        (V3, {"kv_lora_rank": 1021}, "kv_lora_rank"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank"),
        (V3, {"v_head_dim": 0}, "v_head_dim"),
        (V3, {"head_dim": 8}, "head_dim"),
        (V3, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (V3, {"n_group": 3}, "n_group"),
        (V3, {"n_group": 8}, "n_group"),
        (V3, {"topk_group": 5}, "topk_group"),
        (V3, {"num_experts_per_tok": 5}, "topk_group"),
        (V3, {"n_shared_experts": 0}, "n_shared_experts"),
        (V2, {"topk_method": "group_limited_greedy"}, "n_group"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (GLM, {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (GLM, {"mlp_layer_types": ["dense", "moe"]}, "mlp_layer_types"),
        (GLM, {"first_k_dense_replace": 2}, "first_k_dense_replace"),
    ],
)
def test_config_that_fits_no_model_is_refused_by_field(parse, base, changes, field):
    with pytest.raises(CheckpointError, match=f"config.json: {field} "):
        parse(**{**base, **changes})


@pytest.mark.parametrize(
    ("base", "changes", "field"),
    [
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_variant_that_is_not_ours_is_deferred_by_field(parse, base, changes, field):
    with pytest.raises(UnsupportedVariantError, match=field):
        parse(**{**base, **changes})


def layer_behind(tensors):
    """Layer 2 of a model of two, as layer 1."""
    own = {name: value for name, value in tensors.items() if "layers.1." in name}
    return {name.replace("layers.1.", "layers.2."): value.clone() for name, value in own.items()}


def test_layers_that_predict_ahead_are_left_out(tmp_path):
    tensors = random_tensors(write_config(tmp_path, **V3))
    ahead = {"model.layers.2.eh_proj.weight": torch.ones(16, 32), "model.layers.2.enorm.weight": torch.ones(16)}
    save_file(tensors | layer_behind(tensors) | ahead, tmp_path / "model.safetensors")
    assert read_model_config(tmp_path).num_layers == 2


def test_layer_too_many_is_refused(tmp_path):
    """Nothing distinguishes it from one that config.json has forgotten."""
    tensors = random_tensors(write_config(tmp_path, **V3))
    save_file(tensors | layer_behind(tensors), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.2\."):
        read_model_config(tmp_path)


def test_router_is_float32_in_a_model_of_bfloat16(tmp_path):
    tensors = random_tensors(write_config(tmp_path, **V3, first_k_dense_replace=0))
    save_file(tensors, tmp_path / "model.safetensors")
    block, *_ = load_model(tmp_path, read_model_config(tmp_path), torch.bfloat16, progress=False).blocks
    router = block.feed_forward.router
    assert torch.equal(router.weight.weight, tensors["model.layers.0.mlp.gate.weight"])
    assert torch.equal(router.bias, tensors["model.layers.0.mlp.gate.e_score_correction_bias"])


def logits(path) -> torch.Tensor:
    model = load_model(path, read_model_config(path), torch.float32, progress=False)
    attend, ids = DenseAttend(extend_lens=[9], specs=model.attention), torch.arange(9)
    with torch.inference_mode():
        return model.logits(model.forward(ids, ids, attend, ids))


def test_float8_blocks_are_the_numbers_they_stand_for(tmp_path):
    """The matrix of keys and values is cut into two, and that of latents is stacked on that of queries."""
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    quantized.mkdir()
    plain.mkdir()
    _, worths = write_quantized(quantized, "fp8", **V3)
    write_config(plain, **V3)
    save_file({name: worth.contiguous() for name, worth in worths.items()}, plain / "model.safetensors")
    assert torch.equal(logits(quantized), logits(plain))


PRODUCTS = torch.tensor([[3.0, -3.0, 1.0, 1.1, 0.0, 2.0]])


def experts_of(**fields) -> list[list[int]]:
    """Chosen of six in three groups; the hidden states of a token are its products."""
    router = Router(
        weight=Linear(weight=torch.eye(6), bias=None),
        experts_per_token=2,
        normalize=False,
        scoring=Scoring.SIGMOID,
        groups=3,
        **fields,
    )
    return router(PRODUCTS).experts.tolist()


def test_group_is_worth_its_best_experts():
    assert experts_of(kept_groups=1, group_top=2) == [[3, 2]]
    assert experts_of(kept_groups=1, group_top=1) == [[0, 1]]
    assert experts_of(kept_groups=2, group_top=2) == [[5, 3]]
