"""The tokens that rows got, remembered by whatever edits the logits of their next steps."""

from typing import Protocol

from torch import Tensor

from tandem_engine.forward.logit_edits import LogitEdits
from tandem_engine.sampling.token_tails import TokenTails


class TokenCounts(Protocol):
    """Of penalised rows."""

    def record(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count `token_ids` [P, K] of `slots` [P], −1 where a row has fewer than K."""
        ...


def record_tokens(counts: TokenCounts, tails: TokenTails, edits: LogitEdits | None, token_ids: Tensor) -> None:
    """Tell both of the tokens that rows [S] of a step got: `token_ids` [S, K], −1 after a row's last.

    `edits` has one entry per request: not those of `over_runs`.
    """
    if edits is None:
        return
    if edits.penalties is not None:
        counts.record(edits.penalties.slots, token_ids[edits.penalties.index])
    if edits.bad_words is not None:
        tails.record(edits.bad_words.recalled_rows, token_ids[edits.bad_words.recalled_index])
