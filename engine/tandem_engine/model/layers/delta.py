"""Layers of models that keep states: the gated delta rule, and attention whose outputs have a gate.

    GatedDelta      (norm) ─▶ q, k, v ─▶ convolution ─▶ delta rule ─▶ norm, times silu(z) ─▶ output
    GatedAttention  what a head gathers, times the sigmoid of its gate

Both stand where `SelfAttention` stands. `Attend` counts layers that have pages and states count theirs, so each layer
has its own place and passes over the decoder's number.

The states of a step are with its `Attend`, a `StatefulAttend`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.kernels.interface import DeltaKernels, DeltaWeights
from tandem_engine.memory.listed_runs import ListedRuns
from tandem_engine.memory.state_pool import DraftedInputs, DraftedRuns, Run, StateCopy, StatePool, StateSpec, StepStates
from tandem_engine.model.attention.backend import Attend
from tandem_engine.model.layers.attention import Rotation, SelfAttention
from tandem_engine.model.layers.delta_rule import (
    RuleInputs,
    causal_conv,
    listed_prompts,
    mixed_by_taps,
    next_token,
    prompt,
    unit_heads,
)
from tandem_engine.model.layers.linear import Delta, Projection, project
from tandem_engine.model.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class StatefulAttend:
    """An `Attend`, and the states of the step's sequences."""

    paged: Attend
    states: StepStates
    listed: ListedRuns | None = None
    """The sequences of `states` as a device takes them; None where the host looks at their lengths."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        return self.paged(layer, q, k, v)


def columns(delta: Delta | None, first: int, second: int) -> tuple[Delta | None, Delta | None]:
    """What adapters add to two products of so many outputs, which stand one behind the other in their site."""
    if delta is None:
        return None, None
    return delta.columns(0, first), delta.columns(first, first + second)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedAttention:
    """Self-attention whose outputs have a gate."""

    inner: SelfAttention
    gate: Projection
    """[T, hidden] to [T, H * D]"""
    place: int
    """Among the layers with pages."""

    @property
    def norm(self) -> Norm:
        """See `SelfAttention`."""
        return self.inner.norm

    @property
    def sinks(self) -> Tensor | None:
        """See `SelfAttention`."""
        return self.inner.sinks

    def attend(
        self,
        layer: int,  # noqa: ARG002 - it has its own place
        normed: Tensor,
        rotation: Rotation,
        attend: Attend,
        delta: Delta | None = None,
    ) -> Tensor:
        """See `SelfAttention.attend`."""
        paged = attend.paged if isinstance(attend, StatefulAttend) else attend
        inner = self.inner
        heads = (inner.num_heads + 2 * inner.num_kv_heads) * inner.head_dim
        own, gates = columns(delta, heads, inner.num_heads * inner.head_dim)
        gathered = inner.attend(self.place, normed, rotation, paged, own)
        return gathered * project(self.gate, normed, gates).sigmoid_()

    def project(self, gathered: Tensor, delta: Delta | None = None) -> Tensor:
        """See `SelfAttention.project`."""
        return self.inner.project(gathered, delta)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaHeads:
    """Of this rank."""

    keys: int
    values: int
    key_size: int
    value_size: int

    @property
    def key_width(self) -> int:
        return self.keys * self.key_size

    @property
    def value_width(self) -> int:
        return self.values * self.value_size


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """The gated delta rule over the states of a step."""

    norm: Norm
    """Before the block; applied by the decoder, which adds to the hidden states on the way."""
    heads: DeltaHeads
    place: int
    """Among the layers with states."""
    inputs: Projection
    """[T, hidden] to [q | k | v | z], each head after head."""
    rates: Projection
    """[T, hidden] to [b | a], [T, 2 H]"""
    weights: DeltaWeights
    kernels: DeltaKernels | None
    """Of a device; None is torch."""
    output: Projection

    @property
    def sinks(self) -> None:
        """See `SelfAttention`: there are none."""
        return

    def attend(
        self,
        layer: int,  # noqa: ARG002 - it has its own place
        normed: Tensor,
        rotation: Rotation,  # noqa: ARG002 - a state knows the order of its tokens
        attend: Attend,
        delta: Delta | None = None,
    ) -> Tensor:
        """Normalized hidden states [T, hidden] to what each token reads, [T, value_width]; `project` is yet to come."""
        assert isinstance(attend, StatefulAttend), "a model with states runs where there are states"
        states, heads = attend.states, self.heads
        of_inputs, of_rates = columns(delta, 2 * (heads.key_width + heads.value_width), 2 * heads.values)
        projected, rates = project(self.inputs, normed, of_inputs), project(self.rates, normed, of_rates)
        if attend.listed is not None:
            return self._listed(states.pool, attend.listed, projected, rates)
        if self.kernels is None or states.decodes is None:
            return self._by_torch(states, projected, rates)
        first = states.first_decode
        stepped = states.stepped(self.place, self.kernels.step, projected[first:], rates[first:], self.weights)
        if not states.runs:
            return stepped
        return torch.cat((self._by_torch(states.without_decodes(), projected[:first], rates[:first]), stepped))

    def _by_torch(self, states: StepStates, projected: Tensor, rates: Tensor) -> Tensor:
        heads = self.heads
        mixed, z = projected.split_with_sizes((2 * heads.key_width + heads.value_width, heads.value_width), dim=-1)
        decay, beta = self._rates(rates)
        parts = [self._run(states, run, mixed, decay, beta) for run in states.runs]
        if states.decodes is not None:
            first = states.first_decode
            parts.append(self._decodes(states, states.decodes, mixed[first:], decay[first:], beta[first:]))
        if states.drafted is not None:
            parts.append(self._drafted(states, states.drafted, mixed, decay, beta))
        return self._gated(torch.cat(parts) if len(parts) > 1 else parts[0], z)

    def _listed(self, pool: StatePool, listed: ListedRuns, projected: Tensor, rates: Tensor) -> Tensor:
        """As `_by_torch`, by launches whose number and sizes do not follow from the lengths of sequences."""
        assert self.kernels is not None, "runs are listed where there are kernels for them"
        heads, tokens = self.heads, len(projected)
        mixed, z = projected.split_with_sizes((2 * heads.key_width + heads.value_width, heads.value_width), dim=-1)
        decay, beta = self._rates(rates)
        inputs, matrices = pool.inputs[:, self.place], pool.matrices[:, self.place]
        before = inputs.index_select(0, listed.rows).masked_fill_(listed.fresh[:, None, None], 0.0)
        window = torch.cat((before.flatten(0, 1), mixed))
        inputs.index_copy_(0, listed.kept_slots, window[listed.kept_inputs])
        convolved = mixed_by_taps(window, listed.conv_inputs, mixed, self.weights.conv)
        read = listed_prompts(
            RuleInputs(*self._heads(convolved, mixed.dtype), decay, beta), matrices, listed, kernels=self.kernels
        )
        # Behind the last token is a place for decodes that there are not.
        out = projected.new_empty((tokens + 1, heads.value_width))
        out[:tokens] = self._gated(read, z)
        if len(listed.decode_tokens):
            own = listed.decode_tokens.clamp(max=tokens - 1)
            decodes = projected.index_select(0, own), rates.index_select(0, own)
            stepped = self.kernels.step(
                *decodes, inputs, matrices, listed.decode_rows, listed.decode_fresh, self.weights
            )  # fmt: skip
            out.index_copy_(0, listed.decode_tokens, stepped)
        return out[:tokens]

    def _rates(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [T, H]: how much each token forgets, as a logarithm, and how much it corrects."""
        b, a = rates.float().chunk(2, dim=-1)
        return self.weights.decay * F.softplus(a + self.weights.bias), b.sigmoid()

    def _gated(self, read: Tensor, z: Tensor) -> Tensor:
        """What tokens have read, float32 [T, H, value_size], normalized, and times silu(z): [T, value_width]."""
        scale = torch.rsqrt(read.square().mean(-1, keepdim=True) + self.weights.eps)
        gated = (read * scale).mul_(self.weights.norm).flatten(1).mul_(F.silu(z.float()))
        return gated.to(z.dtype)

    def project(self, gathered: Tensor, delta: Delta | None = None) -> Tensor:
        """What `attend` returned to what is added to the hidden states."""
        return project(self.output, gathered, delta)

    def _run(self, states: StepStates, run: Run, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Outputs for the tokens of one sequence, [L, H, value_size]; updates its state to the last of them."""
        tokens = slice(run.start, run.stop)
        history, state = states.of_run(self.place, run)
        inputs = mixed[tokens]
        query, key, value = self._heads(causal_conv(history[None], inputs[None], self.weights.conv)[0], mixed.dtype)
        copies = (*run.snapshots, StateCopy(run.stop - run.start, run.row))
        kept = [copy.tokens for copy in run.snapshots]
        read, matrices = prompt(query, key, value, decay[tokens], beta[tokens], state, kept=kept)
        inputs = torch.cat((history, inputs))
        for copy, matrix in zip(copies, matrices, strict=True):
            states.keep(self.place, copy.slot, inputs[copy.tokens : copy.tokens + len(history)], matrix)
        return read

    def _decodes(self, states: StepStates, rows: Tensor, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """One token of each of the last sequences, [N, H, value_size]."""
        history, state = states.of_decodes(self.place)
        inputs = mixed[:, None]
        query, key, value = self._heads(causal_conv(history, inputs, self.weights.conv)[:, 0], mixed.dtype)
        read = next_token(query, key, value, decay, beta, state)
        states.keep_decodes(self.place, rows, torch.cat((history[:, 1:], inputs), dim=1), state)
        return read

    def _drafted(self, states: StepStates, drafted: DraftedRuns, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The tokens of runs of drafts, [T, H, value_size]. Each is computed as a decode, and no state changes."""
        history, state = states.of_rows(self.place, drafted.rows)
        inputs, decay, beta = (each[drafted.tokens] for each in (mixed, decay, beta))
        convolved = causal_conv(history, inputs, self.weights.conv)
        query, key, value = (
            each.view(*drafted.tokens.shape, *each.shape[1:])
            for each in self._heads(convolved.flatten(0, 1), mixed.dtype)
        )
        reads = [
            next_token(query[:, at], key[:, at], value[:, at], decay[:, at], beta[:, at], state)
            for at in range(drafted.tokens.shape[1])
        ]
        assert len(drafted.layers) == self.place, "layers of a step come in their order"
        drafted.layers.append(
            DraftedInputs(inputs=torch.cat((history, inputs), dim=1), key=key, value=value, decay=decay, beta=beta)
        )
        return torch.stack(reads, dim=1).flatten(0, 1).index_select(0, drafted.places)

    def _heads(self, convolved: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [n, H, size] of queries, keys and values, rounded to the model's `dtype` before."""
        heads = self.heads
        query, key, value = (
            convolved.to(dtype).float().split_with_sizes((heads.key_width, heads.key_width, heads.value_width), dim=-1)
        )
        query, key = (unit_heads(each.view(-1, heads.keys, heads.key_size), heads.values) for each in (query, key))
        return query * heads.key_size**-0.5, key, value.view(-1, heads.values, heads.value_size)


MOVED_BYTES = 64 << 20
"""Of states that are moved on at a time: of several layers where requests are few, so that operations are few."""


def _moved_together(of_layer: int) -> int:
    """Layers that are moved on at a time, where the states of one have so many bytes."""
    return max(1, MOVED_BYTES // of_layer)


def bytes_until_verified(spec: StateSpec, *, sequences: int, tokens: int) -> int:
    """What a step with drafts, of `sequences` of at most `tokens` each, takes for states until they have moved on."""
    of_token = spec.heads * (spec.key_size + spec.value_size + 2) * torch.float32.itemsize
    of_layer = sequences * (tokens * of_token + (spec.history + tokens) * spec.channels * spec.dtype.itemsize)
    states = sequences * spec.slot_bytes // spec.layers
    return spec.layers * of_layer + min(spec.layers, _moved_together(states)) * (of_layer + states)


def keep_accepted(pool: StatePool, drafted: DraftedRuns, lens: Tensor, *, longest: int) -> None:
    """Move the states of `drafted` on by the first `lens` [N] of their tokens, at most `longest`.

    The recurrence runs again over what the step has kept of its inputs.
    """
    together = _moved_together(len(drafted.rows) * pool.matrices[0, 0].nbytes)
    for first in range(0, len(drafted.layers), together):
        layers = drafted.layers[first : first + together]
        own = slice(first, first + len(layers))
        _move_on(pool.matrices[:, own], pool.inputs[:, own], drafted.rows, layers, lens, longest)


def _move_on(
    matrices: Tensor, inputs: Tensor, rows: Tensor, layers: list[DraftedInputs], lens: Tensor, longest: int
) -> None:
    """As `keep_accepted`, of the layers [slots, layers, …] in `matrices` and `inputs`."""
    window, key, value, decay, beta = (torch.stack(parts, dim=1) for parts in zip(*layers, strict=True))
    states = matrices.index_select(0, rows)
    counts = (torch.arange(longest, device=lens.device) < lens[:, None])[:, None, :, None]
    # exp(0) = 1 and a correction of 0: tokens that do not count change no bit.
    decay, beta = (each[:, :, :longest].masked_fill(~counts, 0.0) for each in (decay, beta))
    for at in range(longest):
        own = key[:, :, at]
        # With a query, as the step had it, the products round alike.
        next_token(own, own, value[:, :, at], decay[:, :, at], beta[:, :, at], states)
    matrices.index_copy_(0, rows, states)
    newest = lens[:, None] + torch.arange(inputs.shape[2], device=lens.device)
    index = newest[:, None, :, None].expand(-1, window.shape[1], -1, window.shape[3])
    inputs.index_copy_(0, rows, window.gather(2, index))
