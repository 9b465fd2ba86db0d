"""The newest output tokens of rows whose requests forbid token sequences.

What the FutureMap is to the last token, this is to the last few: loaded when a request samples for the first time
on its row, then shifted after every step [device-history]. A tail is as long as the longest sequence needs and no
longer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_engine.forward.logit_edits import ANY, BadWords
from tandem_engine.messages.sampling import MAX_BAD_WORD_TOKENS

TAIL = MAX_BAD_WORD_TOKENS - 1
"""Tokens remembered per row: all of the longest sequence but its end."""
_NOTHING = -2
"""Before the first output token. Equals no token id and is not `ANY`."""


class TokenTails:
    """[rows, TAIL] the newest tokens of each req_pool_idx, right-aligned. Belongs to the thread that runs forwards."""

    def __init__(self) -> None:
        self._tails = torch.empty(0, TAIL, dtype=torch.int64)

    def load(self, row: int, output_ids: Sequence[int] | Tensor, *, device: torch.device | str = "cpu") -> None:
        """Make `row` know the end of this output and nothing before."""
        if row >= len(self._tails):
            self._grow(row + 1, device)
        tail = torch.as_tensor(output_ids[-TAIL:], dtype=torch.int64, device=device)
        self._tails[row] = _NOTHING
        self._tails[row, TAIL - len(tail) :] = tail

    def record(self, rows: Tensor, token_ids: Tensor) -> None:
        """Append what was generated: `token_ids` [Q, K] of `rows` [Q], −1 after a row's last where it has fewer."""
        self._tails[rows] = self._after(rows, token_ids)

    def forbid(self, logits: Tensor, words: BadWords, ahead: Tensor | None = None) -> None:
        """Set logits [S, V] that would complete a sequence to −inf, in place. `ahead` as in `PenaltyRows.apply`."""
        tails = self._tails[words.rows] if ahead is None else self._after(words.rows, ahead[words.index])
        wanted = words.prefixes
        complete = ((tails[:, TAIL - wanted.shape[1] :] == wanted) | (wanted == ANY)).all(dim=1)
        # Added, for two sequences may end in the same token and only one of them be complete.
        ban = torch.where(complete, -torch.inf, 0.0)
        logits.index_put_((words.index, words.last), ban, accumulate=True)

    def _after(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """[R, TAIL] the tails of `rows` [R] once `token_ids` [R, K] have been appended, −1 for none at the end."""
        longer = torch.cat((self._tails[rows], token_ids), dim=1)
        appended = (token_ids >= 0).sum(dim=1, keepdim=True)
        return longer.gather(1, appended + torch.arange(TAIL, device=longer.device))

    def _grow(self, rows: int, device: torch.device | str) -> None:
        tails = torch.full((max(rows, 2 * len(self._tails)), TAIL), _NOTHING, dtype=torch.int64, device=device)
        tails[: len(self._tails)] = self._tails
        self._tails = tails
