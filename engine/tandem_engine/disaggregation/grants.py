"""Write grants as the writing engine holds them: when pushes may start, and which acks it owes.

`EarlyGrants` and `Grant`
    1. early      it came before the gateway's request; kept while it may be valid, within a bound
    2. attached   to its room; pushes may start until it expires. The receiver renews it while both continue (`leases`)
    3. expired    no push may start any more [grant-expiry]

A grant expires `valid_s` after it was sent. Without an estimate of the receiver's clock it may have expired unread: it
is doubtful, and no push starts before the receiver renews it.

`PeerClocks` dates messages by the sender's monotonic clock. A message may be unread for as long as its reader is
stopped or a connection stalls, and a duration in it ("valid for 8 s") counts from when it was sent. Otherwise an engine
that was frozen for 30 s would accept a grant whose pages already belong to another request [late-write] [one-clock].
    1. unknown   no message of the peer can be dated; the reply to a question sets the estimate
    2. known     we asked at `a`, and it replied when its clock was `b`: what it sends at `b + t` was sent no earlier
                 than `a + t` here, less the drift of two clocks
    3. renewed   by every later reply that gives a tighter bound; forgotten when the peer is fenced

`DrainBook` has what is owed to peers
    1. started    a push into a peer's pages is outstanding, keyed by (room, generation, peer)
    2. asked      the peer aborted and requests an ack that its pages are safe
    3. settled    nothing is outstanding, and a closed room starts nothing new: ack

An ack is owed for every room that a peer asks about, known or not: if the room ended long ago, the reply is immediate
[ack-per-grant].
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msgspec import UNSET

from tandem_engine.base.clock import Clock
from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.base import RoomKey, room_key
from tandem_engine.disaggregation.peers import PeerLink
from tandem_engine.disaggregation.transport import PushKey
from tandem_engine.messages.requests import HandoffSide, Peer
from tandem_engine.messages.transfer import STATES, GrantsRenewed, GroupGrant, OpenRoom, StillOpen, WriteGrant

DRIFT = 2e-4
"""Seconds per second that two clocks may differ by: twice what quartz does, each way."""


class _Exchange(NamedTuple):
    requested_at: float
    """By our clock."""
    answered_at: float
    """By the peer's."""


@dataclass(slots=True)
class PeerClocks:
    """Of one engine's peers, by incarnation."""

    _exchanges: dict[str, _Exchange] = field(default_factory=dict)

    def learn(self, incarnation: str, *, requested_at: float, answered_at: float, now: float) -> None:
        """Its reply, sent at `answered_at` by its clock, to our question of `requested_at`. Ignores invalid times."""
        sensible = requested_at <= now and math.isfinite(requested_at) and math.isfinite(answered_at)
        if sensible and requested_at > self.earliest(incarnation, answered_at):
            self._exchanges[incarnation] = _Exchange(requested_at, answered_at)

    def earliest(self, incarnation: str, theirs: float) -> float:
        """Our time at or before which its clock was `theirs`; -inf without an estimate."""
        exchange = self._exchanges.get(incarnation)
        if exchange is None or not math.isfinite(theirs):
            return -math.inf
        since = theirs - exchange.answered_at
        return exchange.requested_at + since - abs(since) * DRIFT

    def forget(self, incarnation: str) -> None:
        """The peer is gone."""
        self._exchanges.pop(incarnation, None)


