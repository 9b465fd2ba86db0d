"""Which tokens of a step belong to which adapter: indices that the scheduler's thread computes for the layers.

A slot is the place of an adapter among those that an engine has loaded. Layers multiply the tokens of a slot by its
matrices, and add the result to their rows; they look at no other row. Adjacent rows, such as those of one prompt, need
not be gathered. The last layer computes only the tokens that are wanted after it, so their rows are listed as well.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NO_ADAPTER = -1
"""The slot of a sequence that the base model alone computes."""


class SlotRows(NamedTuple):
    """The rows of one adapter."""

    slot: int
    rows: Tensor | slice
    """[N] int64, in ascending order, or a range of adjacent ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRows:
    """Rows of one step in which some sequence has an adapter."""

    tokens: tuple[SlotRows, ...]
    """By index among the step's tokens."""
    wanted: tuple[SlotRows, ...]
    """By index among the tokens that are wanted after the last layer."""

    @classmethod
    def of(cls, slots: "npt.NDArray[np.int64]", *, lens: Tensor, wanted: Tensor) -> Self | None:
        """Rows of the sequences with an adapter. None if no sequence has one.

        Args:
            slots: [B], of each sequence of the step.
            lens: [B] int64 on the host, the tokens of each sequence in the step.
            wanted: [S] int64 on the host, indices of the tokens that are wanted after the last layer.
        """
        if bool((slots == NO_ADAPTER).all()):
            return None
        by_token, indices = np.repeat(slots, lens.numpy()), wanted.numpy()
        tokens = _by_slot(by_token)
        every = len(indices) == len(by_token) and bool((indices == np.arange(len(by_token))).all())
        return cls(tokens=tokens, wanted=tokens if every else _by_slot(by_token[indices]))

    def with_all_wanted(self) -> "AdapterRows":
        """The same for a step whose tokens are all wanted after the last layer, in their order."""
        return replace(self, wanted=self.tokens)


def _by_slot(slots: "npt.NDArray[np.int64]") -> tuple[SlotRows, ...]:
    if len(slots) == 0:
        return ()
    order = np.argsort(slots, kind="stable")
    found, firsts = np.unique(slots[order], return_index=True)
    rows = np.split(order, firsts[1:])
    return tuple(SlotRows(int(slot), _rows(each)) for slot, each in zip(found, rows, strict=True) if slot != NO_ADAPTER)


def _rows(indices: "npt.NDArray[np.int64]") -> Tensor | slice:
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else torch.from_numpy(indices)
