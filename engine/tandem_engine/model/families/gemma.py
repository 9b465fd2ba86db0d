"""What Gemma 2 and 3 have in common.

    norms        scale by 1 + weight; one before and one after attention and the feed-forward block
    embeddings   times √hidden_size, and tied to the output head unless config.json says otherwise
    scores       divided by √query_pre_attn_scalar instead of √head_dim
    gate         GELU by its tanh approximation

Each family adds its windows, caps and rotations.
"""

import math
from dataclasses import replace

from tandem_engine.config import Activation, ModelConfig, NormKind
from tandem_engine.model.config_fields import ConfigFields

GEMMA_FIELDS = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
    "use_bidirectional_attention",
)
DEFAULT_QUERY_SCALAR = 256.0
MAX_QUERY_SCALAR = 1e6


def as_gemma(fields: ConfigFields, base: ModelConfig) -> ModelConfig:
    """`base` with Gemma's ways. Raises `CheckpointError` for variants that are no causal model of this kind."""
    if fields.has("hidden_activation") and fields.values["hidden_activation"] != "gelu_pytorch_tanh":
        fields.defer("hidden_activation", "must be gelu_pytorch_tanh")
    if fields.flag("use_bidirectional_attention", default=False):
        fields.refuse("use_bidirectional_attention", "must be false; tokens of a generating model see no later ones")
    scalar = fields.number("query_pre_attn_scalar", least=1e-3, most=MAX_QUERY_SCALAR, default=DEFAULT_QUERY_SCALAR)
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        base,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        attention_scale=1 / math.sqrt(scalar),
        embedding_scale=math.sqrt(base.hidden_size),
        activation=Activation.GELU_TANH,
        norm=NormKind.UNIT_OFFSET,
        sandwich_norms=True,
    )
