"""Prefix fetches: the requester, which is about to compute a prompt and lacks a prefix that another engine has cached.

    requester (PrefixFetcher)                          source (PrefixSource)

    pages, a hold, PrefixAsk with the grant   ──────▶  longest cached prefix of the tokens, locked
                                              ◀══════  pages by NIXL WRITE
    digests compared, pages into the cache    ◀──────  PrefixRecord; unlocked
    the rest is computed

Any engine does both (`Prefixes`). The KV of a response returns in this way from the worker that generated it, for the
next turn of its conversation.

    PrefixAsk ─▶ 1. receiving ─▶ 2. verifying ─▶ 3. cached
                      └───────────────┴────────▶ given up; the whole prompt is computed here

    1. receiving   the ask itself grants pages; what is cached here before them is locked. The writer writes to them
                   until its record reports that it is finished. It may write fewer pages than were granted, or none:
                   the rest was evicted there, and its pages are free again at once
    2. verifying   the transport digests the pages. Until the digests match no request can read them [verified-pages]
    3. cached      the prefix cache has the pages, for the waiting requests as for any other

Requests wait outside the queue (`scheduler.ingress`), for the time that the gateway considered worth while and at most
`prefix_fetch_timeout`. Where layers keep states, a prefix ends at an anchor of the writer, and its state lands in a
slot that becomes an anchor here. Steps and copies that were launched may still touch the slot: the writer is asked
once they are over. A fetch without waiting requests is given up. If it ends early, its pages go to its hold, as in
a handoff (`holds`): only the writer's ack or its fencing releases them [late-write]. A failed fetch is not an error of
a request.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Self

from msgspec import UNSET

from tandem_engine.base.names import PageId, ReqPoolIdx
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.base import PrefixCounters, RoomKey, StageHost, room_key
from tandem_engine.disaggregation.holds import HoldTable, TransferHold
from tandem_engine.disaggregation.notifications import ask_for_ack, digests_of, notify_ended, problem_with_groups
from tandem_engine.disaggregation.peers import PeerEvent, PeerLink, obstacle
from tandem_engine.disaggregation.prefill import PrefillStage
from tandem_engine.disaggregation.prefix_source import PrefixSource
from tandem_engine.disaggregation.transport import (
    DigestOrder,
    Digests,
    KvTransport,
    PushDone,
    PushFailed,
    TransportEvent,
)
from tandem_engine.memory.allocator import Writer
from tandem_engine.memory.kv_memory import Touched
from tandem_engine.memory.pinned_prefix import PinnedPrefix, fetches_prefixes
from tandem_engine.messages.kv_events import CacheSpace, pack_tokens
from tandem_engine.messages.outputs import FetchReport
from tandem_engine.messages.requests import HandoffSide, Peer, PrefixFetch
from tandem_engine.messages.transfer import (
    STATES,
    DrainAck,
    GrantsRenewed,
    GroupGrant,
    PrefixAsk,
    PrefixRecord,
    StillOpen,
    TransferAborted,
    WriteGrant,
)
from tandem_engine.scheduler.request import Request

logger = logging.getLogger(__name__)

MAX_FETCHES = 32
"""At a time. Further requests compute the prefix themselves."""

GENERATION = 1
"""Rooms of fetches are never used again."""


@dataclass(kw_only=True, slots=True, eq=False)
class Fetch:
    """A prefix on its way here. Implements `AwaitedPages`."""

    hold: TransferHold
    space: CacheSpace
    tokens: tuple[int, ...]
    """All of the prefix, whole pages, the part that was here included."""
    here: PinnedPrefix
    """What was cached here when it began."""
    until: float
    """Monotonic time."""
    waiting: list[Request]
    touched: Touched | None = None
    """The other engine is asked once this is over. None: it was."""
    record: PrefixRecord | None = None
    done: bool = False

    def brings(self, tokens: tuple[int, ...], space: CacheSpace) -> bool:
        """Whether it brings most of a prefix of `tokens`, or all."""
        shared = min(len(tokens), len(self.tokens))
        return self.space == space and 2 * shared >= len(tokens) and self.tokens[:shared] == tokens[:shared]


@dataclass(kw_only=True, slots=True)
class PrefixFetcher:
    """Fetches of one engine. Scheduler thread only."""

    host: StageHost
    transport: KvTransport
    peers: PeerLink
    config: DisaggConfig
    page_bytes: int
    state_bytes: int
    """Of the state after a prefix; 0 where no layer keeps one."""
    holds: HoldTable
    """Of fetches alone."""
    counters: PrefixCounters
    _fetches: dict[RoomKey, Fetch] = field(default_factory=dict)
    """Those under way."""
    _serial: "count[int]" = field(default_factory=count)

    def fetch(self, req: Request) -> Fetch | None:
        """Start the fetch that `req` names, or join one that runs. None if there is nothing to wait for."""
        wanted = req.fetch
        if wanted is None:
            return None
        tokens = self._whole_pages(req, wanted)
        if not tokens:
            return None
        fetch = next((each for each in self._fetches.values() if each.brings(tokens, req.space)), None)
        if fetch is not None:
            fetch.waiting.append(req)
            return fetch
        fetch = self._begin(req, wanted, tokens)
        if fetch is None:
            self.counters.skipped += 1
        return fetch

    def tick(self) -> None:
        """Once per iteration: give up late or unneeded fetches, ask again for acks that are overdue."""
        for fetch in [*self._fetches.values()]:
            if all(req.finished is not None or req.to_finish is not None for req in fetch.waiting):
                self._give_up(fetch, "the requests that waited for it have ended")
            else:
                self._ask_when_untouched(fetch)
        for hold in self.holds.overdue():
            if hold.state.owns_pages:
                self.counters.quarantined += ask_for_ack(hold, holds=self.holds, peers=self.peers, of="prefix fetch")
            else:
                self._fail(self._fetches[hold.key], "it did not come in time")

    # What peers and the transport report.

    def on_record(self, record: PrefixRecord) -> None:
        """The writer's account of what it wrote: all that it will."""
        fetch = self._fetches.get(room_key(record.room, record.generation))
        if fetch is None or fetch.record is not None or not _wrote(fetch, record.sender):
            self.counters.ignored += 1
            return
        granted = len(fetch.hold.pages)
        if record.adapter != fetch.space.adapter:
            # Written by a release that ignores adapters, from what the base model has computed.
            self._fail(fetch, "the record of the other engine does not name the adapter")
            return
        if not 0 <= record.pages <= granted or len(record.digests) != record.pages:
            self._fail(fetch, f"{record.pages} of {granted} pages with {len(record.digests)} digests")
            return
        problem = self._problem_with_state(fetch, record)
        if problem is not None:
            self._fail(fetch, problem)
            return
        key, fetch.record = fetch.hold.key, record
        self.holds.shorten(key, record.pages)
        if not record.pages:
            self._miss(fetch)
            return
        self.holds.wrote(key, writer=record.sender.incarnation, pages=record.pages)
        if record.packed:
            self.holds.unpack(key)
        self.transport.digest(
            DigestOrder(
                room=key.room,
                generation=key.generation,
                pages=fetch.hold.pages,
                kind=self.config.kv_digest,
                tail=0,
                writers=record.ranks,
                packed=record.packed,
                states=fetch.hold.states,
            )
        )

    def on_still_open(self, message: StillOpen) -> None:
        """A writer doubts its grant, or continues: the grant is valid for as long as a request waits here."""
        now = self.host.clock.now()
        for named in message.rooms:
            fetch = self._fetches.get(room_key(named.room, named.generation))
            if fetch is not None and _wrote(fetch, message.sender):
                answer = GrantsRenewed(
                    sender=self.peers.me,
                    sent_at=message.sent_at,
                    answered_at=now,
                    valid_s=max(0.0, fetch.hold.deadline - now),
                    rooms=(named,),
                )
                self.peers.send(message.sender, answer)

    def on_digests(self, event: Digests) -> bool:
        """Cache the pages if every one is what the writer sent. False: not of a fetch."""
        key = room_key(event.room, event.generation)
        ended = self.holds.unpacked(key)
        fetch = self._fetches.get(key)
        if fetch is None:
            return ended
        if fetch.record is None:
            self.counters.ignored += 1
        elif event.digests == digests_of(fetch.record):
            self._commit(fetch)
        else:
            self.counters.digest_mismatches += 1
            self._fail(fetch, "pages did not verify")
        return True

    def on_abort(self, message: TransferAborted) -> bool:
        """The writer refuses, or is done without having finished. False: not of a fetch."""
        fetch = self._fetches.get(room_key(message.room, message.generation))
        if fetch is None or not _wrote(fetch, message.sender):
            return False
        self._fail(fetch, f"the other engine gave up: {message.reason}")
        return True

    def on_ack(self, message: DrainAck) -> bool:
        """The writer will not touch the pages again. False: not of a fetch."""
        return self.holds.acked(room_key(message.room, message.generation), writer=message.sender.incarnation)

    def peer_gone(self, incarnation: str) -> None:
        """The peer is fenced: nothing is expected of it any more [dead-peer-released]."""
        for fetch in [each for each in self._fetches.values() if each.hold.writer.incarnation == incarnation]:
            self._fail(fetch, f"{incarnation} is gone")
        self.holds.fence(incarnation)

    def forget_kv(self) -> None:
        """What is on its way would be of another cache, perhaps of other weights."""
        for fetch in [*self._fetches.values()]:
            self._fail(fetch, "the cache is being emptied")

    def held_pages(self) -> Iterator[PageId]:
        """Pages on their way here, and those of fetches that ended early (audit)."""
        for fetch in self._fetches.values():
            yield from fetch.hold.pages
        yield from self.holds.held_pages()

    # 1. receiving

    def _whole_pages(self, req: Request, wanted: PrefixFetch) -> tuple[int, ...]:
        return tuple(req.token_ids(0, self._fetchable(min(wanted.tokens, req.longest_match))))

    def _fetchable(self, tokens: int) -> int:
        """The most tokens among so many after which a prefix can end: whole pages, where a state may be."""
        memory = self.host.memory
        return (
            tokens // memory.page_size * memory.page_size if memory.anchors is None else memory.anchors.at_most(tokens)
        )

    def _begin(self, req: Request, wanted: PrefixFetch, tokens: tuple[int, ...]) -> Fetch | None:
        if not self._may_ask(wanted.peer) or not fetches_prefixes(self.host.memory):
            return None
        spare = self.host.spare_pages() - self.host.overtaken_reserve(req).pages
        here = PinnedPrefix.of(self.host.memory, tokens, space=req.space, spare_pages=max(0, spare))
        # Locking what was evictable has made it less.
        spare = self.host.spare_pages() - self.host.overtaken_reserve(req).pages
        memory = self.host.memory
        whole = self._fetchable(min(len(tokens), here.tokens + max(0, spare) * memory.page_size))
        missing = whole // memory.page_size - len(here.pages)
        pages = memory.reserve_pages(missing, Writer.PEER) if missing > 0 else None
        landing = memory.reserve_state() if memory.stateful and pages is not None else None
        if pages is None or (memory.stateful and landing is None):
            memory.give_back(pages or ())
            here.give_back()
            return None
        key = room_key(f"prefix:{self.peers.me.incarnation}:{next(self._serial)}", GENERATION)
        timeout = min(wanted.within_s, self.config.prefix_fetch_timeout)
        row = None if landing is None else ReqPoolIdx(landing[0])
        hold = self.holds.grant(key, writer=wanted.peer, pages=tuple(pages), valid_s=timeout, row=row)
        fetch = Fetch(
            hold=hold,
            space=req.space,
            tokens=tokens[: here.tokens + len(pages) * self.host.memory.page_size],
            here=here,
            until=hold.deadline,
            waiting=[req],
            touched=Touched(-1, 0) if landing is None else landing[1],
        )
        self._fetches[key] = fetch
        self.counters.asked += 1
        self._ask_when_untouched(fetch)
        return None if fetch.done else fetch

    def _ask_when_untouched(self, fetch: Fetch) -> None:
        if fetch.touched is None or not self.host.memory.untouched(fetch.touched):
            return
        fetch.touched = None
        if not self._ask(fetch):
            self._fail(fetch, f"{fetch.hold.writer.incarnation} cannot be reached")

    def _may_ask(self, peer: Peer) -> bool:
        me = self.peers.me
        known = not obstacle(me, peer) and peer.incarnation != me.incarnation
        return known and len(self._fetches) < MAX_FETCHES

    def _ask(self, fetch: Fetch) -> bool:
        now = self.host.clock.now()
        grant = WriteGrant(
            room=fetch.hold.key.room,
            generation=fetch.hold.key.generation,
            sender=self.peers.me,
            writer=fetch.hold.writer.incarnation,
            first_token=fetch.here.tokens,
            pages=fetch.hold.pages,
            granted_at=now,
            valid_s=fetch.hold.deadline - now,
            digest=self.config.kv_digest,
            adapter=fetch.space.adapter,
            groups=(GroupGrant(group=STATES, slots=fetch.hold.states),) if fetch.hold.states else UNSET,
        )
        ask = PrefixAsk(
            grant=grant, tokens=pack_tokens(fetch.tokens), salt=fetch.space.salt, adapter=fetch.space.adapter
        )
        # Introduced each time: a fetch is rare, and the peer may have lost our pool with a connection.
        return self.peers.send(fetch.hold.writer, self.transport.hello()) and self.peers.send(fetch.hold.writer, ask)

    # 3. cached

    def _commit(self, fetch: Fetch) -> None:
        hold, start = fetch.hold, fetch.here.tokens
        self.holds.commit(hold.key)
        stop = start + len(hold.pages) * self.host.memory.page_size
        fetch.here.extend(fetch.tokens[start:stop], hold.pages, state=hold.row)
        self.counters.fetched += 1
        self.counters.pages += len(hold.pages)
        self.counters.bytes += self._size(len(hold.pages))
        self._close(fetch, pages=len(hold.pages))

    def _miss(self, fetch: Fetch) -> None:
        """The writer has none of it any more."""
        self.counters.missed += 1
        fetch.here.give_back()
        self._close(fetch, pages=0)

    # Every way to end early.

    def _fail(self, fetch: Fetch, reason: str) -> None:
        self.counters.failed += 1
        logger.warning(
            "prefix %r: fetch from %s failed: %s",
            str(fetch.hold.key),
            fetch.hold.writer.incarnation,
            reason,
            extra={"fields": fetch.waiting[0].about if fetch.waiting else {}},
        )
        self._give_up(fetch, reason)

    def _give_up(self, fetch: Fetch, reason: str) -> None:
        self.holds.drain(fetch.hold.key, fetch.hold.pages)
        fetch.here.give_back()
        self._close(fetch, pages=0)
        notify_ended(self.peers, fetch.hold.writer, fetch.hold.key, side=HandoffSide.RECEIVE, reason=reason)

    def _close(self, fetch: Fetch, *, pages: int) -> None:
        del self._fetches[fetch.hold.key]
        fetch.done = True
        waited = self.host.clock.now() - fetch.hold.granted_at
        self.counters.wait_s += waited
        for req in fetch.waiting:
            req.fetched = FetchReport(
                peer=fetch.hold.writer.incarnation, pages=pages, bytes=self._size(pages), wait_s=waited
            )

    def _size(self, pages: int) -> int:
        """Bytes of so many pages and of the state after them."""
        return pages * self.page_bytes + self.state_bytes if pages else 0

    def _problem_with_state(self, fetch: Fetch, record: PrefixRecord) -> str | None:
        problem = problem_with_groups(record, states=len(fetch.hold.states) if record.pages else 0)
        stop = fetch.here.tokens + record.pages * self.host.memory.page_size
        if problem is None and self._fetchable(stop) != stop:
            problem = f"{stop} tokens, after which no state can be"
        return problem


