"""What requests ask to be changed about their logits, in one fixed order.

    raw logits ─▶ penalties ─▶ grammar ─▶ logit_bias ─▶ allowed_token_ids ─▶ bad words, stop ids below min_tokens

A bias cannot lift what a grammar or a later rule forbids. Rules that together leave a row of `allowed_token_ids`
nothing give way, the last first: such a row may again choose whatever it is allowed. So every row ends with a token
that the client allowed; unless its grammar forbids all of these, and then settlement ends the request.

Penalties and bad words need the tokens before, which are kept here from step to step. A step calls `edit` once, then
`record` once its tokens are known, and both do nothing for rows that asked for nothing.
"""

import torch
from torch import Tensor

from tandem_engine.forward.logit_edits import LogitEdits, TokenSets
from tandem_engine.forward.token_masks import TokenMasks
from tandem_engine.sampling.grammar.bitmask import apply_masks
from tandem_engine.sampling.penalties import PenaltyRows
from tandem_engine.sampling.recording import record_tokens
from tandem_engine.sampling.token_tails import TokenTails

_NO_EDITS = LogitEdits()


class LogitEditor:
    """Edits logits. Owns the token history of penalised rows; belongs to the thread that runs forwards."""

    def __init__(self) -> None:
        self.penalties = PenaltyRows()
        self.tails = TokenTails()

    def edit(
        self,
        logits: Tensor,
        edits: LogitEdits | None,
        suppress: tuple[tuple[int, ...], ...] = (),
        *,
        masks: TokenMasks | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """`logits` [S, V] float32 as they are to be sampled from; a copy unless nobody asks for anything.

        Args:
            edits: their `histories` are taken in first.
            suppress: per row, token ids that must not be chosen; () for nobody.
            masks: what grammars allow; waited for. Raises `MasksLateError` when they do not come.
            ahead: [S, K] drafts before each row, −1 for none, when several positions of a request are in one step;
                `edits` are then those of `LogitEdits.over_runs`.
        """
        if edits is None and masks is None and not any(suppress):
            return logits
        edits = edits or _NO_EDITS
        logits = logits.clone()
        self._load(edits, logits)
        if edits.penalties is not None:
            self.penalties.apply(logits, edits.penalties, ahead)
        if masks is not None:
            apply_masks(logits, masks)
        if edits.biases is not None:
            logits[edits.biases.index, edits.biases.token_ids] += edits.biases.values
        allowed = None if edits.allowed is None else _keep_only(logits, edits.allowed)
        _forbid(logits, edits.forbidden)
        if edits.bad_words is not None:
            self.tails.forbid(logits, edits.bad_words, ahead)
        _forbid(logits, _pairs(suppress, logits.device))
        if allowed is not None:
            allowed.restore_if_empty(logits)
        return logits

    def record(self, edits: LogitEdits | None, token_ids: Tensor) -> None:
        """Remember the tokens that rows of the step got; see `record_tokens`."""
        record_tokens(self.penalties, self.tails, edits, token_ids)

    def _load(self, edits: LogitEdits, logits: Tensor) -> None:
        for history in edits.histories:
            if history.slot is not None:
                self.penalties.load(
                    history.slot,
                    history.prompt_ids,
                    history.output_ids,
                    vocab_size=logits.shape[1],
                    device=logits.device,
                )
            self.tails.load(history.row, history.output_ids, device=logits.device)


class _Allowed:
    """Rows of logits before anything of what they are allowed was forbidden."""

    def __init__(self, logits: Tensor, rows: Tensor) -> None:
        self._rows = rows
        self._logits = logits[rows]

    def restore_if_empty(self, logits: Tensor) -> None:
        """Undo later rules in the rows that they have emptied."""
        now = logits[self._rows]
        empty = now.amax(dim=1, keepdim=True) == -torch.inf
        logits[self._rows] = torch.where(empty, self._logits, now)


def _keep_only(logits: Tensor, allowed: TokenSets) -> _Allowed:
    rows = torch.unique(allowed.index)
    kept = logits[allowed.index, allowed.token_ids]
    logits[rows] = -torch.inf
    logits[allowed.index, allowed.token_ids] = kept
    return _Allowed(logits, rows)


def _forbid(logits: Tensor, tokens: TokenSets | None) -> None:
    if tokens is not None:
        logits[tokens.index, tokens.token_ids] = -torch.inf


def _pairs(suppress: tuple[tuple[int, ...], ...], device: torch.device) -> TokenSets | None:
    rows = [row for row, ids in enumerate(suppress) for _ in ids]
    if not rows:
        return None
    ids = [token for ids in suppress for token in ids]
    return TokenSets(index=torch.tensor(rows, device=device), token_ids=torch.tensor(ids, device=device))
