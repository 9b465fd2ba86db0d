"""How often each token occurs in what a request has generated, and whether its prompt has it.

Life of a slot
    1. load      a request samples for the first time on its row: counts of its settled output, and its prompt
    2. apply     before each of its tokens is chosen; the only place where penalties touch logits (T44)
    3. record    right after each is chosen, in the thread and order of the steps, so that no step reads counts
                 that lag behind (T41), and every accepted draft counts (T42)
    4. load      by another request, once the scheduler has given the slot away

The scheduler numbers slots from 0 and only requests with a penalty have one, so the tables are as large as the
most of them that ran at once. A step in flight may still count for a request that has ended: it comes before
the `load` of the slot's next owner, and that forgets all.

    repetition   logit > 0 ? logit / r : logit · r     tokens of prompt and output
    frequency    logit − f · count                      tokens of the output
    presence     logit − p                              tokens of the output

in this order, as vLLM does. Everything is element by element: a row's result does not depend on other rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_engine.forward.logit_edits import Penalties

BLOCK = 2**20
"""Logits that are penalised at a time. Temporaries of all rows together would be too large for a processor's caches,
and for its allocator to keep: three to four times slower at 64 rows of 152k tokens."""


class PenaltyRows:
    """Counts of C slots over V tokens, 5 bytes for each pair. Belongs to the thread that runs forwards."""

    def __init__(self) -> None:
        self._counts = torch.empty(0, 0, dtype=torch.int32)
        self._in_prompt = torch.empty(0, 0, dtype=torch.bool)

    @property
    def capacity(self) -> int:
        """Slots that there is memory for."""
        return len(self._counts)

    def load(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make `slot` know these tokens and no others."""
        if slot >= self.capacity:
            self._grow(slot + 1, vocab_size, device)
        outputs = torch.tensor(output_ids, dtype=torch.int64, device=device)
        self._counts[slot] = torch.bincount(outputs, minlength=vocab_size)
        self._in_prompt[slot] = False
        self._in_prompt[slot, torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True

    def record(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count what was generated: `token_ids` [P, K] of `slots` [P], −1 where a row has fewer than K."""
        rows = slots[:, None].expand_as(token_ids)
        self._counts.index_put_((rows, token_ids.clamp(min=0)), (token_ids >= 0).int(), accumulate=True)

    def apply(self, logits: Tensor, penalties: Penalties, ahead: Tensor | None = None) -> None:
        """Penalise rows of `logits` [S, V] float32 in place.

        Args:
            ahead: [S, K] tokens that come before each row beside those counted, −1 for none: the drafts before a
                position whose logits are wanted in the same step (T42).
        """
        rows_at_once = max(1, BLOCK // logits.shape[1])
        for first in range(0, len(penalties.index), rows_at_once):
            self._apply_block(logits, penalties, slice(first, first + rows_at_once), ahead)

    def _apply_block(self, logits: Tensor, penalties: Penalties, block: slice, ahead: Tensor | None) -> None:
        index, slots = penalties.index[block], penalties.slots[block]
        counts = self._counts[slots]
        if ahead is not None:
            drafts = ahead[index]
            counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).int())
        generated = counts > 0
        known = generated | self._in_prompt[slots]
        rows = logits[index]
        strength = penalties.repetition[block, None]
        rows = torch.where(known, torch.where(rows > 0, rows / strength, rows * strength), rows)
        rows -= penalties.frequency[block, None] * counts
        rows -= penalties.presence[block, None] * generated
        logits[index] = rows

    def _grow(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        capacity = max(slots, 2 * self.capacity)
        counts = torch.zeros(capacity, vocab_size, dtype=torch.int32, device=device)
        in_prompt = torch.zeros(capacity, vocab_size, dtype=torch.bool, device=device)
        if self.capacity:
            counts[: self.capacity] = self._counts
            in_prompt[: self.capacity] = self._in_prompt
        self._counts, self._in_prompt = counts, in_prompt
