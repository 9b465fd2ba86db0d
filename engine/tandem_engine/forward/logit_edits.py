"""Edits of logits that requests ask for, as tensors.

Most requests have none, so `SamplingBatch.edits` is None in most steps, and a kind of edit that no request of the step
has is None here. Shapes use  S = rows of logits, V = vocabulary; every `index` is int64 into S.

Penalties and bad words depend on the tokens before. Those are on the device (`sampling.logits_processor`), because the
host does not have the newest ones yet [device-history]. `histories` loads the host's history into rows that have just
been assigned to a request: after its first prefill, a retraction, a resumption or a handoff [history-rebuilt]. From
then on the device counts by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ANY = -1
"""Stands in `BadWords.prefixes` before a sequence that is shorter than the longest: matches every token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All tokens of one request, none in flight, for a row that must know them before it samples."""

    row: int
    """req_pool_idx"""
    slot: int | None
    """Place of its counts; None when only its last tokens matter."""
    prompt_ids: Sequence[int] | Tensor
    """() when no prompt token is penalized."""
    output_ids: Sequence[int] | Tensor
    """A tensor, int64 [N], once it is where logits are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """Of P rows. Strengths are float32."""

    index: Tensor
    """[P]"""
    slots: Tensor
    """[P] int64, places of their counts."""
    repetition: Tensor
    """[P], 1 for none."""
    frequency: Tensor
    """[P], 0 for none."""
    presence: Tensor
    """[P], 0 for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBiases:
    """What is added to N single logits; no logit is named twice."""

    index: Tensor
    """[N]"""
    token_ids: Tensor
    """[N]"""
    values: Tensor
    """[N] float32"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSets:
    """N (row, token id) pairs: what these rows may choose from, or what is forbidden to them."""

    index: Tensor
    """[N]"""
    token_ids: Tensor
    """[N]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadWords:
    """W sequences of two or more tokens: the last is forbidden where the others are the newest of the output."""

    index: Tensor
    """[W]"""
    rows: Tensor
    """[W] req_pool_idx of each sequence's request."""
    prefixes: Tensor
    """[W, L] all but the last token, right-aligned, `ANY` before."""
    last: Tensor
    """[W]"""
    recalled_index: Tensor
    """[Q] the rows of logits of these requests, each once."""
    recalled_rows: Tensor
    """[Q] their req_pool_idx."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitEdits:
    """All edits of a step."""

    penalties: Penalties | None = None
    biases: TokenBiases | None = None
    allowed: TokenSets | None = None
    forbidden: TokenSets | None = None
    bad_words: BadWords | None = None
    histories: tuple[History, ...] = ()

    def over_runs(self, lens: Tensor) -> "LogitEdits":
        """The same edits where each row has become a run of `lens` [S] rows, as when drafts are verified
        [every-accepted-token]."""
        runs = _Runs(lens=lens, starts=lens.cumsum(0) - lens)
        return replace(
            self,
            penalties=self.penalties and _penalties_over(self.penalties, runs),
            biases=self.biases and _biases_over(self.biases, runs),
            allowed=self.allowed and _sets_over(self.allowed, runs),
            forbidden=self.forbidden and _sets_over(self.forbidden, runs),
            bad_words=self.bad_words and _bad_words_over(self.bad_words, runs),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Runs:
    lens: Tensor
    starts: Tensor

    def spread(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """For entries at rows `index`: which entry, and which row, for every row of each entry's run."""
        lens = self.lens[index]
        entries = torch.arange(len(index), device=index.device).repeat_interleave(lens)
        first = lens.cumsum(0) - lens
        offsets = torch.arange(len(entries), device=index.device) - first[entries]
        return entries, self.starts[index][entries] + offsets


def _penalties_over(penalties: Penalties, runs: _Runs) -> Penalties:
    entries, index = runs.spread(penalties.index)
    return Penalties(
        index=index,
        slots=penalties.slots[entries],
        repetition=penalties.repetition[entries],
        frequency=penalties.frequency[entries],
        presence=penalties.presence[entries],
    )


def _biases_over(biases: TokenBiases, runs: _Runs) -> TokenBiases:
    entries, index = runs.spread(biases.index)
    return TokenBiases(index=index, token_ids=biases.token_ids[entries], values=biases.values[entries])


def _sets_over(sets: TokenSets, runs: _Runs) -> TokenSets:
    entries, index = runs.spread(sets.index)
    return TokenSets(index=index, token_ids=sets.token_ids[entries])


def _bad_words_over(words: BadWords, runs: _Runs) -> BadWords:
    entries, index = runs.spread(words.index)
    recalled, recalled_index = runs.spread(words.recalled_index)
    return BadWords(
        index=index,
        rows=words.rows[entries],
        prefixes=words.prefixes[entries],
        last=words.last[entries],
        recalled_index=recalled_index,
        recalled_rows=words.recalled_rows[recalled],
    )
