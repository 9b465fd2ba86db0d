"""What the writing engine owes to peers whose pages it was granted.

Life of the debt
    1. started    a push into a peer's pages is outstanding, keyed by (room, generation, peer)
    2. asked      the peer aborted: it wants to know when its pages are safe
    3. settled    nothing is outstanding there any more, and a closed room starts nothing new: ack

An ack is owed for every room a peer asks about, known or not: the room may have ended here long before
the question came, and then the answer is immediate [ack-per-grant].
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.disaggregation.room_key import RoomKey, room_key
from tandem_engine.disaggregation.transport import PushKey
from tandem_engine.messages.requests import Peer

CLOSED_ROOMS = 8192
"""Closed rooms remembered. A grant is valid for seconds, so this many rooms outlive any late one."""


class Target(NamedTuple):
    """One peer's pages in one attempt."""

    key: RoomKey
    peer: str


class AckDue(NamedTuple):
    """`peer` may be told that nothing more will be written for `key`."""

    key: RoomKey
    peer: Peer


@dataclass(kw_only=True, slots=True)
class DrainBook:
    """Outstanding pushes and acks owed."""

    _outstanding: dict[PushKey, str] = field(default_factory=dict)
    """Incarnation that each push writes to."""
    _asked: dict[Target, Peer] = field(default_factory=dict)

    def started(self, key: PushKey, peer: str) -> None:
        assert key not in self._outstanding, f"pages {key.first}+{key.count} of room {key.room} pushed twice"
        self._outstanding[key] = peer

    def ended(self, key: PushKey) -> AckDue | None:
        """The push is done or failed. Returns the ack that has become due, if any."""
        target = Target(room_key(key.room, key.generation), self._outstanding.pop(key))
        return self._due(target)

    def ask(self, key: RoomKey, peer: Peer) -> AckDue | None:
        """`peer` wants an ack. Returns it when it is due at once."""
        target = Target(key, peer.incarnation)
        self._asked[target] = peer
        return self._due(target)

    def drop(self, incarnation: str) -> None:
        """The peer is dead: nobody is waiting for its acks. Its pushes still end one by one."""
        for target in [target for target in self._asked if target.peer == incarnation]:
            del self._asked[target]

    def _due(self, target: Target) -> AckDue | None:
        if target not in self._asked or self._busy(target):
            return None
        return AckDue(target.key, self._asked.pop(target))

    def _busy(self, target: Target) -> bool:
        return any(
            peer == target.peer and room_key(key.room, key.generation) == target.key
            for key, peer in self._outstanding.items()
        )


@dataclass(kw_only=True, slots=True)
class ClosedRooms:
    """Rooms in which this engine starts no push any more, the most recent `capacity` of them."""

    capacity: int = CLOSED_ROOMS
    _rooms: OrderedDict[RoomKey, None] = field(default_factory=OrderedDict)

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._rooms

    def add(self, key: RoomKey) -> None:
        self._rooms[key] = None
        if len(self._rooms) > self.capacity:
            self._rooms.popitem(last=False)
