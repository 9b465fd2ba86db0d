"""Draws of models that transformers computes over Tandem's pages, some of them with states."""

from random import Random
from typing import Any

from tandem_testing.random_models.sizes import FULL, WINDOWS, decoder, kinds, rotation, some
from tandem_testing.tiny_checkpoints import TinyModel


def _plain(config_class: str, *, head_dim: bool = False, **chances: tuple[Any, ...]) -> Any:
    def draw(rng: Random) -> TinyModel:
        fields = decoder(rng, head_dim=head_dim) | some(rng, **chances)
        return TinyModel(config_class=config_class, fields=fields | {"rope_parameters": rotation(rng)})

    return draw


apertus = _plain("ApertusConfig", attention_bias=(True, False))
arcee = _plain("ArceeConfig", attention_bias=(True, False), mlp_bias=(True, False))
cohere = _plain("CohereConfig", logit_scale=(0.5, 0.0625), use_qk_norm=(True, False))
gemma = _plain("GemmaConfig", head_dim=True)
olmoe = _plain("OlmoeConfig", num_experts=(3, 5), num_experts_per_tok=(1, 2), norm_topk_prob=(True, False))
starcoder2 = _plain("Starcoder2Config", sliding_window=(*WINDOWS, None), use_bias=(True, False))


def _classic(rng: Random) -> dict[str, Any]:
    """Without KV heads of their own and RMSNorm."""
    fields = decoder(rng, head_dim=False)
    fields.pop("rms_norm_eps")
    return fields | {"num_key_value_heads": fields["num_attention_heads"]}


def biogpt(rng: Random) -> TinyModel:
    return TinyModel(config_class="BioGptConfig", fields=_classic(rng) | some(rng, scale_embedding=(True, False)))


def gpt2(rng: Random) -> TinyModel:
    fields = _classic(rng) | some(rng, scale_attn_by_inverse_layer_idx=(True, False))
    return TinyModel(config_class="GPT2Config", fields=fields)


def gpt_neox(rng: Random) -> TinyModel:
    fields = _classic(rng) | some(rng, use_parallel_residual=(True, False), attention_bias=(True, False))
    rope = rotation(rng, partial_rotary_factor=rng.choice((0.5, 1.0)), exclude=("dynamic", "llama3", "yarn"))
    return TinyModel(config_class="GPTNeoXConfig", fields=fields | {"rope_parameters": rope})


def opt(rng: Random) -> TinyModel:
    fields = _classic(rng)
    fields |= {"ffn_dim": 96, "word_embed_proj_dim": rng.choice((fields["hidden_size"], 24))}
    return TinyModel(config_class="OPTConfig", fields=fields | some(rng, enable_bias=(True, False)))


def phi(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=False) | some(rng, qk_layernorm=(True, False))
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return TinyModel(config_class="PhiConfig", fields=fields | {"rope_parameters": rope})


def _mamba2(rng: Random, *, prefix: str = "mamba_") -> dict[str, Any]:
    """Sizes of Mamba 2 whose heads a number of groups shares."""
    groups, per_group, width = rng.choice((1, 2, 3)), rng.choice((1, 2, 4)), rng.choice((8, 16))
    return {
        f"{prefix}n_heads": groups * per_group,
        f"{prefix}d_head": width,
        f"{prefix}n_groups": groups,
        **some(rng, mamba_d_state=(6, 12, 16), mamba_d_conv=(2, 3, 4), mamba_chunk_size=(8, 16, 256)),
        **some(rng, mamba_conv_bias=(True, False)),
    }


def _doubled(rng: Random) -> dict[str, Any]:
    """A decoder whose hidden size, times two, is that of its Mamba heads."""
    fields = decoder(rng, head_dim=False, num_hidden_layers=rng.choice((2, 3, 5)), initializer_range=0.1)
    heads = rng.choice([heads for heads in (2, 4, 8) if 2 * fields["hidden_size"] % heads == 0])
    return fields | {
        "mamba_n_heads": heads,
        "mamba_d_head": 2 * fields["hidden_size"] // heads,
        "mamba_n_groups": rng.choice([groups for groups in (1, 2) if heads % groups == 0]),
        "mamba_expand": 2,
        **some(rng, mamba_d_state=(6, 12, 16), mamba_d_conv=(2, 3, 4), mamba_chunk_size=(8, 16, 256)),
        **some(rng, mamba_conv_bias=(True, False)),
    }


def bamba(rng: Random) -> TinyModel:
    fields = _doubled(rng)
    layers = fields["num_hidden_layers"]
    fields |= {"attn_layer_indices": sorted(rng.sample(range(layers), rng.randint(1, layers - 1)))}
    return TinyModel(config_class="BambaConfig", fields=fields)


def falcon_h1(rng: Random) -> TinyModel:
    fields = decoder(rng, initializer_range=0.1) | _mamba2(rng)
    fields |= {"mamba_d_ssm": fields["mamba_n_heads"] * fields["mamba_d_head"]}
    fields |= some(rng, key_multiplier=(0.8, 1.0), mamba_rms_norm=(True, False), projectors_bias=(True, False))
    return TinyModel(config_class="FalconH1Config", fields=fields)


def granite_hybrid(rng: Random) -> TinyModel:
    fields = _doubled(rng)
    types = kinds(rng, fields["num_hidden_layers"], first="mamba", second="attention")
    types[0], types[-1] = rng.sample(("mamba", "attention"), 2)
    fields |= {"layer_types": types} | some(
        rng, num_local_experts=(0, 4), shared_intermediate_size=(48,), position_embedding_type=("rope", None)
    )
    return TinyModel(config_class="GraniteMoeHybridConfig", fields=fields)


