"""Leases: how long the sides of a transfer wait for each other.

Every wait for a peer is a lease, which the waiting side keeps as long as the peer renews it. Each side sends a renewal
every `renewal_period`, in one message per peer that names all rooms concerned; a lease runs out only by silence (a
dead, hung or partitioned peer).

    receiver (ReceiverLeases)                       writer (SenderLeases)

    a request that waits for memory   ◀─ StillOpen ─   rooms not granted: queued or computing
    a hold: its deadline              ◀─ StillOpen ─   rooms granted: queued, computing or pushing, and how far
             └─ then ─────────────── GrantsRenewed ─▶  the grant: until when pushes may start
    requests that wait for memory     ── StillOpen ─▶  a computed prompt that is kept for a grant
    a grant whose end is unreported   ── StillOpen ─▶  rooms that are over: the terminal message is repeated

A renewed grant never outlives its hold [grant-expiry], whatever is lost or late: the receiver first extends its
deadline by `valid_s`, and the writer counts these seconds from when it asked, which was earlier. A grant that was lost
when a connection broke is not named as granted, so it is sent again. The receiver asks for a lost handoff record or end
every `question_period`; that is no renewal and extends nothing. A room that is no longer named has no grant and no
renewal, so its hold runs out if the question is not answered.

Renewals control only waiting. Whether a page may be reused follows from commit, ack and fencing.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from tandem_engine.base.clock import Clock
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.base import RoomKey, StageHost, TransferCounters, room_key
from tandem_engine.disaggregation.decode import DecodeStage
from tandem_engine.disaggregation.grants import renewed_until
from tandem_engine.disaggregation.holds import HoldTable, TransferHold
from tandem_engine.disaggregation.outgoing_transfer import SendRoom
from tandem_engine.disaggregation.peers import PeerLink
from tandem_engine.disaggregation.prealloc import PreallocQueue
from tandem_engine.disaggregation.prefill import PrefillStage
from tandem_engine.messages.requests import HandoffSide, Peer
from tandem_engine.messages.transfer import MAX_OPEN_ROOMS, GrantsRenewed, OpenRoom, StillOpen


class Open(NamedTuple):
    """A room that this side continues, and its peer."""

    peer: Peer
    room: OpenRoom


@dataclass(kw_only=True, slots=True)
class Pulse:
    """One side's signs of life."""

    side: HandoffSide
    period: float
    clock: Clock
    peers: PeerLink
    _next: float = -math.inf

    def due(self) -> bool:
        """Whether it is time again; true once per period."""
        now = self.clock.now()
        if now < self._next:
            return False
        self._next = now + self.period
        return True

    def notify(self, rooms: Iterable[Open]) -> None:
        """Name `rooms` to their peers, one message to each unless there are very many."""
        by_peer: dict[str, tuple[Peer, list[OpenRoom]]] = {}
        for peer, room in rooms:
            by_peer.setdefault(peer.incarnation, (peer, []))[1].append(room)
        for peer, named in by_peer.values():
            for start in range(0, len(named), MAX_OPEN_ROOMS):
                self._say(peer, named[start : start + MAX_OPEN_ROOMS])

    def _say(self, peer: Peer, rooms: list[OpenRoom]) -> None:
        message = StillOpen(sender=self.peers.me, side=self.side, sent_at=self.clock.now(), rooms=tuple(rooms))
        self.peers.send(peer, message)


@dataclass(kw_only=True, slots=True)
class Standstill:
    """For how long nothing has moved, judged by a count that grows with every move."""

    clock: Clock
    _moves: int = -1
    _since: float = 0.0

    def seconds(self, moves: int, *, waiting: bool) -> float:
        """Call it regularly. A stall counts only while a request is `waiting`."""
        now = self.clock.now()
        if moves != self._moves or not waiting:
            self._moves, self._since = moves, now
        return now - self._since


