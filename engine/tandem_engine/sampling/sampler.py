"""From logits to tokens, in one fixed order.

    logits float32 ─▶ edits ─▶ ÷ temperature ─▶ top-k, top-p, min-p ─▶ + noise ─▶ argmax
          └─▶ raw logprobs  └─▶ greedy rows ─▶ argmax

A row's token is a function of its own logits, parameters, history, seed and position. Nothing here crosses rows, so the
same row gives the same token alone, in any batch, and on any worker. The only state is the history that penalties and
bad words need (`logits_processor`).

`keep_thresholds` gives the smallest scaled logit that stays, per row: the largest of
    top-k   the k-th largest logit
    top-p   the last logit of the shortest run, from the largest down, whose probability reaches p, after top-k
    min-p   the largest logit + log(min_p)
Tokens equal to it all stay, so no result depends on how a sort orders equals.

`best_tokens`: torch finds the place of a maximum number by number, which takes as long for 64 rows as half a layer of a
small model. It finds the maximum itself by vectors, and compiled code then finds its place, a block at a time.

`gumbel` is noise without a generator, a pure function of (seed, position, token id): the same on any worker, in any
batch, after any retraction or resumption.
    key    = splitmix64's finalizer over seed · a + position · b     64 bits per sampled position
    bits   = murmur3's finalizer over (hash of token id, key)        31 bits per token
    gumbel = −log(−log(1 − u)),  u = (bits + ½) / 2³¹
argmax(log p + gumbel) is distributed as p. Winners come from small u, where float32 is finest, so even a token of
probability 1e-9 is drawn as often as it should be. All arithmetic is on signed integers that wrap around.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem_engine.forward.batch import SampledLogprobs, SamplingBatch
from tandem_engine.kernels.cpu.first_places import find_in_blocks
from tandem_engine.kernels.cpu.jit import COMPILES
from tandem_engine.sampling.logits_processor import LogitEditor
from tandem_engine.sampling.logprobs import sampled_logprobs

FIRST_RANKED = 256
"""Tokens per row that are sorted at first; most of the probability of a language model is in fewer."""

WIDEN = 8
"""How many times more are sorted when those were too few."""


def keep_thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor | None:
    """The smallest logit that each row keeps.

    Args:
        logits: [R, V] float32, divided by the temperature, largest value of each row 0.
        top_k: [R] int64, 0 for no limit. top_p, min_p: [R] float32.

    Returns:
        [R] float32, −inf for rows without a filter; None when no row has one.
    """
    top_k = top_k.where(top_k < logits.shape[1], 0)
    ranked = (top_k > 0) | (top_p < 1.0)
    if not bool((ranked | (min_p > 0.0)).any()):
        return None
    thresholds = min_p.log()
    rows = ranked.nonzero().squeeze(1)
    if len(rows):
        cut = _rank(logits[rows], top_k[rows], top_p[rows].double())
        thresholds[rows] = thresholds[rows].maximum(cut)
    return thresholds


def queued_thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As `keep_thresholds`, without a look at any value: sorts the whole vocabulary, of rows without a filter too."""
    top_k = top_k.where(top_k < logits.shape[1], 0)
    ranked = (top_k > 0) | (top_p < 1.0)
    cut = _rank_largest(logits.sort(dim=1, descending=True).values, top_k, top_p.double(), _mass(logits)).thresholds
    return min_p.log().maximum(cut.where(ranked, -torch.inf))


