"""Write grants as the writing engine holds them.

Life of a grant
    1. early      it came before the gateway's request did; kept for as long as it may be valid, within a bound
    2. attached   to the room it belongs to; pushes may start until it expires, which the receiver puts off
                  for as long as both go on (`leases`)
    3. expired    no push may start any more [grant-expiry]

It expires `valid_s` after it was sent. While nothing is known of the receiver's clock it may have expired already,
having lain unread: it is doubtful, and no push starts before the receiver has confirmed it. A renewal does that.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from tandem_engine.clock import Clock
from tandem_engine.disaggregation.peer_clocks import PeerClocks
from tandem_engine.disaggregation.peers import PeerLink
from tandem_engine.disaggregation.room_key import RoomKey, room_key
from tandem_engine.messages.requests import HandoffSide, Peer
from tandem_engine.messages.transfer import GrantsRenewed, OpenRoom, StillOpen, WriteGrant
from tandem_engine.names import DigestKind, PageId

EARLY_GRANTS = 1024
"""Grants kept for rooms that are not known yet; beyond, the oldest goes and its room waits in vain."""


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
        )

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
        question = StillOpen(sender=peers.me, side=HandoffSide.SEND, said_at=now, rooms=(room,))
        peers.send(self.receiver, question)

    def renewed(self, expires: float) -> "Grant":
        """The same, good until `expires` if that is later."""
        return replace(self, expires=max(self.expires, expires))

    def problem(self, *, tokens: int, page_size: int, peer: str) -> str | None:
        """Why this grant cannot serve a sequence of `tokens` tokens that goes to `peer`; None if it can."""
        if self.receiver.incarnation != peer:
            return f"grant by {self.receiver.incarnation} in a room with {peer}"
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


def renewed_until(message: GrantsRenewed, now: float) -> float | None:
    """Until when pushes may start by this answer, counted from when it was asked for; None where it names no end."""
    expires = min(message.said_at, now) + message.valid_s
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
