"""The sending side of a handoff: a prompt computed here continues on a peer.

States of a request with `handoff.side` SEND

    accept ─▶ 1. computing ───────▶ 2. inflight ─────▶ 3. handed over
              (scheduler's queues)  (kept here)
                   │                     │
                   └─────────────────────┴───────────▶ given up, the peer is notified [abort-both-ways]

    1. computing    like any other request. Each chunk is pushed into the granted pages while it is computed, a few
                    layers at a time, or once its step has completed (`outgoing_transfer`); for a late grant, everything
                    completed so far is ready
    2. inflight     the prompt is computed and its first token streamed; the request keeps row and pages until the last
                    push is done: `hold_timeout` for the grant to come, then for as long as the grant is valid. The
                    receiver renews both while it continues (`leases`)
    3. handed over  the handoff record is out, the memory released

The client has its first token whatever becomes of the transfer, so a failure here does not end its request: the peer is
notified and fails its request as retryable, and the gateway sends prompt and tokens to another worker.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeGuard

from tandem_engine.base.names import RequestId
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.base import RoomKey, StageHost, TransferCounters, room_key
from tandem_engine.disaggregation.grants import AckDue, ClosedRooms, DrainBook, EarlyGrants, Grant, PeerClocks
from tandem_engine.disaggregation.notifications import FinalMessages, notify_ended, record_of
from tandem_engine.disaggregation.outgoing_transfer import SendRoom
from tandem_engine.disaggregation.peers import PeerLink
from tandem_engine.disaggregation.transport import MIN_RATE, KvTransport, Push, PushDone, PushFailed
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.messages.outputs import Finish, TransferReport
from tandem_engine.messages.requests import Handoff, HandoffSide, Peer
from tandem_engine.messages.transfer import STATES, DrainAck, Hello, TransferAborted, WriteGrant
from tandem_engine.scheduler.request import Request

logger = logging.getLogger(__name__)


class Portions(NamedTuple):
    """In how many pieces KV leaves: each costs the interpreter something, whatever its size."""

    push_bytes: int
    """Largest push: long enough that what a push costs beside its bytes is lost in it, and short enough that an abort
    soon finds nothing outstanding."""
    write_bytes: int
    """Smallest write beside a computation. Below, what it takes of the interpreter delays the first token by more than
    is left of the transfer after it (`benchmarks/exposed_transfer.py`)."""

    def pages(self, page_bytes: int) -> int:
        """Of the largest push."""
        return max(1, self.push_bytes // page_bytes)

    def layers(self, pushed_bytes: int, layers: int) -> int:
        """How many of the `layers` of so many bytes are worth a write of their own."""
        return -(-self.write_bytes * layers // pushed_bytes)


IN_MAIN_MEMORY = Portions(push_bytes=64 << 20, write_bytes=2 << 20)
"""A push is over after 6 ms at the speed of memory and after 54 ms at that of 10 Gbit/s."""

ON_DEVICE = Portions(push_bytes=256 << 20, write_bytes=32 << 20)
"""A device copies 64 MiB in 0.1 ms, less than a push costs the host. A push is over after 0.2 s at 10 Gbit/s."""


def portions_of(device: str) -> Portions:
    """For a pool on DRAM or VRAM, NIXL's names."""
    return ON_DEVICE if device == "VRAM" else IN_MAIN_MEMORY


