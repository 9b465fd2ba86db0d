"""Architecture of a model, read from its checkpoint's `config.json` (`model.checkpoint`)."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters as in Hugging Face `rope_parameters` / `rope_scaling`."""

    rope_type: str = "default"
    """default, linear, dynamic, llama3, yarn, longrope or proportional; none of layers without rotation (NoPE)."""
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
    short_factors: tuple[float, ...] = ()
    """Divisors of the frequencies up to the original context (longrope), one per pair of dimensions."""
    long_factors: tuple[float, ...] = ()
    """The same beyond it."""
    rotary_dim: int | None = None
    """Dimensions of each head that rotate, the first ones; None is all."""
    turning_pairs: int = 0
    """Pairs of dimensions that rotate, the first ones, by frequencies of whole heads (proportional)."""
    interleaved: bool = False
    """Whether the checkpoint rotates neighbors, 2i and 2i + 1, instead of i and i + half."""

    def yarn_mscale(self, scale: float) -> float:
        """YaRN's temperature for so much `scale`."""
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


class ModelImpl(StrEnum):
    """The implementation that computes a model."""

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
    """Scale by w in float32, then round (OLMo 2, gpt_oss)."""
    CENTERED = "centered"
    """LayerNorm without bias: subtract the mean, then as `ROUND_LAST` (Cohere 2)."""


class NormPlacement(StrEnum):
    """Where a layer has its norms. Both blocks add their results to the hidden states."""

    BEFORE = "before"
    """One before each block (Llama)."""
    AROUND = "around"
    """One before and one after each block (Gemma, GLM-4)."""
    AFTER = "after"
    """One after each block, which reads the hidden states as they are (OLMo 2)."""
    SHARED = "shared"
    """One before both blocks, which read the same states (Cohere 2)."""


class QkNorm(StrEnum):
    """What the norms of q and k span."""

    HEADS = "heads"
    """Each head, before it is rotated (Qwen3)."""
    ROTATED_HEADS = "rotated_heads"
    """Each head, after it was rotated (Hunyuan)."""
    ROTATED_PLAIN = "rotated_plain"
    """Each head, after it was rotated, by no weights; not in layers that do not rotate (Llama 4)."""
    WHOLE = "whole"
    """All heads of q together, and all of k, before they are rotated (OLMo 2)."""


