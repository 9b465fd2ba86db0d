"""Both sides of handoffs as one queue stage.

Every engine has both: the `handoff` of a request names its side, and a role only determines what the router sends to a
worker. This stage dispatches messages from peers and events of the transport.

    gateway request ─▶ accept ─┬─ RECEIVE ─▶ DecodeStage
                               └─ SEND ────▶ PrefillStage
    peer message, transport event ─▶ poll ─▶ the side that it concerns
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from tandem_engine.base.names import PageId, ReqPoolIdx, RequestId
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.base import StageHost, TransferCounters, room_key
from tandem_engine.disaggregation.decode import DecodeStage
from tandem_engine.disaggregation.grants import ClosedRooms, DrainBook, EarlyGrants, PeerClocks
from tandem_engine.disaggregation.holds import HoldTable
from tandem_engine.disaggregation.leases import ReceiverLeases, SenderLeases
from tandem_engine.disaggregation.links import Links
from tandem_engine.disaggregation.notifications import FinalMessages
from tandem_engine.disaggregation.peers import PeerEvent, PeerLink, Superseded
from tandem_engine.disaggregation.prealloc import PreallocQueue
from tandem_engine.disaggregation.prefill import PrefillStage, portions_of
from tandem_engine.disaggregation.prefix_fetch import Prefixes
from tandem_engine.disaggregation.transport import (
    Digests,
    KvTransport,
    PushDone,
    PushFailed,
    PushKey,
    TransportEvent,
)
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.messages.outputs import Finish
from tandem_engine.messages.requests import HandoffSide, Peer
from tandem_engine.messages.transfer import (
    STATES,
    DrainAck,
    GrantsRenewed,
    HandoffRecord,
    Hello,
    StillOpen,
    TransferAborted,
    WriteGrant,
)
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.stage import AwaitedPages


@dataclass(kw_only=True, slots=True)
class HandoffStage:
    """The `QueueStage` of disaggregation. Attach it to the scheduler it was built for."""

    prefill: PrefillStage
    decode: DecodeStage
    transport: KvTransport
    peers: PeerLink
    counters: TransferCounters
    sender_leases: SenderLeases
    receiver_leases: ReceiverLeases
    links: Links
    prefixes: Prefixes
    _early: list[TransportEvent] = field(default_factory=list)
    """Seen during a step, for the next `poll`."""

    @classmethod
    def build(
        cls,
        *,
        host: StageHost,
        transport: KvTransport,
        peers: PeerLink,
        config: DisaggConfig,
        page_bytes: int,
        layers: int,
        state_bytes: int = 0,
    ) -> Self:
        """Both sides around one transport, one set of peers and one set of counters."""
        counters = TransferCounters()
        prefill = PrefillStage(
            host=host,
            transport=transport,
            peers=peers,
            config=config,
            page_bytes=page_bytes,
            layers=layers,
            state_bytes=state_bytes,
            portions=portions_of(transport.hello().device),
            early=EarlyGrants(clock=host.clock),
            drains=DrainBook(),
            closed=ClosedRooms(),
            final_messages=FinalMessages(clock=host.clock, keep_s=config.grant_timeout),
            clocks=PeerClocks(),
            counters=counters,
        )
        holds = HoldTable(
            clock=host.clock,
            give_back=host.memory.give_back,
            give_back_row=host.memory.rows.free,
            drain_timeout=config.drain_timeout,
        )
        decode = DecodeStage(
            host=host,
            transport=transport,
            peers=peers,
            config=config,
            page_bytes=page_bytes,
            state_bytes=state_bytes,
            prealloc=PreallocQueue(host=host),
            holds=holds,
            counters=counters,
        )
        return cls(
            prefill=prefill,
            decode=decode,
            transport=transport,
            peers=peers,
            counters=counters,
            sender_leases=SenderLeases.of(prefill),
            receiver_leases=ReceiverLeases.of(decode),
            links=Links.build(host=host, transport=transport, peers=peers, config=config, page_bytes=page_bytes),
            prefixes=Prefixes.build(prefill),
        )

    # QueueStage

    def accept(self, req: Request) -> bool:
        if self.decode.accept(req):
            return True
        self.prefill.open_room(req)
        return False

    def fetch(self, req: Request) -> AwaitedPages | None:
        return self.prefixes.fetcher.fetch(req)

    def poll(self) -> bool:
        events = [*self.peers.receive()]
        for event in events:
            self._on_peer(event)
        outcomes, self._early = [*self._early, *self.transport.poll()], []
        for outcome in outcomes:
            self._on_transport(outcome)
        handed_over = self.prefill.tick()
        moved = self.decode.tick()
        self.sender_leases.beat()
        self.receiver_leases.beat()
        self.links.tick()
        self.prefixes.tick()
        self.transport.expect(sum(table.open_transfers() for table in self._hold_tables()))
        return bool(events or outcomes or handed_over or moved)

    def run_during_forward(self) -> bool:
        """Hand over what has been written. The request's memory is given back by the next `poll`, which also learns of
        everything else. With several ranks all of it waits for that: they look at their transports together."""
        if not self.transport.alone or not self.prefill.nearly_out:
            return False
        for outcome in self.transport.poll():
            if (
                isinstance(outcome, PushDone)
                and room_key(outcome.key.room, outcome.key.generation) in self.prefill.rooms
            ):
                self._on_transport(outcome)
            else:
                self._early.append(outcome)
        self.prefill.hand_over_complete()
        return self.prefill.nearly_out

    def chunk_launched(self, req: Request, stop: int, progress: KvProgress) -> None:
        self.prefill.chunk_launched(req, stop, progress)

    def chunk_settled(self, req: Request) -> None:
        self.prefill.chunk_settled(req)

    def prefill_settled(self, req: Request) -> bool:
        return self.prefill.prefill_settled(req)

    def aborted(self, req: Request) -> None:
        self.decode.aborted(req)
        self.prefill.aborted(req)

    def abort(self, rid: RequestId, finish: Finish) -> bool:
        return self.decode.abort(rid, finish) or self.prefill.abort(rid, finish)

    def live(self) -> Iterator[Request]:
        return chain(self.decode.live(), self.prefill.live())

    def held_pages(self) -> Iterator[PageId]:
        return chain(self.decode.holds.held_pages(), self.links.held_pages(), self.prefixes.held_pages())

    def held_rows(self) -> Iterator[ReqPoolIdx]:
        return self.decode.holds.held_rows()

    def holds_for_a_while(self) -> bool:
        return self.prefixes.holds_for_a_while()

    def forget_kv(self) -> None:
        self.prefixes.forget_kv()

    # The owner of the loop

    def peer_gone(self, incarnation: str) -> None:
        """The worker service or a successor reports that this incarnation is fenced. Idempotent."""
        self.decode.peer_gone(incarnation)
        self.prefill.peer_gone(incarnation)
        self.links.peer_gone(incarnation)
        self.prefixes.peer_gone(incarnation)
        self.transport.forget(incarnation)
        self.prefill.clocks.forget(incarnation)
        self.peers.fence(incarnation)

    def peer_ended(self, incarnation: str) -> None:
        """Its process has ended: not even a write that was under way continues. Idempotent."""
        self.peer_gone(incarnation)
        for table in self._hold_tables():
            table.ended(incarnation)

    def transferring(self) -> int:
        """Requests that wait here for KV from a peer."""
        return sum(1 for _ in self.decode.live())

    def inflight(self) -> int:
        """Requests kept here until a peer has their KV."""
        return sum(1 for _ in self.prefill.live())

    def quarantined_pages(self) -> int:
        return sum(table.quarantined_pages() for table in self._hold_tables())

    def quarantined_for(self) -> tuple[str, ...]:
        """Incarnations whose silence keeps those pages."""
        writers = chain.from_iterable(table.quarantined_for() for table in self._hold_tables())
        return tuple(dict.fromkeys(writers))

    def fenced_writers(self) -> tuple[Peer, ...]:
        """Those whose processes must have ended before their pages are used again."""
        writers = chain.from_iterable(table.fenced_writers() for table in self._hold_tables())
        return tuple({writer.incarnation: writer for writer in writers}.values())

    def _hold_tables(self) -> tuple[HoldTable, ...]:
        return (self.decode.holds, self.links.targets.holds, self.prefixes.fetcher.holds)

    def _on_peer(self, event: PeerEvent) -> None:
        if isinstance(event, GrantsRenewed):
            self.prefill.clocks.learn(
                event.sender.incarnation,
                requested_at=event.sent_at,
                answered_at=event.answered_at,
                now=self.prefill.host.clock.now(),
            )
        if self.links.on_peer(event) or self.prefixes.on_peer(event):
            return
        match event:
            case Hello():
                self.prefill.on_hello(event)
            case WriteGrant():
                self.prefill.on_grant(event)
            case HandoffRecord():
                self.decode.on_record(event)
            case DrainAck():
                self.decode.on_ack(event)
            case StillOpen(side=HandoffSide.SEND):
                self.receiver_leases.on_still_open(event)
            case StillOpen():
                self.sender_leases.on_still_open(event)
            case GrantsRenewed():
                self.sender_leases.on_renewed(event)
            case TransferAborted(side=HandoffSide.SEND):
                self.decode.on_abort(event)
            case TransferAborted():
                self.prefill.on_abort(event)
            case Superseded(incarnation):
                self.peer_gone(incarnation)

    def _on_transport(self, event: TransportEvent) -> None:
        match event:
            case PushDone():
                self._measure(event)
            case PushFailed():
                self._note_lost(event)
        if self.links.on_transport(event) or self.prefixes.on_transport(event):
            return
        match event:
            case PushDone():
                self.prefill.on_push_done(event)
            case PushFailed():
                self.prefill.on_push_failed(event)
            case Digests():
                self.decode.on_digests(event)

    def _measure(self, event: PushDone) -> None:
        peer = self._receiver_of(event.key)
        if peer is not None:
            each = self.prefill.state_bytes if event.key.group == STATES else self.prefill.page_bytes
            self.links.pushed(peer, size=event.key.count * each, seconds=event.seconds)

    def _note_lost(self, event: PushFailed) -> None:
        peer = self._receiver_of(event.key)
        if event.peer_lost and peer is not None:
            self.links.failed(peer)

    def _receiver_of(self, key: PushKey) -> str | None:
        name = room_key(key.room, key.generation)
        room, transfer = self.prefill.rooms.get(name), self.prefixes.source.transfers.get(name)
        if room is not None:
            return room.peer.incarnation
        return None if transfer is None else transfer.receiver.incarnation