def jamba(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=False, num_hidden_layers=rng.choice((2, 3, 5)), initializer_range=0.1)
    period = rng.choice((2, 3))
    fields |= {
        "attn_layer_period": period,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        **some(rng, num_experts=(1, 4), mamba_d_state=(6, 16), mamba_d_conv=(2, 4), mamba_dt_rank=(3, 8)),
        **some(rng, mamba_conv_bias=(True, False), mamba_proj_bias=(True, False)),
    }
    return TinyModel(config_class="JambaConfig", fields=fields)


def _convolutions(rng: Random) -> dict[str, Any]:
    fields = decoder(rng, head_dim=False, num_hidden_layers=rng.choice((2, 3, 5)))
    fields["norm_eps"] = fields.pop("rms_norm_eps")
    types = kinds(rng, fields["num_hidden_layers"], first="conv")
    types[0], types[-1] = rng.sample(("conv", FULL), 2)
    return fields | {"layer_types": types} | some(rng, conv_L_cache=(2, 3, 4), conv_bias=(True, False))


def lfm2(rng: Random) -> TinyModel:
    return TinyModel(config_class="Lfm2Config", fields=_convolutions(rng) | {"block_auto_adjust_ff_dim": False})


def lfm2_moe(rng: Random) -> TinyModel:
    fields = _convolutions(rng) | some(
        rng,
        num_experts=(4, 5),
        num_experts_per_tok=(1, 2),
        num_dense_layers=(0, 1, 2),
        moe_intermediate_size=(24, 40),
        use_expert_bias=(True, False),
        norm_topk_prob=(True, False),
    )
    return TinyModel(config_class="Lfm2MoeConfig", fields=fields)


def nemotron_h(rng: Random) -> TinyModel:
    layers = rng.choice((2, 4, 5))
    types = [rng.choice(("mamba", "attention", "moe", "mlp")) for _ in range(layers)]
    types[0], types[-1] = rng.sample(("mamba", "attention"), 2)
    groups, per_group = rng.choice((1, 2)), rng.choice((2, 4))
    size, kept = rng.choice((2, 3)), rng.randint(1, 2)
    fields = decoder(rng, num_hidden_layers=layers, initializer_range=0.1) | {
        "layers_block_type": types,
        "mamba_num_heads": groups * per_group,
        "n_groups": groups,
        "n_routed_experts": 2 * size,
        "n_group": 2,
        "topk_group": kept,
        "num_experts_per_tok": rng.randint(1, 2),
        "use_mamba_kernels": False,
        **some(
            rng,
            mamba_head_dim=(8, 16),
            ssm_state_size=(6, 12),
            conv_kernel=(2, 3, 4),
            chunk_size=(8, 16, 128),
            moe_intermediate_size=(24, 40),
            moe_shared_expert_intermediate_size=(24, 48),
            norm_topk_prob=(True, False),
            attention_bias=(True, False),
            mlp_bias=(True, False),
        ),
    }
    fields["layer_norm_epsilon"] = fields.pop("rms_norm_eps")
    return TinyModel(config_class="NemotronHConfig", fields=fields)


def olmo_hybrid(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=False, num_hidden_layers=rng.choice((2, 4, 5)), initializer_range=0.1)
    types = kinds(rng, fields["num_hidden_layers"], first="linear_attention")
    types[0], types[-1] = rng.sample(("linear_attention", FULL), 2)
    keys = rng.choice((1, 2, 3))
    fields |= {
        "layer_types": types,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice((1, 2)),
        **some(rng, linear_key_head_dim=(8, 16), linear_value_head_dim=(12, 24), linear_conv_kernel_dim=(2, 3, 4)),
    }
    return TinyModel(config_class="OlmoHybridConfig", fields=fields)


def zamba2(rng: Random) -> TinyModel:
    heads = rng.choice((2, 4))
    fields = decoder(rng, head_dim=False, num_attention_heads=heads, num_key_value_heads=heads, initializer_range=0.1)
    layers = rng.choice((2, 4, 5))
    types = [rng.choice(("mamba", "hybrid")) for _ in range(layers)]
    types[0], types[1] = "mamba", "hybrid"
    fields |= {
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "layers_block_type": types,
        "n_mamba_heads": rng.choice((4, 8)),
        "use_mamba_kernels": False,
        **some(
            rng,
            num_mem_blocks=(1, 2),
            mamba_d_state=(6, 12),
            mamba_d_conv=(2, 4),
            mamba_ngroups=(1, 2),
            chunk_size=(8, 16),
            use_mem_rope=(True, False),
            use_shared_attention_adapter=(True, False),
            adapter_rank=(4,),
        ),
    }
    return TinyModel(config_class="Zamba2Config", fields=fields)


PLAIN = {
    "apertus": apertus,
    "arcee": arcee,
    "biogpt": biogpt,
    "cohere": cohere,
    "gemma": gemma,
    "gpt2": gpt2,
    "gpt-neox": gpt_neox,
    "olmoe": olmoe,
    "opt": opt,
    "phi": phi,
    "starcoder2": starcoder2,
}
WITH_STATES = {
    "bamba": bamba,
    "falcon-h1": falcon_h1,
    "granite-hybrid": granite_hybrid,
    "jamba": jamba,
    "lfm2": lfm2,
    "lfm2-moe": lfm2_moe,
    "nemotron-h": nemotron_h,
    "olmo-hybrid": olmo_hybrid,
    "zamba2": zamba2,
}