class Scoring(StrEnum):
    """How router logits become scores of experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryScale:
    """Factor of queries that grows with their position p: 1 + beta · ln(1 + ⌊(p + offset) / period⌋) (Ministral 3)."""

    beta: float
    period: int
    offset: int = 0
    unrotated_only: bool = False
    """Whether it is for layers that do not rotate (Llama 4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    """A feed-forward block for every token, whose result is added to that of the chosen experts."""

    intermediate_size: int
    gated: bool = False
    """Whether the sigmoid of one more projection multiplies its result (Qwen2-MoE)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Mixture of experts in place of the feed-forward block."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalize: bool
    """Whether the weights of a token's chosen experts are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that keep an ordinary feed-forward block."""
    scoring: Scoring = Scoring.SOFTMAX
    choice_bias: bool = False
    """Whether experts are chosen by score plus a bias, which does not count in their weights."""
    groups: int = 1
    """Experts are chosen from the best `kept_groups` of so many groups."""
    kept_groups: int = 1
    group_top: int = 2
    """A group is worth the scores of so many of its experts, the best ones."""
    least_sum: float = 0.0
    """Bound from below of the sum that weights are divided by."""
    scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    float32_router: bool = False
    """Whether the router's logits are computed in float32 whatever the dtype of the model."""
    shared: SharedExpert | None = None
    beside: bool = False
    """Whether layers have a feed-forward block too, with its own norms, and their results are added (Gemma 4)."""
    weighted_inputs: bool = False
    """Whether weights multiply what chosen experts read, in place of their results (Llama 4)."""
    bias: bool = False
    """Biases on the router and on both projections of each expert (gpt_oss)."""
    interleaved: bool = False
    """Whether gate and up of an expert are stored as one matrix whose outputs alternate (gpt_oss)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Attention over one latent per token, from which all heads compute their keys and values (MLA)."""

    query_rank: int | None
    """Numbers that queries are computed from; None is the hidden state."""
    rank: int
    """Numbers that keys and values are computed from."""
    plain_size: int
    """Of a query or key, the dimensions without positions, which come first."""
    rotated_size: int
    """Of a query or key, the dimensions that rotate. All heads have the same of a key."""
    value_size: int
    interleaved: bool
    """Dimensions that rotate together are neighbors; otherwise half of `rotated_size` apart."""

    @property
    def query_size(self) -> int:
        """Of one head."""
        return self.plain_size + self.rotated_size

    @property
    def width(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.rank + self.rotated_size


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaConfig:
    """Layers that keep a state of fixed size for each sequence, in place of K and V (gated delta rule)."""

    layers: tuple[int, ...]
    """Those layers; the others keep K and V."""
    key_heads: int
    value_heads: int
    """A multiple of the key heads. Consecutive ones share a key head."""
    key_size: int
    value_size: int
    kernel: int
    """Tokens that the convolution before the rule sees."""
    joined: bool
    """Whether the checkpoint has two matrices of all inputs, key head after key head (Qwen3-Next)."""

    @property
    def key_width(self) -> int:
        """Of all key heads."""
        return self.key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Of all value heads."""
        return self.value_heads * self.value_size


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePart:
    """A tensor that a layer of transformers keeps of a sequence, besides K and V (`model.fallback_states`)."""

    layer: int
    kind: str
    """`conv_states` or `recurrent_states`."""
    index: int
    """Among those of its kind."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VariedConfig:
    """Layers that differ in their heads, in what they remember and in what they read (Gemma 4)."""

    wide_kv_heads: int
    """KV heads of `ModelConfig.second_layers`, the layers that see all tokens."""
    wide_head_dim: int
    """Size of their heads."""
    keys_are_values: bool
    """Whether their values are what keys are before norm and rotation: they have no v_proj."""
    readers: int
    """So many layers, the last ones, keep no K and V. Each reads those of the last layer of its kind that does."""
    reader_intermediate_size: int
    """Of the feed-forward block in those layers."""
    input_size: int
    """Numbers that each layer gets of each token, in addition to the hidden state; 0 is none."""
    input_vocab_size: int
    """Rows of the table of these numbers."""


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
    qk_norm: QkNorm | None = None
    """RMSNorm on q and k."""
    windows: tuple[int | None, ...] = ()
    """Per layer, how many tokens a token sees, itself included; None is all. () when no layer has a window."""
    chunks: tuple[int | None, ...] = ()
    """Per layer, the length of the chunks that tokens do not see out of (llama4_text); () when no layer has chunks."""
    second_rope: RopeConfig | None = None
    """Rotary parameters of `second_layers`, where layers differ: those with a window (gemma3), those that do not
    rotate (smollm3)."""
    second_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    """Factor of attention scores; None is 1 / √head_dim."""
    query_scale: QueryScale | None = None
    attention_soft_cap: float | None = None
    """Bound of attention scores (gemma2)."""
    logit_soft_cap: float | None = None
    """Bound of the output logits (gemma2)."""
    embedding_scale: float = 1.0
    """Factor of the embeddings (gemma: √hidden_size)."""
    residual_scale: float = 1.0
    """Factor of what each block adds to the hidden states (granite)."""
    logit_scale: float = 1.0
    """Factor of the output logits (cohere2, granite)."""
    attention_sinks: bool = False
    """Scores without a token, one for each query head of a layer (gpt_oss)."""
    activation: Activation = Activation.SILU
    gate_clamp: GateClamp | None = None
    """Of `Activation.CLAMPED_SWIGLU` alone."""
    norm: NormKind = NormKind.PLAIN
    norm_placement: NormPlacement = NormPlacement.BEFORE
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    """Where attention keeps a latent: `num_kv_heads` is then 1, and `head_dim` the size of what is kept."""
    delta: DeltaConfig | None = None
    """Where some layers keep states."""
    varied: VariedConfig | None = None
    """Where layers differ in more than windows and rotation (gemma4_text)."""
    output_gate: bool = False
    """Whether the sigmoid of one more output of q_proj multiplies what each head gathers (Qwen3-Next)."""
    state_parts: tuple[StatePart, ...] = ()
    """What layers keep of a sequence besides K and V, where transformers computes them."""
    states_by_token: bool = False
    """Whether these are computed token by token in a run that continues a sequence."""
    attention_layers: int | None = None
    """Layers that keep K and V, where some do not and transformers computes them; pages count those alone."""
    text_part: bool = False
    """Whether the checkpoint has parts for images too, which are not served."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """dtype that the checkpoint declares: float32, bfloat16 or float16."""
    quantization: str = ""
    """How the checkpoint stores its matrices and how they are held; empty: as they are, in the dtype."""
    fingerprint: str = ""
    """Digest of config and weight headers: two workers with different ones never exchange KV."""

    @property
    def has_states(self) -> bool:
        """Whether some layers keep states."""
        return self.delta is not None or bool(self.state_parts)

    @property
    def rotary_heads(self) -> int:
        """Size of the heads, or parts of heads, that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rotated_size

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """Layers that keep K and V, or a latent, of each token."""
        if self.attention_layers is not None:
            return tuple(range(self.attention_layers))
        stateful = () if self.delta is None else self.delta.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in (*stateful, *self.reading_layers))

    @property
    def reading_layers(self) -> range:
        """Layers that keep no K and V and read those of others."""
        readers = 0 if self.varied is None else self.varied.readers
        return range(self.num_layers - readers, self.num_layers)

    def source_of(self, layer: int) -> int:
        """The layer whose K and V `layer` reads: itself, or the last of its kind that keeps any."""
        if layer not in self.reading_layers:
            return layer
        is_second = layer in self.second_layers
        keeping = range(self.reading_layers.start)
        return next(each for each in reversed(keeping) if (each in self.second_layers) == is_second)

    def of_layer(self, layer: int) -> "ModelConfig":
        """With the heads, the rotation and the feed-forward block of `layer`, where layers differ in them."""
        varied = self.varied
        if varied is None:
            return self
        own = self
        if layer in self.second_layers and self.second_rope is not None:
            heads, size = varied.wide_kv_heads, varied.wide_head_dim
            own = replace(own, num_kv_heads=heads, head_dim=size, rope=self.second_rope)
        if layer in self.reading_layers:
            own = replace(own, intermediate_size=varied.reader_intermediate_size)
        return own
