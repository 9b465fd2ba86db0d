"""The gated delta rule, and the convolution before it: torch operations, float32 whatever the dtype of a model.

Each value head keeps a state S [key_size, value_size] per sequence. A token with key k, value v and query q

    forgets      S = exp(g) S                                g ≤ 0
    corrects     S = S + k (beta (v - kᵀ S))ᵀ                what S has for k moves towards v
    reads        o = qᵀ S

`next_token` does that, of one token for each of several sequences. `prompt` computes a run of tokens of one sequence in
chunks of `CHUNK`: the corrections of a chunk are a triangular system, so only chunks follow one another. A run that is
cut at multiples of `CHUNK` gives the same bits; cut elsewhere it differs by rounding, as the two forms do.
`listed_prompts` computes the runs of a whole step on a device.

Shapes use  L = tokens of a run, N = sequences, H = value heads, K = key_size, V = value_size, C = channels.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.kernels.interface import DeltaKernels
from tandem_engine.memory.cache_groups import STATE_CHUNK
from tandem_engine.memory.listed_runs import ListedRuns

CHUNK = STATE_CHUNK
"""Tokens, as in transformers."""

MIN_TOGETHER = 32
"""Chunks whose products are computed at once in any step that has as many."""

NORM_EPS = 1e-6
"""Of keys and queries, whatever `rms_norm_eps` says."""


class RuleInputs(NamedTuple):
    """What the rule takes of each of T tokens."""

    query: Tensor
    """[T, H, K] of length 1, divided by √K"""
    key: Tensor
    """[T, H, K] of length 1"""
    value: Tensor
    """[T, H, V]"""
    decay: Tensor
    """[T, H], as a logarithm"""
    beta: Tensor
    """[T, H]"""


def causal_conv(history: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """SiLU of a convolution of each channel over its newest inputs.

    history  [N, taps - 1, C] inputs before these, the newest last
    inputs   [N, L, C]
    weight   float32 [taps, C]

    Returns float32 [N, L, C].
    """
    window, length = torch.cat((history, inputs), dim=1).float(), inputs.shape[1]
    mixed = window[:, :length] * weight[0]
    for tap in range(1, len(weight)):
        mixed.addcmul_(window[:, tap : tap + length], weight[tap])
    return F.silu(mixed, inplace=True)


def mixed_by_taps(window: Tensor, before: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """As `causal_conv`, of tokens of several sequences: float32 [T, C].

    window   [N, C] of which `before` [T, taps - 1] are those before each of `inputs` [T, C], the newest last
    """
    mixed = window.index_select(0, before[:, 0]).float() * weight[0]
    for tap in range(1, len(weight) - 1):
        mixed.addcmul_(window.index_select(0, before[:, tap]).float(), weight[tap])
    mixed.addcmul_(inputs.float(), weight[-1])
    return F.silu(mixed, inplace=True)


def unit_heads(x: Tensor, heads: int) -> Tensor:
    """[..., key heads, K] of length 1, each repeated for the value heads that share it: [..., heads, K]."""
    length = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return (x * length).repeat_interleave(heads // x.shape[-2], dim=-2)


def next_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of each sequence. `state` [N, H, K, V] is changed in place.

    query, key   [N, H, K] of length 1, queries divided by √K
    value        [N, H, V]
    decay, beta  [N, H], decay as a logarithm

    Returns [N, H, V].
    """
    state.mul_(decay.exp()[..., None, None])
    known, read = (torch.stack((key, query), dim=-2) @ state).unbind(-2)
    change = (value - known) * beta[..., None]
    state.addcmul_(key[..., None], change[..., None, :])
    return read.addcmul_((query * key).sum(-1, keepdim=True), change)


