"""The decoder that all supported families share.

    hidden ─┬▶ self-attention ─(+)─┬▶ feed-forward, or a mixture of experts ─(+)─▶ … ─▶ norm ─▶ lm_head
            └─────────────────┘   └──────────────────────────────────────┘

Differences between families are fields of their `ModelConfig`: a bias, norms on q and k, before or after a block, a
window, another rotation of some layers, factors, a shared expert. The blocks themselves are in `layers`.

The parts are plain frozen objects that hold tensors. At the sizes that run on a CPU, a decode step consists of
operations of a few microseconds, to which the bookkeeping of `nn.Module` would add noticeably.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from tandem_engine.config import ModelConfig, RopeConfig
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.attention.backend import Attend, AttentionSpec
from tandem_engine.model.base import LayerInputs
from tandem_engine.model.blocks import Block, BlockBuilder
from tandem_engine.model.layers.attention import RotaryTable, rotary_table
from tandem_engine.model.layers.linear import Projection, TokenEmbedding, projection
from tandem_engine.model.layers.norm import Norm, rms_norm
from tandem_engine.model.layers.varied import FurtherInputs, SharingAttend
from tandem_engine.model.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD
from tandem_engine.model.varied.blocks import further_inputs
from tandem_engine.model.weights import Weights, head, heads_of_rank, held_projection, token_embedding
from tandem_engine.parallel.sharding import VOCABULARY

if TYPE_CHECKING:
    from tandem_engine.model.cpu.step import FusedStack


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A decoder-only language model; implements `CausalLM`."""

    config: ModelConfig
    attention: tuple[AttentionSpec, ...]
    embedding: TokenEmbedding
    rotary: tuple[RotaryTable, ...]
    """One, or one of most layers and one of `ModelConfig.second_layers`."""
    blocks: tuple[Block, ...]
    norm: Norm
    lm_head: Projection
    fused: "FusedStack | None" = None
    """Computes steps of few tokens in one call."""
    further: FurtherInputs | None = None
    """What layers get in addition to the hidden states."""
    sources: frozenset[int] = frozenset()
    """Layers whose K and V others read."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor,
        adapters: StepAdapters | None = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`. `inputs`: to be noted, of a step in which all tokens are `wanted`."""
        fused = None if inputs is not None else self.fused
        step = None if fused is None else fused.step_of(attend, len(input_ids), adapters)
        if step is not None:
            return step.forward(input_ids, positions, wanted)
        hidden = self.embedding(input_ids)
        given = None if self.further is None else self.further(input_ids, hidden)
        if self.sources:
            attend = SharingAttend(attend=attend, sources=self.sources)
        rotations = [table.at(positions) for table in self.rotary]
        last = len(self.blocks) - 1
        normed = self.blocks[0].attention.norm(hidden)
        for layer, block in enumerate(self.blocks):
            if inputs is not None:
                inputs.note(layer, hidden)
            delta = None if adapters is None else adapters.delta(Site.QKV, layer)
            gathered = block.attention.attend(layer, normed, rotations[block.rotary], attend, delta)
            if layer == last:
                # From here on a token serves only itself: most of a prompt need go no further.
                hidden = hidden.index_select(0, wanted)
                gathered = gathered.index_select(0, wanted)
            delta = None if adapters is None else adapters.delta(Site.OUTPUT, layer, wanted=layer == last)
            added = block.attention.project(gathered, delta)
            if block.parallel:
                hidden.add_(added)
                normed = normed.index_select(0, wanted) if layer == last else normed
            else:
                normed = block.feed_forward.norm.of_sum(hidden, added)
            following = self.norm if layer == last else self.blocks[layer + 1].attention.norm
            fed = block.feed_forward(normed) if adapters is None else block.fed(normed, adapters, layer, layer == last)
            if block.end is None:
                normed = following.of_sum(hidden, fed)
                continue
            own = None if given is None else given[layer].index_select(0, wanted) if layer == last else given[layer]
            normed = following(block.end(hidden.add_(fed), own))
        if inputs is not None:
            inputs.note(len(self.blocks), hidden)
        return normed

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] to [T, hidden_size], what the first block sees."""
        return self.embedding(input_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        logits = self.lm_head(hidden).float()
        if self.config.logit_scale != 1.0:
            logits = logits.mul_(self.config.logit_scale)
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def attention_specs(config: ModelConfig, blocks: Sequence[Block] | None = None) -> tuple[AttentionSpec, ...]:
    """What the attention of each layer that has pages computes; without the sinks where the layers' `blocks` are not
    loaded."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    paged = config.paged_layers
    none = (None,) * config.num_layers
    windows, chunks = config.windows or none, config.chunks or none
    sinks = [None if blocks is None else blocks[layer].attention.sinks for layer in paged]
    width = None if config.latent is None else config.latent.rank
    return tuple(
        AttentionSpec(
            scale=scale,
            window=windows[layer],
            chunk=chunks[layer],
            soft_cap=config.attention_soft_cap,
            sinks=own,
            value_width=width,
        )
        for layer, own in zip(paged, sinks, strict=True)
    )