@dataclass(kw_only=True, slots=True)
class SenderLeases:
    """Renewals that the writing engine sends and receives for its rooms."""

    rooms: Mapping[RoomKey, SendRoom]
    pulse: Pulse
    clock: Clock
    hold_timeout: float
    account: Callable[[RoomKey, Peer], None]
    """Of the stage: say again how a room has ended."""

    @classmethod
    def of(cls, stage: PrefillStage) -> Self:
        """For the rooms of `stage`."""
        clock, config = stage.host.clock, stage.config
        pulse = Pulse(side=HandoffSide.SEND, period=config.renewal_period, clock=clock, peers=stage.peers)
        return cls(rooms=stage.rooms, pulse=pulse, clock=clock, hold_timeout=config.hold_timeout, account=stage.account)

    def beat(self) -> None:
        """Notify receivers which rooms are queued, computing, kept or being pushed."""
        if self.pulse.due():
            self.pulse.notify(
                Open(room.peer, _open_room(room.key, granted=room.grant is not None, written=room.written))
                for room in self.rooms.values()
            )

    def on_still_open(self, message: StillOpen) -> None:
        """A receiver still waits: for memory, so keep its computed prompts; or for word of what it has granted.

        Other rooms are ignored.
        """
        keep_until = self.clock.now() + self.hold_timeout
        for named in message.rooms:
            room = self._of(message.sender, named)
            if named.granted:
                if room is None:
                    self.account(room_key(named.room, named.generation), message.sender)
            elif room is not None and room.grant is None and room.keep_until is not None:
                room.keep_until = keep_until

    def on_renewed(self, message: GrantsRenewed) -> None:
        """A receiver holds its pages for longer. Rooms that are closed by now are ignored."""
        expires = renewed_until(message, self.clock.now())
        if expires is None:
            return
        for named in message.rooms:
            room = self._of(message.sender, named)
            if room is not None and room.grant is not None:
                room.grant = room.grant.renewed(expires)

    def _of(self, sender: Peer, named: OpenRoom) -> SendRoom | None:
        """The open room of that name, if `sender` is its receiver."""
        room = self.rooms.get(room_key(named.room, named.generation))
        return room if room is not None and room.peer.incarnation == sender.incarnation else None


@dataclass(kw_only=True, slots=True)
class ReceiverLeases:
    """Renewals that the receiving engine sends and receives for its requests."""

    host: StageHost
    peers: PeerLink
    config: DisaggConfig
    prealloc: PreallocQueue
    holds: HoldTable
    counters: TransferCounters
    pulse: Pulse
    standstill: Standstill
    questions: Pulse
    unaccounted: Callable[[], Iterable[TransferHold]]
    """Of the stage: holds whose writer has not reported that it is finished."""
    grant_again: Callable[[Iterable[RoomKey], str], None]
    """Of the stage: a writer has no grant for these rooms, which may have been granted."""

    @classmethod
    def of(cls, stage: DecodeStage) -> Self:
        """For the requests and holds of `stage`."""
        clock, period = stage.host.clock, stage.config.renewal_period
        return cls(
            host=stage.host,
            peers=stage.peers,
            config=stage.config,
            prealloc=stage.prealloc,
            holds=stage.holds,
            counters=stage.counters,
            pulse=Pulse(side=HandoffSide.RECEIVE, period=period, clock=clock, peers=stage.peers),
            standstill=Standstill(clock=clock),
            questions=Pulse(
                side=HandoffSide.RECEIVE, period=stage.config.question_period, clock=clock, peers=stage.peers
            ),
            unaccounted=stage.unaccounted,
            grant_again=stage.grant_again,
        )

    def beat(self) -> None:
        """Notify writers which requests wait here for memory, unless there can be none, and ask them about grants
        that they have had for a while.

        Engines can wait in a circle: this one's memory is granted to prompts that a writer cannot compute,
        because its own is full of prompts that wait for ours. Then nothing moves here any more, and saying no
        more lets the writer give up prompts it has computed. Those it has not computed lose nothing by it.
        """
        self._ask()
        if not self.pulse.due():
            return
        waiting = len(self.prealloc) > 0
        still = self.standstill.seconds(self.host.launched + self.counters.moves, waiting=waiting)
        if waiting and still < self.config.stall_timeout:
            self.pulse.notify(Open(entry.handoff.peer, _open_room(entry.key)) for entry in self.prealloc)

    def _ask(self) -> None:
        """The end of a room may have been lost with a connection; its writer would never name it again."""
        if self.questions.due():
            old = self.host.clock.now() - self.questions.period
            holds = (hold for hold in self.unaccounted() if hold.granted_at <= old)
            self.questions.notify(Open(hold.writer, _open_room(hold.key, granted=True)) for hold in holds)

    def on_still_open(self, message: StillOpen) -> None:
        """A writer continues these rooms: wait for it, and renew its grants, or repeat them if it has none.

        Other rooms are ignored.
        """
        writer, lease = message.sender.incarnation, self.config.grant_timeout
        rooms = {room_key(named.room, named.generation): named for named in message.rooms}
        self.prealloc.renew(rooms.keys(), writer=writer, deadline=self.host.clock.now() + lease)
        renewed = tuple(
            named
            for key, named in rooms.items()
            if named.granted and self.holds.renew(key, writer=writer, valid_s=lease)
        )
        self.counters.moves += sum(self.holds.wrote(key, writer=writer, pages=rooms[key].written) for key in rooms)
        self.grant_again((key for key, named in rooms.items() if not named.granted), writer)
        if renewed:
            answer = GrantsRenewed(
                sender=self.peers.me,
                sent_at=message.sent_at,
                answered_at=self.host.clock.now(),
                valid_s=lease,
                rooms=renewed,
            )
            self.peers.send(message.sender, answer)


def _open_room(key: RoomKey, *, granted: bool = False, written: int = 0) -> OpenRoom:
    return OpenRoom(room=key.room, generation=key.generation, granted=granted, written=written)
