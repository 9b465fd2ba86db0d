"""The receiving side of a handoff: a prompt computed elsewhere continues here from its first token.

States of a request with `handoff.side` RECEIVE

    accept ─▶ 1. waiting ─▶ 2. receiving ─▶ 3. verifying ─▶ 4. admitted (PREBUILT) ─▶ running
                  │              │               │
                  └──────────────┴───────────────┴──▶ failed, retryable; or aborted

    1. waiting     no KV yet. In order of arrival each gets a row, the cached prefix and private pages for
                   the rest, as soon as running requests can spare them (`StageSide.spare_pages`)
    2. receiving   the writer has a grant for the private pages, and writes to them until its handoff record
                   reports that all is written; writes may repeat, in any order [record-after-writes] [writes-repeat]
    3. verifying   all pages are here; the transport digests them. Until the digests match, no page is
                   committed, so none reaches attention or the prefix cache [verified-pages]
    4. admitted    KV committed and cached; the first token is in `output_ids` and is streamed again from
                   here, so the client has it even if the prefill worker dies. Gateways drop duplicates

No wait is unbounded: 1 and 2 end when the writer was silent for `grant_timeout` (`leases`), 3 the same time after its
handoff record, and all with the request's own deadline. A request that ends early leaves its pages to its hold
(`holds`) and notifies the writer [abort-both-ways].

Where layers keep states, the row of the request is granted with its pages: the writer puts the state after all tokens
there, and the first decode continues from it.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import UNSET

from tandem_engine.base.names import RequestId
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.base import RoomKey, StageHost, TransferCounters, room_key
from tandem_engine.disaggregation.holds import HoldTable, TransferHold
from tandem_engine.disaggregation.notifications import (
    HANDOFF,
    ask_for_ack,
    digests_of,
    notify_ended,
    problem_with,
    transfer_failed,
)
from tandem_engine.disaggregation.peers import PeerLink, obstacle
from tandem_engine.disaggregation.prealloc import PreallocQueue, Waiting
from tandem_engine.disaggregation.transport import DigestOrder, Digests, KvTransport
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.outputs import Finish, FinishReason, TransferReport
from tandem_engine.messages.requests import Handoff, HandoffSide, Peer
from tandem_engine.messages.transfer import STATES, DrainAck, GroupGrant, HandoffRecord, TransferAborted, WriteGrant
from tandem_engine.scheduler.request import Request, end_by_grammar

logger = logging.getLogger(__name__)

MAX_REPEATS = 2
"""Of one grant. A connection that broke is there again by then."""


@dataclass(kw_only=True, slots=True)
class Receiving:
    """A request whose KV is on its way into the pages of `hold`."""

    req: Request
    kv: RequestKv
    hold: TransferHold
    tokens: tuple[int, ...]
    first_token: int
    """Where the granted pages start; before it the prefix was cached here."""
    record: HandoffRecord | None = None
    """Set when everything is here and being verified."""
    repeats: int = 0
    """How often its grant was sent again."""


@dataclass(kw_only=True, slots=True)
class DecodeStage:
    """Requests that wait for KV from a peer. Scheduler thread only."""

    host: StageHost
    transport: KvTransport
    peers: PeerLink
    config: DisaggConfig
    page_bytes: int
    state_bytes: int
    """Of a sequence; 0 where no layer keeps a state."""
    holds: HoldTable
    counters: TransferCounters
    prealloc: PreallocQueue
    _receiving: dict[RoomKey, Receiving] = field(default_factory=dict)
    _greeted: set[str] = field(default_factory=set)
    """Incarnations that were sent our `Hello`."""

    # Called by the scheduler, through `HandoffStage`.

    def accept(self, req: Request) -> bool:
        """Keep `req` if it is to be received here."""
        handoff = _receives(req)
        if handoff is None:
            return False
        waiting = Waiting(
            req=req,
            handoff=handoff,
            tokens=tuple(req.fill_ids),
            deadline=self.host.clock.now() + self.config.grant_timeout,
        )
        problem = self._problem_with(waiting)
        if problem is None:
            self.prealloc.join(waiting)
        else:
            self._end(req, transfer_failed(problem))
        return True

    def tick(self) -> bool:
        """Let time pass: give up what is overdue, grant what has room. True if anything moved."""
        expired = self._expire_waiting()
        granted = self._grant_in_order()
        overdue = self._expire_holds()
        return expired or granted or overdue

    def abort(self, rid: RequestId, finish: Finish) -> bool:
        """End a request that is kept here with `finish`. False when it is not."""
        waiting = self.prealloc.of_request(rid)
        if waiting is not None:
            self._give_up_waiting(waiting, finish)
            return True
        receiving = next((entry for entry in self._receiving.values() if entry.req.rid == rid), None)
        if receiving is not None:
            self._give_up(receiving, finish, finish.error or "aborted")
            return True
        return False

    def aborted(self, req: Request) -> None:
        """`req` ended somewhere in the scheduler: unless its transfer is over, the writer must know
        [abort-both-ways]."""
        handoff = _receives(req)
        if handoff is None or req.transfer is not None:
            return
        key = room_key(handoff.room, handoff.generation)
        if key not in self.holds and self.prealloc.in_room(key) is None:
            self._notify(handoff.peer, key, "the receiver's request ended")

    def live(self) -> Iterator[Request]:
        """Requests kept here."""
        yield from (waiting.req for waiting in self.prealloc)
        yield from (receiving.req for receiving in self._receiving.values())

    # What peers and the transport report.

    def grant_again(self, rooms: Iterable[RoomKey], writer: str) -> None:
        """Repeat the grants of `rooms` for `writer`, which has none: they were lost, unless they are on their way.

        A writer that gets one twice ignores the second. One that gets none loses the room when the hold runs out.
        """
        old = self.host.clock.now() - self.config.renewal_period / 2
        for key in rooms:
            receiving = self._receiving.get(key)
            if receiving is None or receiving.hold.granted_at > old or receiving.repeats >= MAX_REPEATS:
                continue
            # The hold lasts for longer before the writer may write for longer [grant-expiry].
            if self.holds.renew(key, writer=writer, valid_s=self.config.grant_timeout):
                receiving.repeats += 1
                # The greeting that went before the grant may be lost as well.
                self._greeted.discard(writer)
                self._send_grant(receiving)

    def unaccounted(self) -> Iterator[TransferHold]:
        """Holds whose writer has not reported that all is written, or that nothing more will be."""
        return (receiving.hold for receiving in self._receiving.values() if receiving.record is None)

    def on_record(self, record: HandoffRecord) -> None:
        """The writer's account of what it pushed, and the first token. Of a transfer that is over: ignored
        [late-signal-ignored]."""
        receiving = self._from(record.sender, room_key(record.room, record.generation))
        if receiving is None or receiving.record is not None:
            self.counters.ignored += 1
            return
        problem = problem_with(
            record,
            receiving.req,
            granted=len(receiving.hold.pages),
            first_token=receiving.first_token,
            vocab_size=self.host.vocab_size,
            stateful=self.host.memory.stateful,
        )
        if problem is not None:
            self._fail(receiving, problem)
            return
        key, writer = receiving.hold.key, record.sender.incarnation
        # The writer is done with the room and renews no more; verifying has a separate lease.
        self.holds.renew(key, writer=writer, valid_s=self.config.grant_timeout)
        self.holds.wrote(key, writer=writer, pages=record.pages)
        self.counters.moves += 1
        receiving.record = record
        tail = len(receiving.tokens) % self.host.memory.page_size
        if record.packed:
            self.holds.unpack(key)
        self.transport.digest(
            DigestOrder(
                room=key.room,
                generation=key.generation,
                pages=receiving.hold.pages,
                kind=self.config.kv_digest,
                tail=tail,
                writers=record.ranks,
                packed=record.packed,
                states=receiving.hold.states,
            )
        )

    def on_digests(self, event: Digests) -> None:
        """Commit if every page is what the writer sent, or fail."""
        key = room_key(event.room, event.generation)
        self.holds.unpacked(key)
        receiving = self._receiving.get(key)
        if receiving is None or receiving.record is None:
            self.counters.ignored += 1
            return
        if event.digests == digests_of(receiving.record):
            self._commit(receiving, receiving.record)
        else:
            self._refuse_pages(receiving, receiving.record, event.digests)

    def on_abort(self, message: TransferAborted) -> None:
        """The writer is done with the room without having finished the transfer."""
        key = room_key(message.room, message.generation)
        # It may have lost our pool with the connection; the next grant introduces us again.
        self._greeted.discard(message.sender.incarnation)
        finish = None if message.finished else transfer_failed(f"the prefill worker gave up: {message.reason}")
        receiving = self._from(message.sender, key)
        waiting = self.prealloc.in_room(key)
        if receiving is not None:
            self._give_up(receiving, finish, "the writer ended the transfer")
        elif waiting is not None and waiting.handoff.peer.incarnation == message.sender.incarnation:
            self._give_up_waiting(waiting, finish)
        else:
            self.counters.ignored += 1

    def on_ack(self, message: DrainAck) -> None:
        """The writer will not touch the pages of a room again."""
        key = room_key(message.room, message.generation)
        if not self.holds.acked(key, writer=message.sender.incarnation):
            self.counters.ignored += 1

    def peer_gone(self, incarnation: str) -> None:
        """The peer is fenced: nothing is expected of it any more [dead-peer-released]."""
        self._greeted.discard(incarnation)
        reason = f"prefill worker {incarnation} is gone"
        for waiting in self.prealloc.from_peer(incarnation):
            self._give_up_waiting(waiting, transfer_failed(reason))
        for receiving in self._receiving_from(incarnation):
            self._fail(receiving, reason)
        self.holds.fence(incarnation)

    # 1. waiting

    def _problem_with(self, waiting: Waiting) -> str | None:
        peer = waiting.handoff.peer
        if problem := obstacle(self.peers.me, peer):
            return f"no KV from prefill worker {peer.incarnation}: {problem}"
        if waiting.key in self.holds or self.prealloc.in_room(waiting.key) is not None:
            return f"room {waiting.key} is in use"
        if peer.incarnation == self.peers.me.incarnation:
            return "a worker does not hand over to itself"
        return None

    def _expire_waiting(self) -> bool:
        overdue = self.prealloc.overdue()
        for waiting in overdue:
            self._give_up_waiting(waiting, transfer_failed("the prefill worker fell silent before there was memory"))
        return bool(overdue)

    def _grant_in_order(self) -> bool:
        granted = False
        while reserved := self.prealloc.reserve_next(under_way=[entry.req for entry in self._receiving.values()]):
            self._grant(reserved.waiting, reserved.kv)
            granted = True
        return granted

    def _grant(self, waiting: Waiting, kv: RequestKv) -> None:
        waiting.req.kv = kv
        hold = self.holds.grant(
            waiting.key,
            writer=waiting.handoff.peer,
            pages=tuple(kv.private_pages),
            valid_s=self.config.grant_timeout,
            row=kv.row if self.host.memory.stateful else None,
        )
        self.host.memory.expect_state(kv)
        receiving = Receiving(req=waiting.req, kv=kv, hold=hold, tokens=waiting.tokens, first_token=kv.committed_len)
        self._receiving[waiting.key] = receiving
        self.counters.moves += 1
        if not self._send_grant(receiving):
            self._fail(receiving, f"prefill worker {hold.writer.incarnation} cannot be reached")

    def _send_grant(self, receiving: Receiving) -> bool:
        hold = receiving.hold
        if hold.writer.incarnation not in self._greeted:
            if not self.peers.send(hold.writer, self.transport.hello()):
                return False
            self._greeted.add(hold.writer.incarnation)
        grant = WriteGrant(
            room=hold.key.room,
            generation=hold.key.generation,
            sender=self.peers.me,
            writer=hold.writer.incarnation,
            first_token=receiving.first_token,
            pages=hold.pages,
            granted_at=self.host.clock.now(),
            # It ends before the hold does, whose deadline is counted from a little earlier; a renewal is due before.
            valid_s=self.config.grant_timeout - self.config.renewal_period,
            digest=self.config.kv_digest,
            adapter=receiving.req.space.adapter,
            groups=(GroupGrant(group=STATES, slots=hold.states),) if hold.states else UNSET,
        )
        return self.peers.send(hold.writer, grant)

    def _give_up_waiting(self, waiting: Waiting, finish: Finish | None) -> None:
        self.prealloc.remove(waiting)
        self._end(waiting.req, finish)

    # 2. receiving, 3. verifying

    def _refuse_pages(self, receiving: Receiving, record: HandoffRecord, found: tuple[int, ...]) -> None:
        self.counters.digest_mismatches += 1
        hold = receiving.hold
        pairs = zip(found, digests_of(record), strict=True)
        wrong = [index for index, (here, there) in enumerate(pairs) if here != there]
        logger.error(
            "room %r: digest mismatch in %d of %d pages written by %s, first in page %d",
            str(hold.key),
            len(wrong),
            len(found),
            hold.writer.incarnation,
            wrong[0],
            extra={"fields": receiving.req.about},
        )
        self._fail(receiving, f"{len(wrong)} of {len(found)} pages did not verify")

    # 4. admitted

    def _commit(self, receiving: Receiving, record: HandoffRecord) -> None:
        req, kv, hold = receiving.req, receiving.kv, receiving.hold
        self.holds.commit(hold.key)
        del self._receiving[hold.key]
        self.host.memory.commit(kv, len(receiving.tokens))
        self.host.memory.mark_brought(kv, len(receiving.tokens))
        self.host.memory.checkpoint(kv, receiving.tokens)
        self._take_over(req, receiving, record)
        self.counters.committed += 1
        self.counters.bytes_received += len(hold.pages) * self.page_bytes + self.state_bytes
        stop = self.host.stop_of(req)
        if record.ended_by_grammar:
            stop = end_by_grammar(stop)
        if stop is None:
            self.host.admit_prebuilt(req)
        else:
            self.host.finish(req, stop)

    def _take_over(self, req: Request, receiving: Receiving, record: HandoffRecord) -> None:
        req.output_ids.extend(record.output_ids)
        if req.sampling.logprobs is not None and record.logprobs is not None:
            req.logprobs.extend(record.logprobs)
        req.cached_tokens = record.cached_tokens
        req.cache_hits = record.cache_hits
        pages = len(receiving.hold.pages)
        req.transferred_at = self.host.clock.now()
        req.transfer = TransferReport(
            pages=pages,
            bytes=pages * self.page_bytes + self.state_bytes,
            pages_reused=receiving.first_token // self.host.memory.page_size,
            wait_s=req.transferred_at - receiving.hold.granted_at,
            exposed_s=record.exposed_s,
        )

    # Every way to end early.

    def _expire_holds(self) -> bool:
        overdue = self.holds.overdue()
        for hold in overdue:
            if hold.state.owns_pages:
                self.counters.quarantined += ask_for_ack(hold, holds=self.holds, peers=self.peers, of=HANDOFF)
            else:
                self._fail(self._receiving[hold.key], "the prefill worker fell silent")
        return bool(overdue)

    def _fail(self, receiving: Receiving, reason: str) -> None:
        self._give_up(receiving, transfer_failed(reason), reason)

    def _give_up(self, receiving: Receiving, finish: Finish | None, reason: str) -> None:
        """Pages to the hold, word to the writer, and the end of the request; None ends it silently."""
        hold = receiving.hold
        del self._receiving[hold.key]
        receiving.req.kv = None
        pages = self.host.memory.detach(receiving.kv, keep_row=hold.row is not None)
        self.holds.drain(hold.key, pages)
        self._notify(hold.writer, hold.key, reason)
        self._end(receiving.req, finish)

    def _end(self, req: Request, finish: Finish | None) -> None:
        if finish is None:
            self.host.release(req)
            return
        if finish.reason is FinishReason.ERROR:
            self.counters.failed += 1
        self.host.finish(req, finish)

    def _notify(self, peer: Peer, key: RoomKey, reason: str) -> None:
        notify_ended(self.peers, peer, key, side=HandoffSide.RECEIVE, reason=reason)

    def _from(self, sender: Peer, key: RoomKey) -> Receiving | None:
        """The transfer in room `key`, if `sender` is its writer."""
        receiving = self._receiving.get(key)
        return receiving if receiving and receiving.hold.writer.incarnation == sender.incarnation else None

    def _receiving_from(self, incarnation: str) -> list[Receiving]:
        return [entry for entry in self._receiving.values() if entry.hold.writer.incarnation == incarnation]


def _receives(req: Request) -> Handoff | None:
    handoff = req.handoff
    return handoff if handoff is not None and handoff.side is HandoffSide.RECEIVE else None
