"""The target's hidden states, kept for a draft head in the order of its KV.

    states[page * page_size + offset]   hidden state of the token whose KV is in that slot

Written by every forward of the target right after the model ran, where forwards run. A head's input at a position is
the state of the position before, which is then one slot back, in whichever step it was computed; a prefix that is
shared shares its states too. One vector per token: a few per cent of what its KV takes.

The newest token of a text, and guesses behind it, have no state of the target yet. Until then their slots have what
the head made of them, which is what its next guess goes on from. Whenever the target computes such a token, it writes
there.
"""

import torch
from torch import Tensor

from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.kernels.dispatch import by_triton

NOWHERE = -1
"""The slot of what is before the first token."""


class HiddenStates:
    """Implements `HiddenObserver`. Used where forwards run, and in their order; waits for no device."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._page_size = page_size
        self._states = torch.zeros(num_pages * page_size, hidden_size, dtype=dtype, device=device)

    def observe(self, hidden: Tensor, out_cache_loc: Tensor) -> None:
        """See `HiddenObserver.observe`."""
        if by_triton(self._states.device):
            from tandem_engine.kernels.row_tables import scatter_rows

            scatter_rows(self._states, out_cache_loc, hidden)
        else:
            self._states.index_copy_(0, out_cache_loc, hidden)

    def before(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] the state before each token of `batch`: zeros for the first token of a sequence."""
        slots = self._slots_before(batch)
        if by_triton(self._states.device):
            from tandem_engine.kernels.row_tables import gather_rows

            return gather_rows(self._states, slots)
        states = self._states.index_select(0, slots.clamp(min=0))
        return states.masked_fill_((slots == NOWHERE)[:, None], 0.0)

    def _slots_before(self, batch: ForwardBatch) -> Tensor:
        """[T] int64: of the token before in the batch, or, for the first of a sequence, of the last that it has."""
        firsts = batch.extend_lens.cumsum(0) - batch.extend_lens
        previous = batch.seq_lens - batch.extend_lens - 1
        inside = previous.clamp(min=0)
        pages = batch.page_table.gather(1, (inside // self._page_size).long()[:, None]).squeeze(1)
        last = (pages * self._page_size + inside % self._page_size).masked_fill(previous < 0, NOWHERE)
        return batch.out_cache_loc.roll(1).index_copy_(0, firsts, last.long())