def _wrote(fetch: Fetch, sender: Peer) -> bool:
    return fetch.hold.writer.incarnation == sender.incarnation


@dataclass(kw_only=True, slots=True)
class Prefixes:
    """Dispatches messages and events to the end that they concern."""

    fetcher: PrefixFetcher
    source: PrefixSource
    counters: PrefixCounters

    @classmethod
    def build(cls, stage: PrefillStage) -> Self:
        """Next to `stage`, which owns all pushes of the engine."""
        host, config, counters = stage.host, stage.config, PrefixCounters()
        holds = HoldTable(
            clock=host.clock,
            give_back=host.memory.give_back,
            give_back_row=host.memory.give_back_state,
            drain_timeout=config.drain_timeout,
        )
        fetcher = PrefixFetcher(
            host=host,
            transport=stage.transport,
            peers=stage.peers,
            config=config,
            page_bytes=stage.page_bytes,
            state_bytes=stage.state_bytes,
            holds=holds,
            counters=counters,
        )
        source = PrefixSource(
            host=host,
            transport=stage.transport,
            peers=stage.peers,
            drains=stage.drains,
            closed=stage.closed,
            clocks=stage.clocks,
            max_pages=stage.max_pages,
            counters=counters,
            role=config.role,
        )
        return cls(fetcher=fetcher, source=source, counters=counters)

    def on_peer(self, event: PeerEvent) -> bool:
        """Process a peer's message about a fetch. False: it concerns others, or others too."""
        match event:
            case PrefixAsk():
                self.source.on_ask(event)
            case PrefixRecord():
                self.fetcher.on_record(event)
            case DrainAck():
                return self.fetcher.on_ack(event)
            case TransferAborted(side=HandoffSide.SEND):
                return self.fetcher.on_abort(event)
            case _:
                self._observe_event(event)
                return False
        return True

    def _observe_event(self, event: PeerEvent) -> None:
        """What concerns others as well."""
        match event:
            case StillOpen(side=HandoffSide.SEND):
                self.fetcher.on_still_open(event)
            case GrantsRenewed():
                self.source.on_renewed(event)
            case TransferAborted():
                self.source.on_abort(event)

    def on_transport(self, event: TransportEvent) -> bool:
        """Take what the transport reports about a fetch. False: it concerns others, or others too."""
        match event:
            case PushDone():
                self.source.on_push_done(event)
            case PushFailed():
                self.source.on_push_failed(event)
            case Digests():
                return self.fetcher.on_digests(event)
        return False

    def tick(self) -> None:
        """Let time pass."""
        self.source.tick()
        self.fetcher.tick()

    def peer_gone(self, incarnation: str) -> None:
        """The peer is fenced. Idempotent."""
        self.source.peer_gone(incarnation)
        self.fetcher.peer_gone(incarnation)

    def forget_kv(self) -> None:
        """The prefix cache is about to be emptied."""
        self.source.forget_kv()
        self.fetcher.forget_kv()

    def held_pages(self) -> Iterator[PageId]:
        """Pages on their way here (audit)."""
        return self.fetcher.held_pages()

    def holds_for_a_while(self) -> bool:
        """Whether pages are on their way, in either direction."""
        return self.fetcher.holds.open_transfers() > 0 or bool(self.source.transfers)