@dataclass(kw_only=True, slots=True)
class PrefillStage:
    """Requests whose KV goes to a peer. Scheduler thread only."""

    host: StageHost
    transport: KvTransport
    peers: PeerLink
    config: DisaggConfig
    page_bytes: int
    layers: int
    """Of a page."""
    state_bytes: int
    """Of a sequence; 0 where no layer keeps a state."""
    portions: Portions
    early: EarlyGrants
    drains: DrainBook
    closed: ClosedRooms
    final_messages: FinalMessages
    clocks: PeerClocks
    counters: TransferCounters
    _rooms: dict[RoomKey, SendRoom] = field(default_factory=dict)
    """Open rooms: computing and inflight."""
    _kept: dict[RequestId, Request] = field(default_factory=dict)
    """Requests in stage 2, including those whose room was closed since."""

    # Called by the scheduler, through `HandoffStage`.

    def open_room(self, req: Request) -> None:
        """`req` is about to wait for its computation; if it is to be sent, note where."""
        handoff = _sends(req)
        if handoff is None:
            return
        key = room_key(handoff.room, handoff.generation)
        if key in self.closed or key in self._rooms:
            return
        room = SendRoom(key=key, req=req, peer=handoff.peer, total=req.seq_len)
        self._rooms[key] = room
        grant = self.early.take(key)
        if grant is not None:
            self._attach(room, grant)

    def chunk_launched(self, req: Request, stop: int, progress: KvProgress) -> None:
        """A step is about to compute the prompt up to token `stop`: push along with it."""
        room = self._room_of(req)
        if room is None:
            return
        room.progress = progress
        if self.config.kv_push_layers != 0 and self._may_push(room) and self.host.memory.readable(req.held_kv):
            while self._pays(push := room.early_push(stop, progress, self.max_pages)):
                self._start(room, replace(push, least_layers=self._least_layers(push)))

    def chunk_settled(self, req: Request) -> None:
        """More of the prompt is settled: push it."""
        room = self._room_of(req)
        if room is not None:
            room.moved_at = self.host.clock.now()
            self._push(room)

    def prefill_settled(self, req: Request) -> bool:
        """Keep `req` until its KV is out, unless its first token was its last."""
        if _sends(req) is None:
            return False
        room = self._room_of(req)
        if req.finished is not None:
            if room is not None:
                self._close(room, "the output ended with its first token", finished=True)
            return False
        self._kept[req.rid] = req
        if room is not None:
            room.keep_until = self.host.clock.now() + self.config.hold_timeout
            self._push(room)
        return True

    def tick(self) -> bool:
        """Let time pass: hand over what is complete, give up what is overdue. True if anything moved."""
        self.early.drop_expired()
        self.final_messages.drop_expired()
        now = self.host.clock.now()
        self.hand_over_complete()
        for room in [*self._rooms.values()]:
            if (overdue := self._overdue(room, now)) is not None:
                self._fail(room, overdue)
            else:
                self._push(room)
        return self._release_closed()

    @property
    def nearly_out(self) -> bool:
        """Whether a prompt that is computed only waits for pushes that are under way."""
        return any(room.keep_until is not None and room.outstanding for room in self._rooms.values())

    def hand_over_complete(self) -> None:
        """Send the records of rooms that are complete. Touches no queue and no memory."""
        for room in [*self._rooms.values()]:
            if room.complete and room.keep_until is not None:
                self._hand_over(room)

    def abort(self, rid: RequestId, finish: Finish) -> bool:
        """End a request that is kept here with `finish`. False when it is not."""
        req = self._kept.pop(rid, None)
        if req is None:
            return False
        self.host.finish(req, finish)
        return True

    def aborted(self, req: Request) -> None:
        """`req` ended somewhere in the scheduler, perhaps at admission: the peer must know [abort-both-ways]."""
        handoff = _sends(req)
        if handoff is None:
            return
        key = room_key(handoff.room, handoff.generation)
        room = self._rooms.get(key)
        if room is not None and room.req is req:
            self._close(room, "the prefill worker's request ended")
        elif room is None and key not in self.closed:
            self.closed.add(key)
            self._end(handoff.peer, key, "the prefill worker refused the request")

    @property
    def rooms(self) -> Mapping[RoomKey, SendRoom]:
        """Open rooms, as they are at any time."""
        return self._rooms

    def live(self) -> Iterator[Request]:
        """Requests kept here."""
        yield from self._kept.values()

    # What peers and the transport report.

    def on_hello(self, hello: Hello) -> None:
        """A peer sends the location of its pool."""
        self.transport.connect(hello)

    def on_grant(self, message: WriteGrant) -> None:
        """A peer allows writes. Grants for rooms that the gateway has not sent yet are kept for a while."""
        grant = Grant.received(message, self.host.clock, self.clocks)
        room = self._rooms.get(grant.key)
        if grant.key in self.closed:
            self._notify(grant.receiver, grant.key, "the room is closed")
        elif room is None:
            self.early.keep(grant)
        elif room.grant is None:
            self._attach(room, grant)
        else:
            self.counters.ignored += 1

    def on_push_done(self, event: PushDone) -> None:
        """Bytes are out."""
        self._send_ack(self.drains.ended(event.key))
        room = self._rooms.get(room_key(event.key.room, event.key.generation))
        if room is None:
            return
        room.moved_at = self.host.clock.now()
        if not room.done(event.key, event.digests):
            self._fail(room, "pages were freed while they were being sent")

    def on_push_failed(self, event: PushFailed) -> None:
        """A push will write no more. With a lost peer, every push to it reports so."""
        self._send_ack(self.drains.ended(event.key))
        room = self._rooms.get(room_key(event.key.room, event.key.generation))
        if room is not None and (event.peer_lost or not room.failed(event.key)):
            self._fail(room, event.reason)

    def account(self, key: RoomKey, peer: Peer) -> None:
        """A receiver lacks word of a room that it has granted: say again how it ended, if it has."""
        sent = self.final_messages.sent_to(key, peer)
        if sent is not None:
            self.peers.send(peer, sent)
        elif key in self.closed:
            self._notify(peer, key, "the room is closed")

    def on_abort(self, message: TransferAborted) -> None:
        """The receiver is done with the room: push no more, and ack once nothing is outstanding."""
        key = room_key(message.room, message.generation)
        room = self._rooms.get(key)
        if room is None or room.peer.incarnation == message.sender.incarnation:
            self.early.take(key)
            self.closed.add(key)
            self._rooms.pop(key, None)
        self._send_ack(self.drains.ask(key, message.sender))

    def peer_gone(self, incarnation: str) -> None:
        """The peer is fenced: it will not read what is sent to it [dead-peer-released]."""
        for room in [room for room in self._rooms.values() if room.peer.incarnation == incarnation]:
            self._fail(room, f"decode worker {incarnation} is gone")
        self.early.drop_from(incarnation)
        self.final_messages.drop_to(incarnation)
        self.drains.drop(incarnation)

    # Pushing.

    def _attach(self, room: SendRoom, grant: Grant) -> None:
        problem = grant.problem(
            tokens=room.total,
            page_size=self.host.memory.page_size,
            peer=room.peer.incarnation,
            adapter=room.req.space.adapter,
            stateful=self.host.memory.stateful,
        )
        if problem is not None:
            self._fail(room, problem)
            return
        room.grant = grant
        grant.confirm_if_doubtful(self.peers, self.host.clock.now())
        self._push(room)

    def _may_push(self, room: SendRoom) -> bool:
        return room.grant is not None and self.host.clock.now() < room.grant.expires

    def _push(self, room: SendRoom) -> None:
        if not self._may_push(room):
            return
        if room.req.kv is not None and not self.host.memory.readable(room.req.kv):
            return  # a prefix is still on its way from host memory [settled-only-sent]; the next iteration checks again
        while (push := room.next_push(self.max_pages)) is not None:
            self._start(room, push)
        if (push := room.state_push()) is not None:
            self._start(room, push)

    def _start(self, room: SendRoom, push: Push) -> None:
        room.started(push)
        room.moved_at = self.host.clock.now()
        room.began_at = room.moved_at if room.began_at is None else room.began_at
        self.drains.started(push.key, push.peer)
        self.transport.push(push)

    @property
    def max_pages(self) -> int:
        """Of one push."""
        return self.portions.pages(self.page_bytes)

    def _pays(self, push: Push | None) -> TypeGuard[Push]:
        """Whether `push` shall go with its step. What is left to itself goes in one shot when that has settled."""
        if push is None:
            return False
        return self.config.kv_push_layers is not None or push.key.count * self.page_bytes >= self.portions.write_bytes

    def _least_layers(self, push: Push) -> int:
        """How many layers of its pages are worth a write of their own."""
        return self.config.kv_push_layers or self.portions.layers(push.key.count * self.page_bytes, self.layers)

    def _hand_over(self, room: SendRoom) -> None:
        grant = room.grant
        assert grant is not None, f"room {room.key} is complete without a grant"
        exposed = room.exposed(self.host.clock.now())
        record = record_of(
            room,
            grant,
            sender=self.peers.me,
            ranks=self.transport.hello().num_ranks,
            packed=self.transport.packs(room.peer.incarnation),
            exposed_s=exposed,
        )
        if self.peers.send(room.peer, record):
            self.counters.moved += _moves(room)
            self.counters.handed_over += 1
            self.counters.exposed_s += exposed
            self._note_sent(room, grant, exposed)
            self._forget(room)
            self.final_messages.keep(room.key, room.peer, record)
        else:
            self._fail(room, "the decode worker does not take messages")

    def _note_sent(self, room: SendRoom, grant: Grant, exposed: float) -> None:
        now, pages = self.host.clock.now(), len(grant.pages)
        room.req.transferred_at = now
        room.req.transfer = TransferReport(
            pages=pages,
            bytes=pages * self.page_bytes + self.state_bytes,
            pages_reused=grant.first_token // self.host.memory.page_size,
            wait_s=0.0 if room.began_at is None else now - room.began_at,
            exposed_s=exposed,
        )

    # Every way to end.

    def _overdue(self, room: SendRoom, now: float) -> str | None:
        if room.grant is not None and now >= room.grant.ends:
            return "the grant expired"
        if room.grant is None and room.keep_until is not None and now >= room.keep_until:
            return "no grant came"
        if room.outstanding and now >= room.moved_at + self._timeout_of(room):
            return "pages that are being sent do not get through"
        return None

    def _timeout_of(self, room: SendRoom) -> float:
        """Seconds in which one of the pushes under way ends, on a link that is slow or shared."""
        sizes = (key.count * (self.state_bytes if key.group == STATES else self.page_bytes) for key in room.outstanding)
        return self.config.grant_timeout + max(sizes) / MIN_RATE

    def _fail(self, room: SendRoom, reason: str) -> None:
        self.counters.failed += 1
        self.counters.moves_failed += _moves(room)
        about = {"fields": room.req.about}
        logger.warning("room %r: handoff to %s failed: %s", str(room.key), room.peer.incarnation, reason, extra=about)
        self._close(room, reason)

    def _close(self, room: SendRoom, reason: str, *, finished: bool = False) -> None:
        self._forget(room)
        self._end(room.peer, room.key, reason, finished=finished)

    def _forget(self, room: SendRoom) -> None:
        del self._rooms[room.key]
        self.closed.add(room.key)

    def _release_closed(self) -> bool:
        """Release kept requests whose room is closed, handed over or not."""
        leaving = [req for req in self._kept.values() if self._room_of(req) is None]
        for req in leaving:
            del self._kept[req.rid]
            self.host.release(req)
        return bool(leaving)

    def _send_ack(self, due: AckDue | None) -> None:
        if due is not None:
            key, peer = due
            self.peers.send(peer, DrainAck(room=key.room, generation=key.generation, sender=self.peers.me))

    def _end(self, peer: Peer, key: RoomKey, reason: str, *, finished: bool = False) -> None:
        """Send to `peer`, and keep the message for repetition."""
        self.final_messages.keep(key, peer, self._notify(peer, key, reason, finished=finished))

    def _notify(self, peer: Peer, key: RoomKey, reason: str, *, finished: bool = False) -> TransferAborted:
        return notify_ended(self.peers, peer, key, side=HandoffSide.SEND, reason=reason, finished=finished)

    def _room_of(self, req: Request) -> SendRoom | None:
        handoff = _sends(req)
        room = None if handoff is None else self._rooms.get(room_key(handoff.room, handoff.generation))
        return room if room is not None and room.req is req else None


def _moves(room: SendRoom) -> bool:
    """Whether its request was decoding here before."""
    handoff = room.req.handoff
    return handoff is not None and handoff.moving


def _sends(req: Request) -> Handoff | None:
    handoff = req.handoff
    return handoff if handoff is not None and handoff.side is HandoffSide.SEND else None