def build_decoder(config: ModelConfig, weights: Weights, *, positions: int, adapted: bool = False) -> Decoder:
    """Assemble a decoder that can place tokens at [0, positions). `adapted`: tokens may have adapters."""
    embedding, scores = _vocabulary(config, weights)
    builder = BlockBuilder(config=config, weights=weights, heads=heads_of_rank(config, weights.group.size))
    rotary = tuple(_rotary(rope, config, size, weights, positions) for rope, size in _rotations(config))
    blocks = tuple(builder.block(layer) for layer in range(config.num_layers))
    norm = rms_norm(weights.stacked(FINAL_NORM), eps=config.rms_eps, kind=config.norm)
    decoder = Decoder(
        config=config,
        attention=attention_specs(config, blocks),
        embedding=embedding,
        rotary=rotary,
        blocks=blocks,
        norm=norm,
        lm_head=head(scores, config.vocab_size, weights.group),
        further=further_inputs(config, weights),
        sources=frozenset(map(config.source_of, config.reading_layers)),
    )
    return _fused(decoder, weights, adapted=adapted) if weights.device.type == "cpu" else decoder


def _vocabulary(config: ModelConfig, weights: Weights) -> tuple[TokenEmbedding, Projection]:
    """Both ends of the model. What is not kept of their tensors is gone before any block is read."""
    table, scale = weights.stacked(EMBEDDING, split=VOCABULARY), config.embedding_scale
    if not config.tie_embeddings:
        # Every step reads the matrix of logits: packed if the checkpoint has them so, and never rounded by us.
        scores = held_projection(weights.matrix(LM_HEAD, split=VOCABULARY, rounded=False), None, weights.dtype)
        return token_embedding(table, weights.group, scale=scale), scores
    scores = projection(table)
    return token_embedding(table, weights.group, scores=scores, scale=scale), scores


def _fused(decoder: Decoder, weights: Weights, *, adapted: bool) -> Decoder:
    """With the kernels of its steps, if those cover the model."""
    # Only an engine on a CPU needs numba.
    from tandem_engine.model.cpu.step import fuse

    fused = fuse(
        decoder.config,
        weights,
        embedding=decoder.embedding,
        blocks=decoder.blocks,
        rotary=decoder.rotary[0],
        norm=decoder.norm,
        specs=decoder.attention,
        adapted=adapted,
    )
    return decoder if fused is None else replace(decoder, fused=fused)


def _rotations(config: ModelConfig) -> Iterator[tuple[RopeConfig, int]]:
    """And the size of the heads, or parts of heads, that they are for."""
    yield config.rope, config.rotary_heads
    if config.second_rope is not None:
        yield config.second_rope, config.rotary_heads if config.varied is None else config.varied.wide_head_dim


def _rotary(rope: RopeConfig, config: ModelConfig, size: int, weights: Weights, positions: int) -> RotaryTable:
    scale = config.query_scale
    if scale is not None and scale.unrotated_only and rope.rope_type != "none":
        scale = None
    return rotary_table(
        rope,
        head_dim=size,
        positions=positions,
        dtype=weights.dtype,
        device=weights.device,
        query_scale=scale,
    )