def _rank(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Thresholds of top-k and top-p, sorting no more of the vocabulary than they need."""
    vocab_size = logits.shape[1]
    mass = _mass(logits)
    width = max(FIRST_RANKED if bool((top_p < 1.0).any()) else 1, int(top_k.max()) + 1)
    while width < vocab_size:
        ranking = _rank_largest(logits.topk(width, dim=1).values, top_k, top_p, mass)
        if bool(ranking.complete.all()):
            return ranking.thresholds
        width *= WIDEN
    return _rank_largest(logits.sort(dim=1, descending=True).values, top_k, top_p, mass).thresholds


class Ranking(NamedTuple):
    thresholds: Tensor
    complete: Tensor
    """bool [R]: False where the threshold may lie below the tokens that were looked at."""


def _rank_largest(logits: Tensor, top_k: Tensor, top_p: Tensor, mass: Tensor) -> Ranking:
    """Rank by the W largest logits of each row, [R, W] in falling order, where W > top_k or W is everything."""
    limited = top_k > 0
    kth = logits.gather(1, (top_k - 1).clamp(min=0)[:, None]).where(limited[:, None], -torch.inf)
    stays = logits >= kth
    weights = logits.double().exp() * stays
    sums = weights.cumsum(dim=1)
    wanted = top_p * sums[:, -1].where(limited, mass)
    in_run = stays & (sums - weights < wanted[:, None])
    last = (in_run.sum(dim=1) - 1).clamp(min=0)
    by_p = top_p < 1.0
    thresholds = logits.gather(1, last[:, None]).where(by_p[:, None], kth).squeeze(1)
    # Ties with the k-th count towards top-p: all of them must be in sight.
    complete = torch.where(limited, logits[:, -1] < kth.squeeze(1), sums[:, -1] >= wanted)
    return Ranking(thresholds, complete | ~by_p)


def _mass(logits: Tensor) -> Tensor:
    """[R] float64 Σ exp(logits), whose largest term is 1. Not by `sum`, which splits a single row over threads."""
    return logits.log_softmax(dim=1).amax(dim=1).neg().double().exp()


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits [R, V] float32: the largest one [R], and the first id [R] int64 that has it.

    NaN counts as the largest; the id is then that of none in particular.
    """
    if not COMPILES or logits.device.type != "cpu":
        best, token_ids = logits.max(dim=1)
        return best, token_ids
    best = logits.amax(dim=1)
    token_ids = torch.zeros(len(logits), dtype=torch.int64)
    find_in_blocks(logits.contiguous().numpy(), best.numpy(), token_ids.numpy())
    return best, token_ids


_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, the increment of splitmix64

# Odd, and so far from small multiples of the other that no two small seeds meet: 0xD1342543DE82EF95, of an LCG.
_SEED_STEP = -0x2ECBDABC217D106B
_MIX1, _MIX2 = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FMIX1, _FMIX2 = -0x7A143595, -0x3D4D51CB  # 0x85EBCA6B, 0xC2B2AE35
_MAX_U = 1.0 - 2.0**-24


def token_hashes(token_ids: Tensor) -> Tensor:
    """int64 token ids to int32 of the same shape: the part of the noise that is the same in every row."""
    return _mix64(token_ids + _GOLDEN).to(torch.int32)


def gumbel(seed: Tensor, position: Tensor, hashes: Tensor) -> Tensor:
    """Noise of the tokens behind `hashes`.

    Args:
        seed, position: [S] int64.
        hashes: [V] for the same tokens in every row, or [S, C] for each row's own.

    Returns:
        float32 [S, V] or [S, C], between −2.9 and 22.2.
    """
    key = _mix64(seed * _SEED_STEP + position * _GOLDEN)[:, None]
    bits = hashes ^ key.to(torch.int32)
    _scramble(bits, (key >> 32).to(torch.int32))
    u = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_MAX_U)
    return u.neg_().log1p_().neg_().log_().neg_()


def _scramble(bits: Tensor, key: Tensor) -> None:
    """fmix32 in place, with the other half of the key between its multiplications."""
    bits.bitwise_xor_(_shift_right(bits, 16, width=32)).mul_(_FMIX1).bitwise_xor_(key)
    bits.bitwise_xor_(_shift_right(bits, 13, width=32)).mul_(_FMIX2)
    bits.bitwise_xor_(_shift_right(bits, 16, width=32))


def _mix64(x: Tensor) -> Tensor:
    """The output function of splitmix64."""
    x = (x ^ _shift_right(x, 30, width=64)) * _MIX1
    x = (x ^ _shift_right(x, 27, width=64)) * _MIX2
    return x ^ _shift_right(x, 31, width=64)


def _shift_right(x: Tensor, count: int, *, width: int) -> Tensor:
    """Logical shift: torch's keeps the sign."""
    return (x >> count).bitwise_and_((1 << (width - count)) - 1)


FEW = 8
"""Noise is drawn for kept tokens alone when they are at most one in this many."""

