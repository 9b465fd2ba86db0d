"""From logits to tokens, in one fixed order.

    logits float32 ─▶ edits ─▶ ÷ temperature ─▶ top-k, top-p, min-p ─▶ + noise ─▶ argmax
          └─▶ raw logprobs  └─▶ greedy rows ─▶ argmax

A row's token is a function of its own logits, parameters, history, seed and position. Nothing here looks
across rows, so the same row gives the same token alone, in any batch, and on any worker. The only state is
the history that penalties and bad words need (`editor`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.forward.forward_batch import SampledLogprobs, SamplingBatch
from tandem_engine.sampling.editor import LogitEditor
from tandem_engine.sampling.filters import keep_thresholds
from tandem_engine.sampling.greedy import best_tokens
from tandem_engine.sampling.logprobs import sampled_logprobs
from tandem_engine.sampling.noise import gumbel, token_hashes

FEW = 8
"""Noise is drawn for kept tokens alone when they are at most one in this many."""
UNSOUND = -1
"""Stands for a token that means nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutput:
    """S rows in the order of the logits."""

    token_ids: Tensor
    """[S] int64; `UNSOUND` where the best logit is NaN or +infinity."""
    logprobs: tuple[SampledLogprobs | None, ...]
    """[S], or empty when nobody asked."""


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
        return SampleOutput(token_ids=token_ids.masked_fill_(~sound, UNSOUND), logprobs=logprobs)

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
