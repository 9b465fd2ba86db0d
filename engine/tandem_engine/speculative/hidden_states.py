"""The target's hidden states, kept for a draft head in the order of its KV.

    states[page * page_size + offset]   hidden state of the token whose KV is in that slot

Written by every forward of the target right after the model ran, on the same thread. A head's input at a
position is the state of the position before, which is then one slot back, in whichever step it was computed;
a prefix that is shared shares its states too. One vector per token: a few per cent of what its KV takes.
"""

import torch
from torch import Tensor

from tandem_engine.forward.forward_batch import ForwardBatch


class HiddenStates:
    """Implements `HiddenObserver`. Thread that runs forwards only."""

    def __init__(self, *, num_pages: int, page_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._page_size = page_size
        self._states = torch.zeros(num_pages * page_size, hidden_size, dtype=dtype)

    def observe(self, hidden: Tensor, out_cache_loc: Tensor) -> None:
        """See `HiddenObserver.observe`."""
        self._states.index_copy_(0, out_cache_loc, hidden)

    def before(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] the state before each token of `batch`: zeros for the first token of a sequence."""
        firsts = batch.extend_lens.cumsum(0) - batch.extend_lens
        slots = batch.out_cache_loc.roll(1)
        previous = batch.seq_lens - batch.extend_lens - 1
        inside = previous.clamp(min=0)
        pages = batch.page_table.gather(1, (inside // self._page_size)[:, None]).squeeze(1).long()
        slots[firsts] = pages * self._page_size + inside % self._page_size
        states = self._states.index_select(0, slots)
        states[firsts[previous < 0]] = 0.0
        return states