EARLY_GRANTS = 1024
"""Grants kept for rooms that are not known yet; beyond, the oldest is dropped and its room times out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Pages of a peer that this engine may write to until `expires`."""

    key: RoomKey
    receiver: Peer
    first_token: int
    pages: tuple[PageId, ...]
    expires: float
    """Monotonic time here: the receiver's stamps mean nothing by themselves [one-clock]. -inf: doubtful."""
    answer_by: float
    """Until when a doubtful one waits for the answer."""
    digest: DigestKind
    adapter: bytes = b""
    """Digest of the adapter that the pages are for, b"" for the base model."""
    groups: tuple[GroupGrant, ...] = ()
    """For what the sequence leaves in further groups of layers."""

    @staticmethod
    def received(message: WriteGrant, clock: Clock, clocks: PeerClocks) -> "Grant":
        now = clock.now()
        sent_at = min(now, clocks.earliest(message.sender.incarnation, message.granted_at))
        return Grant(
            key=room_key(message.room, message.generation),
            receiver=message.sender,
            first_token=message.first_token,
            pages=tuple(PageId(page) for page in message.pages),
            expires=sent_at + message.valid_s,
            answer_by=now + message.valid_s,
            digest=message.digest,
            adapter=message.adapter,
            groups=() if message.groups is UNSET else message.groups,
        )

    @property
    def state(self) -> PageId | None:
        """The peer's slot for the state after the last token; None where there is none."""
        return PageId(self.groups[0].slots[0]) if self.groups else None

    @property
    def ends(self) -> float:
        """After this nothing can come of it."""
        return max(self.expires, self.answer_by)

    def doubtful(self, now: float) -> bool:
        """Whether no push may start now, though the receiver may say that it is good for longer."""
        return self.expires <= now < self.answer_by

    def confirm_if_doubtful(self, peers: PeerLink, now: float) -> None:
        """Ask the receiver whether it still holds these pages. The answer is `GrantsRenewed`."""
        if not self.doubtful(now):
            return
        room = OpenRoom(room=self.key.room, generation=self.key.generation, granted=True, written=0)
        question = StillOpen(sender=peers.me, side=HandoffSide.SEND, sent_at=now, rooms=(room,))
        peers.send(self.receiver, question)

    def renewed(self, expires: float) -> "Grant":
        """The same, good until `expires` if that is later."""
        return replace(self, expires=max(self.expires, expires))

    def problem(self, *, tokens: int, page_size: int, peer: str, adapter: bytes, stateful: bool = False) -> str | None:
        """Why this grant cannot serve `tokens` tokens, computed by `adapter`, that go to `peer`; None if it can.

        `stateful`: and the state after them.
        """
        foreign = self._foreign(peer, adapter)
        if foreign is None and [group.group for group in self.groups] != ([STATES] if stateful else []):
            foreign = f"grant for groups {[group.group for group in self.groups]} next to pages"
        if foreign is not None:
            return foreign
        if not 0 <= self.first_token < tokens or self.first_token % page_size:
            return f"grant from token {self.first_token} of {tokens}, pages have {page_size} tokens"
        wanted = -(-(tokens - self.first_token) // page_size)
        if not math.isfinite(self.answer_by):
            return "grant without an end"
        if len(self.pages) != wanted:
            return f"grant of {len(self.pages)} pages where the prompt needs {wanted}"
        if len(set(self.pages)) != len(self.pages):
            return "grant names a page twice"
        return None

    def _foreign(self, peer: str, adapter: bytes) -> str | None:
        """Why it is of another transfer."""
        if self.receiver.incarnation != peer:
            return f"grant by {self.receiver.incarnation} in a room with {peer}"
        if self.adapter != adapter:
            return f"grant for KV of {_named(self.adapter)}, here {_named(adapter)} computes it"
        return None


def _named(adapter: bytes) -> str:
    return f"adapter {adapter.hex()}" if adapter else "the base model"


def renewed_until(message: GrantsRenewed, now: float) -> float | None:
    """Until when pushes may start by this reply, counted from the question; None where it names no end."""
    expires = min(message.sent_at, now) + message.valid_s
    return expires if math.isfinite(expires) else None


@dataclass(kw_only=True, slots=True)
class EarlyGrants:
    """Grants for rooms whose request has not come yet: two sockets, no order between them."""

    clock: Clock
    capacity: int = EARLY_GRANTS
    _grants: OrderedDict[RoomKey, Grant] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._grants)

    def keep(self, grant: Grant) -> None:
        self._grants[grant.key] = grant
        if len(self._grants) > self.capacity:
            self._grants.popitem(last=False)

    def take(self, key: RoomKey) -> Grant | None:
        """The grant of a room, if one is here and still valid."""
        grant = self._grants.pop(key, None)
        return grant if grant is not None and self.clock.now() < grant.ends else None

    def drop_expired(self) -> None:
        now = self.clock.now()
        for key in [key for key, grant in self._grants.items() if now >= grant.ends]:
            del self._grants[key]

    def drop_from(self, incarnation: str) -> None:
        """The receiver is dead."""
        for key in [key for key, grant in self._grants.items() if grant.receiver.incarnation == incarnation]:
            del self._grants[key]


CLOSED_ROOMS = 8192
"""Closed rooms remembered. A grant is valid for seconds, so this many rooms outlive any late one."""


class Target(NamedTuple):
    """One peer's pages in one attempt."""

    key: RoomKey
    peer: str


class AckDue(NamedTuple):
    """`peer` may be notified that nothing more will be written for `key`."""

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
        """`peer` requests an ack. Returns it when it is due at once."""
        target = Target(key, peer.incarnation)
        self._asked[target] = peer
        return self._due(target)

    def drop(self, incarnation: str) -> None:
        """The peer is dead: no acks are owed to it. Its pushes still end one by one."""
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
