"""The edits of `editor`, in its order and with its results, by operations that can all be queued on a device.

Nothing here looks at a value, makes a shape depend on one, or brings a list from the host: what the host knows comes
with the step (`forward.step_inputs`), the masks of grammars when they are filled [no-device-wait].
"""

import torch
from torch import Tensor

from tandem_engine.forward.logit_edits import LogitEdits, TokenSets
from tandem_engine.kernels.dispatch import by_triton
from tandem_engine.sampling.queued_penalties import CountedPenalties
from tandem_engine.sampling.recording import record_tokens
from tandem_engine.sampling.token_tails import TokenTails

WORD_BITS = 32
_NO_EDITS = LogitEdits()


class QueuedEditor:
    """Edits logits on a device. Owns the token history of its penalised rows."""

    def __init__(self) -> None:
        self.penalties = CountedPenalties()
        self.tails = TokenTails()

    def edit(
        self,
        logits: Tensor,
        edits: LogitEdits | None,
        suppressed: TokenSets | None,
        *,
        masks: tuple[Tensor, Tensor] | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """As `LogitEditor.edit`. `masks`: rows [G] and packed bits [G, words] int32 of the rows with a grammar."""
        if edits is None and suppressed is None and masks is None:
            return logits
        edits = edits or _NO_EDITS
        self._load(edits, logits)
        logits = self._edit_rows(logits, edits, masks, ahead)
        if edits.biases is not None:
            # A bias does not lift what is not allowed: behind that it does what it does before.
            logits.index_put_((edits.biases.index, edits.biases.token_ids), edits.biases.values, accumulate=True)
        unedited = logits if edits.allowed is None else logits.clone()
        _forbid(logits, edits.forbidden)
        if edits.bad_words is not None:
            self.tails.forbid(logits, edits.bad_words, ahead)
        _forbid(logits, suppressed)
        return logits if edits.allowed is None else _restore_if_empty(logits, unedited, edits.allowed)

    def _edit_rows(
        self, logits: Tensor, edits: LogitEdits, masks: tuple[Tensor, Tensor] | None, ahead: Tensor | None
    ) -> Tensor:
        """A copy, with what touches whole rows: penalties, grammars, allowed tokens."""
        if by_triton(logits.device):
            from tandem_engine.sampling.on_device import edit_rows, penalties_by_row

            counted = (
                None
                if edits.penalties is None
                else penalties_by_row(edits.penalties, *self.penalties.tables, logits, ahead)
            )
            return edit_rows(logits, penalties=counted, masks=masks, allowed=edits.allowed)
        logits = logits.clone()
        if edits.penalties is not None:
            self.penalties.apply(logits, edits.penalties, ahead)
        if masks is not None:
            _apply_masks(logits, *masks)
        return logits if edits.allowed is None else _keep_only(logits, edits.allowed)

    def record(self, edits: LogitEdits | None, token_ids: Tensor) -> None:
        """Remember the tokens that rows of the step got; see `record_tokens`."""
        record_tokens(self.penalties, self.tails, edits, token_ids)

    def _load(self, edits: LogitEdits, logits: Tensor) -> None:
        for history in edits.histories:
            if history.slot is not None:
                self.penalties.load(history, logits)
            self.tails.load(history.row, history.output_ids, device=logits.device)


def _apply_masks(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """−inf wherever the mask of a row forbids the token, and for tokens beyond its words."""
    vocab_size = logits.shape[1]
    bits = bitmask[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = (bits & 1).bool().flatten(1)[:, :vocab_size]
    edited = torch.full_like(logits[: len(rows)], -torch.inf)
    known = allowed.shape[1]
    edited[:, :known] = logits[rows, :known].masked_fill(~allowed, -torch.inf)
    logits.index_copy_(0, rows, edited)


def _keep_only(logits: Tensor, allowed: TokenSets) -> Tensor:
    free = torch.ones_like(logits, dtype=torch.bool)
    free.index_fill_(0, allowed.index, value=False)
    free.index_put_((allowed.index, allowed.token_ids), torch.ones_like(allowed.index, dtype=torch.bool))
    return logits.masked_fill(~free, -torch.inf)


def _restore_if_empty(logits: Tensor, before: Tensor, allowed: TokenSets) -> Tensor:
    """Rows with `allowed` tokens that later rules have emptied, as they were `before` those."""
    limited = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    limited.index_fill_(0, allowed.index, value=True)
    empty = limited & (logits.amax(dim=1) == -torch.inf)
    return torch.where(empty[:, None], before, logits)


def _forbid(logits: Tensor, tokens: TokenSets | None) -> None:
    if tokens is not None:
        logits.index_put_((tokens.index, tokens.token_ids), logits.new_full((), -torch.inf))
