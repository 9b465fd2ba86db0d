"""Which tokens of a step belong to which adapter: indices that the scheduler's thread computes for the layers.

A slot is the place of an adapter among those that an engine has loaded. Layers gather the tokens of a slot, multiply
them by its matrices, and add the result to their rows; they look at no other row. The last layer computes only the
tokens that are wanted after it, so their rows are listed as well.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch, wanted_tokens

NO_ADAPTER = -1
"""The slot of a sequence that the base model alone computes."""


class SlotRows(NamedTuple):
    """The rows of one adapter."""

    slot: int
    rows: Tensor | None
    """[N] int64, in ascending order; None for all rows of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRows:
    """Of one step in which some sequence has an adapter."""

    tokens: tuple[SlotRows, ...]
    """By index among the step's tokens."""
    num_tokens: int
    wanted: tuple[SlotRows, ...]
    """By index among the tokens that are wanted after the last layer."""
    num_wanted: int

    @classmethod
    def of(cls, batch: ForwardBatch, slots: "npt.NDArray[np.int64]") -> Self | None:
        """Of `batch`, on the host, with a slot for each sequence. None if no sequence has an adapter."""
        if bool((slots == NO_ADAPTER).all()):
            return None
        by_token = np.repeat(slots, batch.extend_lens.numpy())
        by_wanted = by_token[wanted_tokens(batch).numpy()]
        return cls(
            tokens=_by_slot(by_token), num_tokens=len(by_token), wanted=_by_slot(by_wanted), num_wanted=len(by_wanted)
        )

    def with_all_wanted(self) -> "AdapterRows":
        """The same for a step whose tokens are all wanted after the last layer, in their order."""
        return replace(self, wanted=self.tokens, num_wanted=self.num_tokens)


def _by_slot(slots: "npt.NDArray[np.int64]") -> tuple[SlotRows, ...]:
    distinct = np.unique(slots)
    if len(distinct) == 1 and distinct[0] != NO_ADAPTER:
        return (SlotRows(int(distinct[0]), None),)
    return tuple(
        SlotRows(int(slot), torch.from_numpy(np.flatnonzero(slots == slot))) for slot in distinct if slot != NO_ADAPTER
    )