CORRUPTED = -1
"""Stands for a token that means nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutput:
    """S rows in the order of the logits."""

    token_ids: Tensor
    """[S] int64; `CORRUPTED` where the best logit is NaN or +infinity."""
    logprobs: tuple[SampledLogprobs | None, ...]
    """[S], or empty when no row requests them."""


class Sampler:
    """Samples one token per row. Called by the thread that runs forwards."""

    def __init__(self) -> None:
        # Hashes of all token ids, made when the first row needs noise: a constant of the vocabulary.
        self._hashes = torch.empty(0, dtype=torch.int32)
        self.editor = LogitEditor()
        # What it needs is compiled now, and not while the first request waits.
        best_tokens(torch.zeros(1, 1))

    def sample(self, logits: Tensor, sampling: SamplingBatch, *, ahead: Tensor | None = None) -> SampleOutput:
        """logits [R, V] float32, left as they are. NaN in a row disturbs no other, and marks its token.

        `ahead` as in `LogitEditor.edit`.
        """
        edited = self.editor.edit(logits, sampling.edits, sampling.suppress, masks=sampling.masks, ahead=ahead)
        best, token_ids = best_tokens(edited)  # the first of equals, as transformers has it
        # NaN counts as the largest, so one look at the winners tells of every row.
        sound = best < torch.inf
        if not sampling.all_greedy:
            rows = (sampling.temperature > 0.0).nonzero().squeeze(1)
            if len(rows) == len(logits):
                token_ids = self._draw(edited, sampling)
            elif len(rows):
                token_ids[rows] = self._draw(edited[rows], _only(sampling, rows))
        logprobs: tuple[SampledLogprobs | None, ...] = ()
        if sampling.logprobs:
            logprobs = sampled_logprobs(logits, token_ids, sampling.logprobs, sampling.logprob_ids)
        # Logprobs need a token that is one. A row of nothing but -infinity is sound: all of it was forbidden.
        return SampleOutput(token_ids=token_ids.masked_fill_(~sound, CORRUPTED), logprobs=logprobs)

    def record(self, sampling: SamplingBatch, token_ids: Tensor) -> None:
        """Let rows with a history have the tokens [S] that they got. After every `sample`, in step order."""
        self.editor.record(sampling.edits, token_ids[:, None])

    def _draw(self, logits: Tensor, sampling: SamplingBatch) -> Tensor:
        """Token ids [R] of rows that all sample, by the Gumbel-max rule over the tokens their filters keep."""
        scaled = scale(logits, sampling.temperature)
        noise = RowNoise(self._vocabulary(scaled), sampling.seed, sampling.position)
        thresholds = keep_thresholds(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
        if thresholds is None:
            return (noise.of_all() + scaled).argmax(dim=1)
        kept = scaled >= thresholds[:, None]
        scaled.masked_fill_(~kept, -torch.inf)
        # At least one: a row whose every token is impossible keeps none, and must still end.
        most = max(1, int(kept.sum(dim=1).max()))
        if most * FEW > scaled.shape[1]:
            return (noise.of_all() + scaled).argmax(dim=1)
        # In order of id, so that the first of equals is the one `of_all` would find.
        ids = scaled.topk(most, dim=1).indices.sort(dim=1).values
        winner = (noise.of(ids) + scaled.gather(1, ids)).argmax(dim=1, keepdim=True)
        return ids.gather(1, winner).squeeze(1)

    def _vocabulary(self, logits: Tensor) -> Tensor:
        if len(self._hashes) != logits.shape[1] or self._hashes.device != logits.device:
            self._hashes = token_hashes(torch.arange(logits.shape[1], device=logits.device))
        return self._hashes


@dataclass(frozen=True, slots=True)
class RowNoise:
    """Gumbel noise of R rows."""

    hashes: Tensor
    seed: Tensor
    position: Tensor

    def of_all(self) -> Tensor:
        """[R, V]"""
        return gumbel(self.seed, self.position, self.hashes)

    def of(self, token_ids: Tensor) -> Tensor:
        """[R, C], the same numbers that `of_all` has for `token_ids` [R, C]."""
        return gumbel(self.seed, self.position, self.hashes[token_ids])


def _only(sampling: SamplingBatch, rows: Tensor) -> SamplingBatch:
    """What `_draw` needs of some rows."""
    return SamplingBatch(
        temperature=sampling.temperature[rows],
        top_k=sampling.top_k[rows],
        top_p=sampling.top_p[rows],
        min_p=sampling.min_p[rows],
        seed=sampling.seed[rows],
        position=sampling.position[rows],
    )


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide by the temperature with the largest moved to 0 first, so that no temperature overflows it."""
    largest = logits.amax(dim=1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    return (logits - largest) / temperature[:, None]
