"""Architecture of a model, read from its checkpoint's `config.json` (`model.checkpoint`)."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters as in Hugging Face `rope_parameters` / `rope_scaling`."""

    rope_type: str = "default"
    """default, linear, dynamic, llama3 or yarn; longrope where transformers computes the model."""
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelImpl(StrEnum):
    """Who computes a model."""

    AUTO = "auto"
    """Tandem where it knows the architecture, transformers otherwise."""
    TANDEM = "tandem"
    TRANSFORMERS = "transformers"
    """The model code of transformers, with attention over our pages."""


class Activation(StrEnum):
    """Of the gate in a feed-forward block."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its tanh approximation."""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """(up + 1) · gate · sigmoid(alpha · gate) of bounded gate and up (gpt_oss): see `GateClamp`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateClamp:
    """Numbers of `Activation.CLAMPED_SWIGLU`."""

    alpha: float
    """Factor of the gate in its sigmoid."""
    limit: float
    """gate ≤ limit, −limit ≤ up ≤ limit."""


class NormKind(StrEnum):
    """What a stored norm weight w means, and when it is rounded."""

    PLAIN = "plain"
    """Scale by w, after rounding to the model's dtype (Llama)."""
    UNIT_OFFSET = "unit_offset"
    """Scale by 1 + w in float32, then round (Gemma)."""
    ROUND_LAST = "round_last"
    """Scale by w in float32, then round (gpt_oss)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Mixture of experts in place of the feed-forward block."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalise: bool
    """Whether the weights of a token's chosen experts are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that keep an ordinary feed-forward block."""
    bias: bool = False
    """Biases on the router and on both projections of each expert (gpt_oss)."""
    interleaved: bool = False
    """Whether gate and up of an expert are stored as one matrix whose outputs alternate (gpt_oss)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a decoder, independent of its family's spelling of field names.

    When transformers computes it, only sizes, context, ids and dtype mean anything; the rest is its business.
    """

    family: str
    """The `model_type` of transformers."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    impl: ModelImpl = ModelImpl.TANDEM
    attention_bias: bool = False
    """Bias on q, k and v (qwen2 always; llama when `attention_bias`)."""
    output_bias: bool = False
    """Bias on o_proj (llama when `attention_bias`)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on q and k (qwen3, gemma3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer, how many tokens a token sees, itself included; None is all. () when no layer has a window."""
    local_rope: RopeConfig | None = None
    """Rotary parameters of `local_layers`, where layers differ (gemma3)."""
    local_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    """Factor of attention scores; None is 1 / √head_dim."""
    attention_soft_cap: float | None = None
    """Bound of attention scores (gemma2)."""
    logit_soft_cap: float | None = None
    """Bound of the output logits (gemma2)."""
    embedding_scale: float = 1.0
    """Factor of the embeddings (gemma: √hidden_size)."""
    attention_sinks: bool = False
    """Scores without a token, one for each query head of a layer (gpt_oss)."""
    activation: Activation = Activation.SILU
    gate_clamp: GateClamp | None = None
    """Of `Activation.CLAMPED_SWIGLU` alone."""
    norm: NormKind = NormKind.PLAIN
    sandwich_norms: bool = False
    """Norms after attention and after the feed-forward block too, before each is added (gemma)."""
    moe: MoeConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """dtype that the checkpoint declares: float32, bfloat16 or float16."""
    quantization: str = ""
    """How the checkpoint stores its matrices and how they are held; empty: as they are, in the dtype."""
    fingerprint: str = ""
    """Digest of config and weight headers: two workers with different ones never exchange KV."""
