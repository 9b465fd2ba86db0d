"""Masks that are not known yet when their step is launched.

    scheduler thread                                    forward thread
    masks = TokenMasks.open(rows, words)
    launch step N+1                            ─────▶   model forward of N+1
    settle step N: its tokens become known
    fill `bitmask` row by row, `release`       ─────▶   `wait`, mask the logits, sample

On a device nobody waits: what samples is queued `when_released`, by the scheduler thread itself.

So a grammar costs the wait for the end of settlement, not the overlap [masks-after-settling]. Whoever opens masks
releases them whatever happens: rows forbid nothing until they are filled, and the token of a request that has ended is
dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Self

import torch

ALL_ALLOWED = -1
"""A word whose 32 tokens are all allowed."""

LONGEST_WAIT = 60.0
"""Seconds after which masks will not come any more: a bug, answered by a failed step instead of a hung engine."""


class MasksLateError(Exception):
    """Nobody released the masks of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMasks:
    """The masks of one step, for those of its sampling sequences that have a grammar."""

    rows: tuple[int, ...]
    """[G] the row of the step's logits that each mask is for."""
    bitmask: torch.Tensor
    """[G, words] int32 on the host, see `sampling.grammar.backend.Bits`. Not to be read before `wait`."""
    _released: Event = field(default_factory=Event)
    _then: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def open(cls, rows: tuple[int, ...], words: int) -> Self:
        """Masks that forbid nothing so far."""
        return cls(rows=rows, bitmask=torch.full((len(rows), words), ALL_ALLOWED, dtype=torch.int32))

    def release(self) -> None:
        """The bitmask is final. Idempotent."""
        self._released.set()
        while self._then:
            self._then.pop(0)()

    def when_released(self, then: Callable[[], None]) -> None:
        """Have `then` called by `release`, at once if that was. Called by the thread that releases."""
        if self._released.is_set():
            then()
        else:
            self._then.append(then)

    def wait(self) -> torch.Tensor:
        """The bitmask, once it is final."""
        if not self._released.wait(LONGEST_WAIT):
            raise MasksLateError(f"the token masks of a step were not filled within {LONGEST_WAIT:g} s")
        return self.bitmask
