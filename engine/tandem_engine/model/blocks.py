"""The layers of a decoder, from their tensors."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from tandem_engine.config import ModelConfig, MoeConfig, NormPlacement, QkNorm
from tandem_engine.kernels.interface import GatedActivation, by_triton
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.latent.attention import latent_attention
from tandem_engine.model.layers.attention import SelfAttention, order_of_outputs, rotary_order
from tandem_engine.model.layers.delta import GatedAttention, GatedDelta
from tandem_engine.model.layers.latent import LatentAttention
from tandem_engine.model.layers.linear import projection
from tandem_engine.model.layers.mlp import (
    Expert,
    FeedForward,
    Router,
    SharedBlock,
    SparseFeedForward,
    Tokenwise,
    gate_first,
    gated,
)
from tandem_engine.model.layers.norm import NoNorm, Norm, WholeHeadsNorm, rms_norm, scale_of
from tandem_engine.model.layers.varied import ChosenExperts, LayerEnd, ReadingAttention
from tandem_engine.model.quantization.levels import Levels
from tandem_engine.model.recurrent.blocks import gated_attention, gated_delta
from tandem_engine.model.tensor_names import (
    CHOICE_BIAS,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERT,
    SHARED_GATE,
    SINKS,
    expert_bias_name,
    expert_name,
    has_experts,
    layer_prefix,
)
from tandem_engine.model.varied.blocks import beside_experts, layer_end, reading_attention, value_norm
from tandem_engine.model.weights import (
    Heads,
    MatrixReader,
    Weights,
    column_parallel,
    heads_of_rank,
    held_projection,
    row_parallel,
)
from tandem_engine.parallel.sharding import INPUTS, OUTPUTS, Split

Attention: TypeAlias = SelfAttention | LatentAttention | GatedAttention | GatedDelta | ReadingAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    attention: Attention
    feed_forward: Tokenwise
    rotary: int
    """Index of its table among those of the decoder."""
    parallel: bool = False
    """Whether the feed-forward block reads what attention reads, and not the sum with its result."""
    end: LayerEnd | None = None
    """What comes after both."""

    def fed(self, normed: Tensor, adapters: StepAdapters, layer: int, wanted: bool) -> Tensor:
        """`feed_forward` of rows of all tokens, or of the `wanted` ones, with what adapters add. Experts have none."""
        if not isinstance(self.feed_forward, FeedForward):
            return self.feed_forward(normed)
        deltas = (adapters.delta(site, layer, wanted=wanted) for site in (Site.GATE_UP, Site.DOWN))
        return self.feed_forward.adapted(normed, *deltas)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBuilder:
    """Assembles the layers of a decoder from their tensors."""

    config: ModelConfig
    weights: Weights
    heads: Heads
    """Of this rank."""

    def block(self, layer: int) -> Block:
        varied = self.config.varied
        if varied is None:
            return self._block(layer)
        config = self.config.of_layer(layer)
        own = replace(self, config=config, heads=heads_of_rank(config, self.weights.group.size))
        return replace(own._block(layer), end=layer_end(config, varied, self.weights, layer=layer))

    def _block(self, layer: int) -> Block:
        return Block(
            attention=self._attention(layer),
            feed_forward=self._tokenwise(layer),
            rotary=int(layer in self.config.second_layers),
            parallel=self.config.norm_placement is NormPlacement.SHARED,
        )

    def _attention(self, layer: int) -> Attention:
        config, prefix = self.config, layer_prefix(layer)
        if layer in config.reading_layers:
            norm = self._norm(f"{prefix}input_layernorm")
            return reading_attention(config, self.weights, layer=layer, heads=self.heads.query, norm=norm)
        if config.latent is not None:
            norm = self._norm(f"{prefix}input_layernorm")
            return latent_attention(config, config.latent, self.weights, self.heads, prefix=prefix, norm=norm)
        if config.delta is not None and layer in config.delta.layers:
            norm = self._norm(f"{prefix}input_layernorm")
            return gated_delta(config, config.delta, self.weights, layer=layer, norm=norm)
        attention = self._self_attention(layer)
        return gated_attention(config, attention, self.weights, layer=layer) if config.output_gate else attention

    def _self_attention(self, layer: int) -> SelfAttention:
        config, prefix = self.config, layer_prefix(layer)
        varied = config.varied
        shared = varied is not None and varied.keys_are_values and layer in config.second_layers
        names = [f"{prefix}self_attn.{name}" for name in ("q_proj", "k_proj", "k_proj" if shared else "v_proj")]
        return SelfAttention(
            norm=NoNorm() if self._norms_after_only else self._norm(f"{prefix}input_layernorm"),
            qkv=column_parallel(
                self.weights,
                *names,
                bias=config.attention_bias,
                split=Split(dim=0, unit=config.head_dim),
                order=self._order_of_outputs(),
            ),
            qk_norm=self._qk_norm(prefix) if config.qk_norm is QkNorm.HEADS else None,
            whole_norm=self._whole_norm(prefix) if config.qk_norm is QkNorm.WHOLE else None,
            rotated_norm=self._rotated_norm(layer),
            output=row_parallel(
                self.weights,
                f"{prefix}self_attn.o_proj",
                bias=config.output_bias,
                split=Split(dim=1, unit=config.head_dim),
                scale=config.residual_scale,
            ),
            output_norm=self._norm(f"{prefix}post_attention_layernorm") if self._norms_after else None,
            num_heads=self.heads.query,
            num_kv_heads=self.heads.kv,
            head_dim=config.head_dim,
            value_norm=None if varied is None else value_norm(config, self.weights, heads=self.heads.kv),
            sinks=self.weights.stacked(f"{prefix}{SINKS}", split=OUTPUTS).float() if config.attention_sinks else None,
        )

    def _order_of_outputs(self) -> Tensor | None:
        config, order = self.config, self._order_of_head()
        return order_of_outputs(order, *self.heads, size=config.head_dim, gates=config.output_gate)

    def _order_of_head(self) -> Tensor | None:
        return rotary_order(self.config.rope, head_dim=self.config.head_dim)

    def _tokenwise(self, layer: int) -> Tokenwise:
        prefix = layer_prefix(layer)
        moe = self.config.moe if has_experts(self.config, layer) else None
        if moe is None:
            return self._feed_forward(prefix)
        if not moe.beside:
            return self._sparse(prefix, moe, norm=self._feed_forward_norm(prefix))
        block = self._feed_forward(prefix, norm_after="post_feedforward_layernorm_1")
        experts = self._sparse(prefix, moe, norm=self._norm(f"{prefix}pre_feedforward_layernorm_2"))
        return beside_experts(self.config, self.weights, block, experts, layer=layer)

    def _feed_forward(self, prefix: str, *, norm_after: str = "post_feedforward_layernorm") -> FeedForward:
        config = self.config
        return FeedForward(
            norm=self._feed_forward_norm(prefix),
            gate_up=column_parallel(
                self.weights, f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj", bias=config.mlp_bias, split=OUTPUTS
            ),
            activation=self._activation(),
            down=row_parallel(
                self.weights,
                f"{prefix}mlp.down_proj",
                bias=config.mlp_bias,
                split=INPUTS,
                scale=config.residual_scale,
            ),
            output_norm=self._norm(prefix + norm_after) if self._norms_after else None,
        )

    def _sparse(self, prefix: str, moe: MoeConfig, *, norm: Norm) -> ChosenExperts:
        assert self.config.residual_scale == 1.0, "no family with experts scales what blocks add"
        assert moe.beside or not self._norms_after, "no family with experts alone has norms after its blocks"
        router = self._router(prefix, moe)
        shared = None if moe.shared is None else self._shared_block(prefix, gated_by=moe.shared.gated)
        if by_triton(self.weights.device):
            return self._device_experts(prefix, moe, norm, router, shared)
        return SparseFeedForward(
            norm=norm,
            router=router,
            experts=tuple(self._expert(prefix, expert, moe) for expert in range(moe.num_experts)),
            activation=self._activation(),
            shared=shared,
            group=self.weights.group,
            weighted_inputs=moe.weighted_inputs,
        )

    def _router(self, prefix: str, moe: MoeConfig) -> Router:
        read = self.weights.exact if moe.float32_router else self.weights.stacked
        return Router(
            weight=projection(read(f"{prefix}{ROUTER}"), read(f"{prefix}{ROUTER_BIAS}") if moe.bias else None),
            experts_per_token=moe.experts_per_token,
            normalize=moe.normalize,
            scoring=moe.scoring,
            bias=self.weights.exact(f"{prefix}{CHOICE_BIAS}") if moe.choice_bias else None,
            groups=moe.groups,
            kept_groups=moe.kept_groups,
            group_top=moe.group_top,
            least_sum=moe.least_sum,
            scale=moe.scale,
            float32=moe.float32_router,
            by_logits=moe.weighted_inputs,
        )

    def _shared_block(self, prefix: str, *, gated_by: bool) -> SharedBlock:
        gate, up, down = (f"{prefix}{SHARED_EXPERT}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        weights = self.weights
        return SharedBlock(
            gate_up=column_parallel(weights, gate, up, bias=False, split=OUTPUTS),
            activation=self._activation(),
            down=held_projection(weights.matrix(f"{down}.weight", split=INPUTS), None, weights.dtype),
            gate=projection(weights.stacked(f"{prefix}{SHARED_GATE}")) if gated_by else None,
        )

    def _activation(self) -> GatedActivation:
        return gated(self.config.activation, self.weights.device, self.config.gate_clamp)

    def _expert(self, prefix: str, expert: int, moe: MoeConfig) -> Expert:
        matrices = self._expert_matrices(prefix, expert, moe, self.weights.matrix)
        biases = self._expert_biases(prefix, expert) if moe.bias else (None, None)
        gate_up, down = (
            held_projection(matrix, bias, self.weights.dtype) for matrix, bias in zip(matrices, biases, strict=True)
        )
        return Expert(gate_up=gate_up, down=down)

    def _device_experts(
        self, prefix: str, moe: MoeConfig, norm: Norm, router: Router, shared: SharedBlock | None
    ) -> ChosenExperts:
        # Only an engine on a device needs Triton.
        from tandem_engine.model.layers.triton_experts import (
            DeviceExperts,
            ExpertMatrices,
            read_experts,
            stacked_biases,
        )

        weights = self.weights
        stacks = read_experts(
            lambda expert: ExpertMatrices(*self._expert_matrices(prefix, expert, moe, weights.matrix)),
            lambda expert: ExpertMatrices(*self._expert_matrices(prefix, expert, moe, weights.stacked)),
            count=moe.num_experts,
            dtype=weights.dtype,
            device=weights.device,
        )
        biases = [self._expert_biases(prefix, expert) for expert in range(moe.num_experts)] if moe.bias else None
        return DeviceExperts.of(
            stacks,
            norm=norm,
            router=router,
            activation=self.config.activation,
            clamp=self.config.gate_clamp,
            group=weights.group,
            biases=None if biases is None else stacked_biases(biases),
            shared=shared,
            weighted_inputs=moe.weighted_inputs,
        )

    def _expert_biases(self, prefix: str, expert: int) -> tuple[Tensor, Tensor | None]:
        """[2 * I], gate first, and [hidden], which the first rank alone adds; of a family that interleaves."""
        gate_up, down = (prefix + expert_bias_name(expert, name) for name in ("gate_up_proj", "down_proj"))
        both = self.weights.stacked(gate_up, split=OUTPUTS)
        added = self.weights.stacked(down) if self.weights.group.rank == 0 else None
        return both[gate_first(len(both), self.weights.device)], added

    def _expert_matrices(
        self, prefix: str, expert: int, moe: MoeConfig, read: MatrixReader
    ) -> tuple[Tensor | Levels, Tensor | Levels]:
        """[2 * I, hidden], gate first, and [hidden, I]."""
        if moe.interleaved:
            gate_up, down = (prefix + expert_name(expert, name) for name in ("gate_up_proj", "down_proj"))
            both = read(gate_up, split=OUTPUTS)
            order = gate_first(both.shape[0], self.weights.device)
            return both[order] if isinstance(both, Tensor) else both.outputs(order), read(down, split=INPUTS)
        gate, up, down = (prefix + expert_name(expert, name) for name in ("gate_proj", "up_proj", "down_proj"))
        return read(gate, up, split=OUTPUTS), read(down, split=INPUTS)

    @property
    def _norms_after(self) -> bool:
        return self.config.norm_placement in (NormPlacement.AROUND, NormPlacement.AFTER)

    @property
    def _norms_after_only(self) -> bool:
        return self.config.norm_placement is NormPlacement.AFTER

    def _feed_forward_norm(self, prefix: str) -> Norm:
        """Gemma needs the usual name, "after attention", for the norm that really comes after it."""
        match self.config.norm_placement:
            case NormPlacement.BEFORE:
                return self._norm(f"{prefix}post_attention_layernorm")
            case NormPlacement.AROUND:
                return self._norm(f"{prefix}pre_feedforward_layernorm")
            case NormPlacement.AFTER | NormPlacement.SHARED:
                return NoNorm()

    def _norm(self, name: str) -> Norm:
        weight = self.weights.stacked(f"{name}.weight")
        return rms_norm(weight, eps=self.config.rms_eps, kind=self.config.norm)

    def _qk_norm(self, prefix: str) -> Norm:
        """All query heads share one weight and all key heads another; repeat them to norm both at once."""
        query = self.weights.stacked(f"{prefix}self_attn.q_norm.weight").expand(self.heads.query, -1)
        key = self.weights.stacked(f"{prefix}self_attn.k_norm.weight").expand(self.heads.kv, -1)
        weight = self._in_order_of_head(torch.cat((query, key)))
        return rms_norm(weight, eps=self.config.rms_eps, kind=self.config.norm)

    def _rotated_norm(self, layer: int) -> Norm | None:
        config = self.config
        if config.qk_norm is QkNorm.ROTATED_HEADS:
            return self._qk_norm(layer_prefix(layer))
        if config.qk_norm is not QkNorm.ROTATED_PLAIN or layer in config.second_layers:
            return None
        ones = torch.ones(config.head_dim, dtype=self.weights.dtype, device=self.weights.device)
        return rms_norm(ones.expand(self.heads.query + self.heads.kv, -1), eps=config.rms_eps, kind=config.norm)

    def _whole_norm(self, prefix: str) -> Norm:
        """The weights of all heads of q lie one after the other, and those of k."""
        split = Split(dim=0, unit=self.config.head_dim)
        names = [f"{prefix}self_attn.{name}.weight" for name in ("q_norm", "k_norm")]
        weight = self.weights.stacked(*names, split=split).view(-1, self.config.head_dim)
        return WholeHeadsNorm(
            weight=scale_of(self._in_order_of_head(weight), self.config.norm),
            eps=self.config.rms_eps,
            num_heads=self.heads.query,
            group=self.weights.group,
        )

    def _in_order_of_head(self, weight: Tensor) -> Tensor:
        """[heads, D]"""
        order = self._order_of_head()
        return weight if order is None else weight.index_select(1, order.to(weight.device))
