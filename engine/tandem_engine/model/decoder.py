"""The decoder that all supported families share.

    hidden ─┬▶ norm ▶ qkv ▶ (q, k norm) ▶ rotate ▶ attend ▶ output ─(+)─┬▶ norm ▶ gate, up ▶ SwiGLU ▶ down ─(+)─▶
            └───────────────────────────────────────────────────────┘  └────────────────────────────────────┘

What a family does differently is a tensor that is there or not: a bias, a norm on q and k, an output head
of its own. Shapes use  T = tokens of the step, S = tokens whose hidden states are wanted, H = query heads,
KV = key/value heads, D = head_dim.

The parts are plain frozen objects that hold tensors. At the sizes that run on a CPU a decode step consists
of operations of a few microseconds, to which the bookkeeping of `nn.Module` would add a good part.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem_engine.config import ModelConfig
from tandem_engine.model.base import Attend
from tandem_engine.model.layers.activation import silu_and_multiply
from tandem_engine.model.layers.embedding import Embedding
from tandem_engine.model.layers.linear import Projection, projection
from tandem_engine.model.layers.norm import RmsNorm
from tandem_engine.model.layers.rotary import RotaryTable, Rotation, rotary_table
from tandem_engine.model.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix


class Weights(Protocol):
    """Where the tensors of a model come from. Asked once for each."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def stacked(self, *names: str) -> Tensor:
        """The tensors of a checkpoint concatenated along dimension 0, in the model's dtype and place."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfAttention:
    """Everything of attention that does not depend on the other tokens."""

    norm: RmsNorm
    qkv: Projection
    qk_norm: RmsNorm | None
    """Weight [H + KV, D]: one operation for all heads of q and k."""
    output: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def attend(self, layer: int, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[T, hidden] to what each token gathered, [T, H * D]; `output` is yet to be applied."""
        rotated, num_kv = self.num_heads + self.num_kv_heads, self.num_kv_heads
        heads = self.qkv(self.norm(hidden)).view(hidden.shape[0], rotated + num_kv, self.head_dim)
        qk, v = heads.split_with_sizes((rotated, num_kv), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = rotation.apply(qk).split_with_sizes((self.num_heads, num_kv), dim=1)
        return attend(layer, q, k, v)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """SwiGLU block."""

    norm: RmsNorm
    gate_up: Projection
    down: Projection

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to what is added to it."""
        return self.down(silu_and_multiply(self.gate_up(self.norm(hidden))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    attention: SelfAttention
    feed_forward: FeedForward


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A dense decoder-only language model; implements `CausalLM`."""

    config: ModelConfig
    embedding: Embedding
    rotary: RotaryTable
    blocks: tuple[Block, ...]
    norm: RmsNorm
    lm_head: Projection

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        hidden = self.embedding(input_ids)
        rotation = self.rotary.at(positions)
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            gathered = block.attention.attend(layer, hidden, rotation, attend)
            if layer == last:
                # From here on a token serves only itself: most of a prompt need go no further.
                hidden = hidden.index_select(0, wanted)
                gathered = gathered.index_select(0, wanted)
            hidden.add_(block.attention.output(gathered))
            hidden.add_(block.feed_forward(hidden))
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self.lm_head(hidden).float()


def build_decoder(config: ModelConfig, weights: Weights, *, positions: int) -> Decoder:
    """Assemble a decoder that can place tokens at [0, positions)."""
    embedding = weights.stacked(EMBEDDING)
    return Decoder(
        config=config,
        embedding=Embedding(weight=embedding),
        rotary=rotary_table(
            config.rope,
            head_dim=config.head_dim,
            positions=positions,
            dtype=weights.dtype,
            device=weights.device,
        ),
        blocks=tuple(_block(config, weights, layer_prefix(layer)) for layer in range(config.num_layers)),
        norm=RmsNorm(weight=weights.stacked(FINAL_NORM), eps=config.rms_eps),
        lm_head=projection(embedding if config.tie_embeddings else weights.stacked(LM_HEAD)),
    )


def _block(config: ModelConfig, weights: Weights, prefix: str) -> Block:
    def norm(name: str) -> RmsNorm:
        return RmsNorm(weight=weights.stacked(f"{prefix}{name}.weight"), eps=config.rms_eps)

    def linear(*names: str, bias: bool) -> Projection:
        return projection(
            weights.stacked(*(f"{prefix}{name}.weight" for name in names)),
            weights.stacked(*(f"{prefix}{name}.bias" for name in names)) if bias else None,
        )

    return Block(
        attention=SelfAttention(
            norm=norm("input_layernorm"),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.attention_bias),
            qk_norm=_qk_norm(config, weights, prefix) if config.qk_norm else None,
            output=linear("self_attn.o_proj", bias=config.output_bias),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
        feed_forward=FeedForward(
            norm=norm("post_attention_layernorm"),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
            down=linear("mlp.down_proj", bias=config.mlp_bias),
        ),
    )


def _qk_norm(config: ModelConfig, weights: Weights, prefix: str) -> RmsNorm:
    """All query heads share one weight and all key heads another; repeat them to norm both at once."""
    query = weights.stacked(f"{prefix}self_attn.q_norm.weight").expand(config.num_heads, -1)
    key = weights.stacked(f"{prefix}self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
    return RmsNorm(weight=torch.cat((query, key)), eps=config.rms_eps)
