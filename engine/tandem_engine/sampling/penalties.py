"""How often each token occurs in what a request has generated, and whether its prompt has it.

Life of a slot
    1. load      a request samples for the first time on its row: counts of its settled output, and its prompt
    2. apply     before each of its tokens is chosen; the only place where penalties touch logits [penalties-once]
    3. record    right after each is chosen, in the thread and order of the steps, so that no step reads counts
                 that lag behind [device-history], and every accepted draft counts [every-accepted-token]
    4. load      by another request, once the scheduler has given the slot away

The scheduler numbers slots from 0 and only requests with a penalty have one, so the tables are as large as the
most of them that ran at once. A step in flight may still count for a request that has ended: it comes before
the `load` of the slot's next owner, and that forgets all.

Of a vocabulary of 152k a request has seen some hundred tokens, and no other logit changes. So each slot lists the
tokens it has seen, every one once, and a step reads and writes their logits alone:

    counts, in_prompt   [C, V]   by token, to be looked up
    seen                [C, W]   seen[c, :lens[c]] are the tokens of slot c; what is behind them is any token, whose
                                 counts say what it is: to penalise it twice, or for nothing, is to write it as it is

    repetition   logit > 0 ? logit / r : logit · r     tokens of prompt and output
    frequency    logit − f · count                      tokens of the output
    presence     logit − p                              tokens of the output

in this order, as vLLM does. Everything is element by element: a row's result does not depend on other rows.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem_engine.forward.logit_edits import Penalties

BLOCK = 2**20
"""Logits that are penalised at a time. Temporaries of all rows together would be too large for a processor's caches,
and for its allocator to keep."""
FIRST_WIDTH = 256


class PenaltyRows:
    """Counts of C slots over V tokens, 5 bytes for each pair. Belongs to the thread that runs forwards."""

    def __init__(self) -> None:
        self._counts = torch.empty(0, 0, dtype=torch.int32)
        self._in_prompt = torch.empty(0, 0, dtype=torch.bool)
        self._seen = torch.empty(0, 0, dtype=torch.int64)
        self._lens = torch.empty(0, dtype=torch.int64)
        self._room = 0
        """Tokens that may be recorded for every slot before `seen` could be full."""

    @property
    def capacity(self) -> int:
        """Slots that there is memory for."""
        return len(self._counts)

    def load(
        self,
        slot: int,
        prompt_ids: Sequence[int] | Tensor,
        output_ids: Sequence[int] | Tensor,
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make `slot` know these tokens and no others."""
        if slot >= self.capacity:
            self._grow(slot + 1, vocab_size, device)
        outputs = torch.as_tensor(output_ids, dtype=torch.int64, device=device)
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64, device=device)
        seen = torch.unique(torch.cat((prompt, outputs)))
        self._make_room(len(seen))
        self._forget(slot)
        self._counts[slot].index_put_((outputs,), torch.ones_like(outputs, dtype=torch.int32), accumulate=True)
        self._in_prompt[slot, prompt] = True
        self._seen[slot, : len(seen)] = seen
        self._lens[slot] = len(seen)

    def record(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count what was generated: `token_ids` [P, K] of `slots` [P], −1 where a row has fewer than K."""
        if self._room < token_ids.shape[1]:
            self._make_room(int(self._lens.max()) + token_ids.shape[1])
        self._room -= token_ids.shape[1]
        for token_id in token_ids.unbind(dim=1):
            counted, token = token_id >= 0, token_id.clamp(min=0)
            lens = self._lens[slots]
            new = counted & (self._counts[slots, token] == 0) & ~self._in_prompt[slots, token]
            self._seen[slots, lens] = token  # behind the end, where any token may stand, unless it is new
            self._lens[slots] = lens + new
            self._counts.index_put_((slots, token), counted.int(), accumulate=True)

    def apply(self, logits: Tensor, penalties: Penalties, ahead: Tensor | None = None) -> None:
        """Penalise rows of `logits` [S, V] float32 in place.

        Args:
            ahead: [S, K] tokens that come before each row beside those counted, −1 for none: the drafts before a
                position whose logits are wanted in the same step [every-accepted-token].
        """
        drafts = 0 if ahead is None else ahead.shape[1]
        for rows, width in self._blocks(penalties.slots, drafts):
            self._apply_block(logits, penalties, rows, width, ahead)

    def _blocks(self, slots: Tensor, drafts: int) -> Iterator[tuple[Tensor, int]]:
        """Places in `slots`, and the most tokens any of them has seen: those of about as many go together."""
        lens = self._lens[slots].tolist()
        alike: dict[int, list[int]] = {}
        for place, length in enumerate(lens):
            if length or drafts:
                alike.setdefault(length.bit_length(), []).append(place)
        for places in alike.values():
            width = max(lens[place] for place in places)
            at_once = max(1, BLOCK // ((width + drafts) * (1 + drafts)))
            for first in range(0, len(places), at_once):
                yield torch.tensor(places[first : first + at_once], device=slots.device), width

    def _apply_block(
        self, logits: Tensor, penalties: Penalties, rows: Tensor, width: int, ahead: Tensor | None
    ) -> None:
        index, slots = penalties.index[rows, None], penalties.slots[rows, None]
        tokens = self._seen[slots, torch.arange(width, device=slots.device)]
        drafts = None if ahead is None else ahead[index.squeeze(1)]
        if drafts is not None:
            tokens = torch.cat((tokens, drafts.clamp(min=0)), dim=1)
        counts = self._counts[slots, tokens]
        if drafts is not None:
            counts += (tokens[:, :, None] == drafts[:, None, :]).sum(dim=2, dtype=torch.int32)
        generated = counts > 0
        known = generated | self._in_prompt[slots, tokens]
        before = logits[index, tokens]
        strength = penalties.repetition[rows, None]
        after = torch.where(known, torch.where(before > 0, before / strength, before * strength), before)
        after -= penalties.frequency[rows, None] * counts
        after -= penalties.presence[rows, None] * generated
        logits[index, tokens] = after

    def _forget(self, slot: int) -> None:
        """Counts are zero everywhere else already."""
        seen = self._seen[slot, : int(self._lens[slot])]
        self._counts[slot, seen] = 0
        self._in_prompt[slot, seen] = False

    def _make_room(self, length: int) -> None:
        """Have `seen` hold `length` tokens of any slot, and one that is not counted."""
        longest = max(length, int(self._lens.max()))
        width = self._seen.shape[1]
        if width <= longest:
            wider = torch.zeros(
                self.capacity, max(FIRST_WIDTH, 2 * longest), dtype=torch.int64, device=self._seen.device
            )
            wider[:, :width] = self._seen
            self._seen = wider
        self._room = self._seen.shape[1] - 1 - longest

    def _grow(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        capacity, width = max(slots, 2 * self.capacity), self._seen.shape[1]
        counts = torch.zeros(capacity, vocab_size, dtype=torch.int32, device=device)
        in_prompt = torch.zeros(capacity, vocab_size, dtype=torch.bool, device=device)
        seen = torch.zeros(capacity, width, dtype=torch.int64, device=device)
        lens = torch.zeros(capacity, dtype=torch.int64, device=device)
        if self.capacity:
            counts[: self.capacity] = self._counts
            in_prompt[: self.capacity] = self._in_prompt
            seen[: self.capacity] = self._seen
            lens[: self.capacity] = self._lens
        self._counts, self._in_prompt, self._seen, self._lens = counts, in_prompt, seen, lens