def prompt(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, kept: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """A run of tokens of one sequence that begins with `state` [H, K, V]; arguments as of `next_token`, L for N.

    Returns [L, H, V], and the states after each of `kept`, ascending numbers of tokens in whole chunks or L, and after
    the last token.
    """
    length = len(query)
    query, key, value, decay, beta = (_chunks(each) for each in (query, key, value, decay, beta))
    total = decay.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=total.device).triu(1)
    between = between.masked_fill_(later, float("-inf")).exp_()
    written = key * beta[..., None]
    system = (written @ key.mT).mul_(between)
    attention = (query @ key.mT).mul_(between)
    right = torch.cat((value * beta[..., None], written * total.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, stale = solved.split_with_sizes((value.shape[-1], key.shape[-1]), dim=-1)
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    whole = total[..., -1].exp()[..., None, None]
    outputs, states = [], []
    for chunk in range(query.shape[1]):
        change = fresh[:, chunk] - stale[:, chunk] @ state
        outputs.append(query[:, chunk] @ state + attention[:, chunk] @ change)
        state = state * whole[:, chunk] + key[:, chunk].mT @ change
        if min((chunk + 1) * CHUNK, length) in kept:
            states.append(state)
    return torch.cat(outputs, dim=1)[:, :length].transpose(0, 1), [*states, state]


def listed_prompts(inputs: RuleInputs, matrices: Tensor, listed: ListedRuns, *, kernels: DeltaKernels) -> Tensor:
    """As `prompt`, of all sequences of a step; the states of `matrices` [slots, H, K, V] move on.

    Returns float32 [T, H, V], 0 for tokens that no sequence has.
    """
    value = inputs.value
    # Chunks have a place for each token that they lack: that behind the last.
    read = value.new_zeros((len(value) + 1, *value.shape[1:]))
    for own in chunks_together(len(listed.chunk_tokens), tokens=len(value)):
        found = _listed_chunks(inputs, matrices, listed, own, kernels=kernels)
        read.index_copy_(0, listed.chunk_tokens[own].flatten(), found)
    return read[:-1]


def chunks_together(chunks: int, *, tokens: int) -> Iterator[slice]:
    """The chunks of a step of so many `tokens`, in parts whose products are computed at once.

    A part has no more than the tokens would fill, as the step has with which memory is measured
    (`executor.memory_profile`): short prompts have a chunk each, most of it empty.
    """
    most = max(tokens // CHUNK, MIN_TOGETHER)
    parts = -(-chunks // most)
    size = -(-chunks // parts)
    for first in range(0, chunks, size):
        yield slice(first, min(first + size, chunks))


def _listed_chunks(
    inputs: RuleInputs, matrices: Tensor, listed: ListedRuns, own: slice, *, kernels: DeltaKernels
) -> Tensor:
    """What each place of the chunks `own` reads, float32 [places, H, V]; arguments as of `listed_prompts`."""
    tokens = listed.chunk_tokens[own]
    query, key, value, decay, beta = (_of_chunks(each, tokens) for each in inputs)
    # A token that there is not forgets nothing and corrects nothing.
    missing = (tokens == len(inputs.decay))[:, None]
    decay, beta = (each.masked_fill_(missing, 0.0) for each in (decay, beta))
    total = decay.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=total.device).triu(1)
    between = between.masked_fill_(later, float("-inf")).exp_()
    written = key * beta[..., None]
    inverse = kernels.inverse((written @ key.mT).mul_(between))
    attention = (query @ key.mT).mul_(between)
    grown = total.exp()[..., None]
    solved = inverse @ torch.cat((value * beta[..., None], written * grown), dim=-1)
    return kernels.walk(
        solved,
        query * grown,
        key * (total[..., -1:] - total).exp()[..., None],
        attention,
        total[..., -1].exp().contiguous(),
        matrices,
        listed.rows,
        # A sequence whose first chunk came before is under way.
        listed.fresh & (listed.first_chunks[:-1] >= own.start),
        listed.first_chunks.clamp(own.start, own.stop) - own.start,
        listed.chunk_slots[own],
    )


def _of_chunks(x: Tensor, tokens: Tensor) -> Tensor:
    """[T, H, …] to [C, H, CHUNK, …], dense, by the `tokens` [C, CHUNK] of each chunk; any for those behind the last."""
    taken = x.index_select(0, tokens.flatten().clamp(max=len(x) - 1)).view(*tokens.shape, *x.shape[1:])
    return taken.transpose(1, 2).contiguous()


def _chunks(x: Tensor) -> Tensor:
    """[L, H, …] to [H, chunks, CHUNK, …], with zeros behind the last token: they change no state."""
    padding = -len(x) % CHUNK
    padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding))
    return padded.transpose(0, 1).reshape(x.shape[1], -1, CHUNK, *x.shape[2:])
