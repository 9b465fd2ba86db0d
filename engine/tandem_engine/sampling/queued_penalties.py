"""Counts of penalised tokens for a device: whole rows, and never a look at what they hold.

What `penalties` is to a CPU, with the same life of a slot and the same arithmetic, element by element. There a slot
lists the tokens that it has seen, so that a step touches their logits alone; how many they are is a number that only
the device knows. Here every logit of a penalised row is read and written: some microseconds of a device's memory.
"""

import torch
from torch import Tensor

from tandem_engine.forward.logit_edits import History, Penalties


class CountedPenalties:
    """Counts of C slots over V tokens, 5 bytes for each pair, on one device."""

    def __init__(self) -> None:
        self._counts = torch.empty(0, 0, dtype=torch.int32)
        """[C, V] occurrences in the output."""
        self._in_prompt = torch.empty(0, 0, dtype=torch.bool)
        """[C, V]"""

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Counts in outputs, int32 [C, V], and what prompts have, bool [C, V]."""
        return self._counts, self._in_prompt

    def load(self, history: History, logits: Tensor) -> None:
        """Make its slot know the tokens of `history`, tensors on the device of `logits` [S, V], and no others."""
        slot, outputs, prompt = history.slot, history.output_ids, history.prompt_ids
        assert slot is not None, "a history without a slot has no counts"
        assert isinstance(outputs, Tensor), "histories come to a device as tensors"
        assert isinstance(prompt, Tensor), "histories come to a device as tensors"
        if slot >= len(self._counts):
            self._grow(slot + 1, logits)
        self._counts[slot].zero_()
        self._counts[slot].index_put_((outputs,), torch.ones_like(outputs, dtype=torch.int32), accumulate=True)
        self._in_prompt[slot].zero_()
        self._in_prompt[slot].index_fill_(0, prompt, value=True)

    def record(self, slots: Tensor, token_ids: Tensor) -> None:
        """See `PenaltyRows.record`."""
        every = slots[:, None].expand_as(token_ids)
        self._counts.index_put_((every, token_ids.clamp(min=0)), (token_ids >= 0).int(), accumulate=True)

    def apply(self, logits: Tensor, penalties: Penalties, ahead: Tensor | None = None) -> None:
        """See `PenaltyRows.apply`."""
        counts = self._counts[penalties.slots]
        if ahead is not None:
            drafts = ahead[penalties.index]
            counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).int())
        generated = counts > 0
        known = generated | self._in_prompt[penalties.slots]
        before, strength = logits[penalties.index], penalties.repetition[:, None]
        after = torch.where(known, torch.where(before > 0, before / strength, before * strength), before)
        after -= penalties.frequency[:, None] * counts
        after -= penalties.presence[:, None] * generated
        logits.index_copy_(0, penalties.index, after)

    def _grow(self, slots: int, logits: Tensor) -> None:
        capacity, vocab_size = max(slots, 2 * len(self._counts)), logits.shape[1]
        counts = torch.zeros(capacity, vocab_size, dtype=torch.int32, device=logits.device)
        in_prompt = torch.zeros(capacity, vocab_size, dtype=torch.bool, device=logits.device)
        if len(self._counts):
            counts[: len(self._counts)] = self._counts
            in_prompt[: len(self._in_prompt)] = self._in_prompt
        self._counts, self._in_prompt = counts, in_prompt
