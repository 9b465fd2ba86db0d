"""Latent attention (MLA) from its tensors.

    self_attn.q_a_proj, q_a_layernorm, q_b_proj     hidden states to few numbers, and those to queries; or q_proj alone
    self_attn.kv_a_proj_with_mqa                    hidden states to [latent | the rotated part of all keys]
    self_attn.kv_a_layernorm                        of the latent
    self_attn.kv_b_proj                             of each head [keys without positions; values] from the latent
    self_attn.o_proj

Ranks divide the heads. Every rank computes and keeps the whole latent.
"""

from tandem_engine.config import LatentConfig, ModelConfig, NormKind
from tandem_engine.model.layers.latent import LatentAttention
from tandem_engine.model.layers.norm import Norm, rms_norm
from tandem_engine.model.weights import Heads, Weights, column_parallel, replicated, row_parallel
from tandem_engine.parallel.sharding import Split

LATENT_EPS = 1e-6
"""Of the norms inside, whatever `rms_norm_eps` says: transformers leaves it at its default in every family."""


def latent_attention(
    config: ModelConfig, latent: LatentConfig, weights: Weights, heads: Heads, *, prefix: str, norm: Norm
) -> LatentAttention:
    """Of the layer whose tensors begin with `prefix`; `norm` is that before it."""
    own = f"{prefix}self_attn."
    few = latent.query_rank is not None
    compressing = ("q_a_proj", "kv_a_proj_with_mqa") if few else ("kv_a_proj_with_mqa",)
    per_head = weights.stacked(
        f"{own}kv_b_proj.weight", split=Split(dim=0, unit=latent.plain_size + latent.value_size)
    ).view(heads.query, -1, latent.rank)
    return LatentAttention(
        norm=norm,
        shape=latent,
        compress=replicated(weights, *(own + name for name in compressing), bias=config.attention_bias),
        query_norm=_norm(weights, f"{own}q_a_layernorm") if few else None,
        query=column_parallel(
            weights, f"{own}{'q_b_proj' if few else 'q_proj'}", bias=False, split=Split(dim=0, unit=latent.query_size)
        ),
        latent_norm=_norm(weights, f"{own}kv_a_layernorm"),
        keys=per_head[:, : latent.plain_size],
        values=per_head[:, latent.plain_size :].transpose(1, 2),
        output=row_parallel(
            weights, f"{own}o_proj", bias=config.output_bias, split=Split(dim=1, unit=latent.value_size)
        ),
    )


def _norm(weights: Weights, name: str) -> Norm:
    return rms_norm(weights.stacked(f"{name}.weight"), eps=LATENT_EPS, kind=NormKind.PLAIN)
