"""Attention over whole sequences without pages, plain enough to be trusted as a reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.memory.state_pool import Run, StatePool, StepStates
from tandem_engine.model.attention.backend import Attend, AttentionSpec
from tandem_engine.model.base import CausalLM
from tandem_engine.model.layers.delta import StatefulAttend
from tandem_engine.model.recurrent.blocks import state_spec


@dataclass
class DenseAttend:
    """An `Attend` that keeps K and V of every sequence as one growing tensor per layer.

    Set `extend_lens` before each forward: how many of its tokens belong to each sequence, in order. Without
    `specs` every layer is plain attention.
    """

    extend_lens: list[int] = field(default_factory=list)
    specs: Sequence[AttentionSpec] = ()
    cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    states: StatePool | None = None
    """Made by `with_states`."""
    newest: dict[int, Tensor] = field(default_factory=dict)
    """k of each layer's last call: layers that read K and V of another one store them again."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.newest.get(layer) is k:
            for sequence, length in enumerate(self.extend_lens):
                past_k, past_v = self.cache[layer, sequence]
                self.cache[layer, sequence] = past_k[:-length], past_v[:-length]
        self.newest[layer] = k
        parts = zip(*(tensor.split(self.extend_lens) for tensor in (q, k, v)), strict=True)
        return torch.cat([self._attend(layer, sequence, *part) for sequence, part in enumerate(parts)])

    def _attend(self, layer: int, sequence: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (layer, sequence) in self.cache:
            past_k, past_v = self.cache[layer, sequence]
            k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
        self.cache[layer, sequence] = (k, v)
        new, seen = q.shape[0], k.shape[0]
        spec = self.specs[layer] if self.specs else AttentionSpec(scale=q.shape[-1] ** -0.5)
        visible = torch.ones(new, seen, dtype=torch.bool).tril(diagonal=seen - new)
        if spec.window is not None:
            visible = visible.triu(diagonal=seen - new - spec.window + 1)
        if spec.chunk is not None:
            chunks = torch.arange(seen) // spec.chunk
            visible &= chunks[-new:, None] == chunks
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        if spec.sinks is not None:
            out = _with_sinks(q, k, v, visible, spec.scale, spec.sinks)
        elif spec.soft_cap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=spec.scale, enable_gqa=True)
        else:
            k, v = (rows.repeat_interleave(len(q) // len(k), dim=0) for rows in (k, v))
            scores = spec.soft_cap * torch.tanh(q @ k.mT * spec.scale / spec.soft_cap)
            out = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        return out.transpose(0, 1).reshape(new, -1)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """The denominator of the softmax has one more term for each head."""
    k, v = (rows.repeat_interleave(len(q) // len(k), dim=0) for rows in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    highest = torch.maximum(scores.amax(-1, keepdim=True), sinks.to(q.dtype)[:, None, None])
    weights = (scores - highest).exp()
    return weights @ v / (weights.sum(-1, keepdim=True) + (sinks.to(q.dtype)[:, None, None] - highest).exp())


SEQUENCES = 4
"""That `with_states` has room for."""


def with_states(attend: DenseAttend, model: CausalLM, *, size: int = 1) -> Attend:
    """`attend` of one step, with the states of its sequences if layers of `model`, one of `size` ranks, keep any."""
    spec = state_spec(model.config, torch.float32, size)
    if spec is None:
        return attend
    if attend.states is None:
        attend.states = StatePool(spec, rows=SEQUENCES, device="cpu")
        attend.states.bytes_view()[1:].fill_(0xFF)
    stops = torch.tensor(attend.extend_lens).cumsum(0).tolist()
    runs = tuple(
        Run(stop - length, stop, 1 + sequence, fresh=(0, sequence) not in attend.cache)
        for sequence, (stop, length) in enumerate(zip(stops, attend.extend_lens, strict=True))
    )
    if any(length != 1 or run.fresh for run, length in zip(runs, attend.extend_lens, strict=True)):
        states = StepStates(pool=attend.states, runs=runs, decodes=None, fresh=None, first_decode=stops[-1])
    else:
        rows = torch.arange(1, 1 + len(runs))
        states = StepStates(pool=attend.states, runs=(), decodes=rows, fresh=None, first_decode=0)
    return StatefulAttend(attend, states)
