"""Which drafts become output, and the forward that verifies them.

The rule is: sample at every position of the run as if there were no drafts, and accept drafts while each equals the
token sampled at its own position. The token sampled after the last accepted draft is free (the bonus token), so a run
yields at least one token.

This is exact, greedy or not: a token is a pure function of the history before it, the request's parameters, its seed
and its position (`sampling.sampler`). At a position whose history is accepted drafts the forward has the inputs of an
ordinary decode, so it samples the same token. Output with drafts is therefore the output without them, token for token;
an equal distribution follows.

Rejection sampling (Leviathan et al. 2023) keeps only the distribution. The rule here costs acceptance at a temperature:
drafts that are independent of the noise are accepted with the probability p(draft), where rejection sampling accepts
min(1, p / q) of drafts from q. Proposers with a distribution recover it by sampling with the same noise, seed and
position as the target (a Gumbel coupling). For distributions a total variation of v apart the two then agree with
probability (1 − v) / (1 + v) or more (Daliri et al. 2024), where no method can exceed 1 − v.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import Protocol

import torch
from torch import Tensor

from tandem_engine.forward.batch import NO_DRAFT, ForwardBatch, ForwardResult, drafts_of
from tandem_engine.speculative.interface import AcceptResult, DraftTokens, Verifier


class ChainVerifier:
    """Implements `Verifier` for chains: the longest prefix of each that equals what was sampled."""

    def verify(self, drafts: DraftTokens, sampled: Sequence[int]) -> AcceptResult:
        """See `Verifier.verify`."""
        accept_lens, start = [], 0
        for chain in drafts.chains:
            accept_lens.append(1 + _common_prefix(chain, sampled[start : start + len(chain)]))
            start += len(chain) + 1
        assert start == len(sampled), f"{len(sampled)} tokens sampled for runs of {start}"
        return AcceptResult(tuple(accept_lens))


class Model(Protocol):
    """What computes steps: a `ModelRunner`, or the fake model."""

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """One token for each row of `batch.sampling`."""
        ...

    def record(self, batch: ForwardBatch, token_ids: Tensor) -> None:
        """Requests whose next tokens depend on those before got `token_ids` [S, K], −1 after a shorter run."""
        ...

    def accept(self, accept_lens: Sequence[int]) -> None:
        """So many tokens [S] of each run of the newest step count."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedForward:
    """Steps whose results hold accepted runs: what an executor runs when there may be drafts."""

    model: Model
    verifier: Verifier

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Run `batch`, and keep the accepted run of every sequence."""
        return self.accepted(batch, self.model.forward(batch))

    def accepted(self, batch: ForwardBatch, result: ForwardResult) -> ForwardResult:
        """Of what `batch`, on the host, came to, the accepted run of every sequence: ids, logprobs and history alike
        [every-accepted-token] [one-cut]. Before the next step is launched, which must know that history.
        """
        if not batch.draft_lens:
            return result
        accept_lens = self.verifier.verify(DraftTokens(drafts_of(batch)), result.next_token_ids).accept_lens
        keep = _kept_rows(batch.draft_lens, accept_lens)
        token_ids = tuple(result.next_token_ids[row] for row in keep)
        self.model.accept(accept_lens)
        if batch.sampling.edits is not None:
            self.model.record(batch, _padded(token_ids, accept_lens))
        return replace(
            result,
            next_token_ids=token_ids,
            accept_lens=accept_lens,
            logprobs=tuple(result.logprobs[row] for row in keep) if result.logprobs else (),
            corrupted=_sequences_of(result.corrupted, batch.draft_lens),
        )


def _common_prefix(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    pairs = zip(drafts, sampled, strict=True)
    return next((index for index, (draft, token) in enumerate(pairs) if draft != token), len(drafts))


def _kept_rows(draft_lens: Sequence[int], accept_lens: Sequence[int]) -> list[int]:
    """Rows of sampling that belong to accepted runs."""
    starts = [0]
    for count in draft_lens:
        starts.append(starts[-1] + count + 1)
    runs = zip(pairwise(starts), accept_lens, strict=True)
    return [row for (start, _), length in runs for row in range(start, start + length)]


def _sequences_of(rows: Sequence[int], draft_lens: Sequence[int]) -> tuple[int, ...]:
    """Sequences that any of `rows` of sampling belongs to."""
    if not rows:
        return ()
    ends = [*accumulate(count + 1 for count in draft_lens)]
    return tuple(sorted({bisect_right(ends, row) for row in rows}))


def _padded(token_ids: Sequence[int], accept_lens: Sequence[int]) -> Tensor:
    """[S, longest run] the runs, one per line."""
    lines, rest = [], iter(token_ids)
    for length in accept_lens:
        lines.append([*islice(rest, length), *[NO_DRAFT] * (max(accept_lens) - length)])
    return torch.tensor(lines, dtype=torch.int64)
