"""What this engine said last in rooms that are over, in case it did not arrive.

Life of a word
    1. kept      when a room is handed over, closed or refused: its `HandoffRecord` or `TransferAborted`
    2. repeated  whenever the receiver asks what became of the room, word for word: a message that comes twice changes
                 nothing [writes-repeat]
    3. dropped   when no receiver waits for it any more, or for newer ones
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.clock import Clock
from tandem_engine.disaggregation.room_key import RoomKey
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import HandoffRecord, TransferAborted

MOST_WORDS = 1024
"""Kept at a time; beyond, the oldest goes, and its room is only known to be closed."""


class _Said(NamedTuple):
    message: HandoffRecord | TransferAborted
    to: str
    until: float


@dataclass(kw_only=True, slots=True)
class LastWords:
    """Of one engine. Scheduler thread only."""

    clock: Clock
    keep_s: float
    """As long as a receiver waits without a sign of life."""
    capacity: int = MOST_WORDS
    _said: OrderedDict[RoomKey, _Said] = field(default_factory=OrderedDict)

    def keep(self, key: RoomKey, peer: Peer, message: HandoffRecord | TransferAborted) -> None:
        """`message` is the end of the room, as far as `peer` is concerned."""
        self._said.pop(key, None)
        self._said[key] = _Said(message, peer.incarnation, self.clock.now() + self.keep_s)
        if len(self._said) > self.capacity:
            self._said.popitem(last=False)

    def said(self, key: RoomKey, peer: Peer) -> HandoffRecord | TransferAborted | None:
        """The last word to `peer` in this room, if it is still known."""
        said = self._said.get(key)
        return said.message if said is not None and said.to == peer.incarnation else None

    def drop_expired(self) -> None:
        now = self.clock.now()
        # The oldest come first, and all are kept for the same time.
        while self._said and next(iter(self._said.values())).until <= now:
            self._said.popitem(last=False)

    def drop_to(self, incarnation: str) -> None:
        """The receiver is dead."""
        for key in [key for key, said in self._said.items() if said.to == incarnation]:
            del self._said[key]
