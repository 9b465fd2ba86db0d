"""Prefix fetches: the source, which has the prefix and writes it to the requester.

    PrefixAsk ─▶ 1. kept ─▶ 2. pushing ─▶ 3. over: PrefixRecord
                   └───────────┴────────▶ given up: TransferAborted

    1. kept      the longest cached prefix of the tokens is locked, so it is not evicted. A part that is only in host
                 memory is copied to the device first, and nothing is pushed before that [settled-only-sent]. Where
                 layers keep states it ends at an anchor, whose state goes, too, from its slot
    2. pushing   as into any grant: no push starts while it is doubtful or expired, and its end ends the transfer
    3. over      the record has the number of pages written, possibly none. Where prompts are computed, the
                 conversation continues at the requester, so of the two copies this one is evicted first (ADR 31).
                 A decode worker keeps its copy

These transfers end as handoffs do: outstanding pushes are in the same `DrainBook`, closed rooms in the same
`ClosedRooms`, and `PrefillStage`, which has both, sends the acks. Only pages that running requests can spare are
served: a prefix fetch never causes a retraction.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from tandem_engine.config import Role
from tandem_engine.disaggregation.base import PrefixCounters, RoomKey, StageHost, room_key
from tandem_engine.disaggregation.grants import ClosedRooms, DrainBook, Grant, PeerClocks, renewed_until
from tandem_engine.disaggregation.notifications import notify_ended
from tandem_engine.disaggregation.peers import PeerLink
from tandem_engine.disaggregation.transport import KvTransport, Push, PushDone, PushFailed, PushKey
from tandem_engine.memory.pinned_prefix import PinnedPrefix
from tandem_engine.messages.kv_events import DIGEST_BYTES, CacheSpace, unpack_tokens
from tandem_engine.messages.requests import HandoffSide, Peer
from tandem_engine.messages.transfer import (
    STATES,
    GrantsRenewed,
    GroupDigests,
    PrefixAsk,
    PrefixRecord,
    TransferAborted,
)

logger = logging.getLogger(__name__)

MAX_PREFIX_TRANSFERS = 32
"""At a time. Further requesters compute the prefix themselves."""


@dataclass(kw_only=True, slots=True, eq=False)
class PrefixTransfer:
    """A prefix on its way to `grant.receiver`."""

    grant: Grant
    prefix: PinnedPrefix
    pages: int
    """Of the grant, that will be written."""
    outstanding: set[PushKey] = field(default_factory=set)
    digests: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of each finished push, by its first page."""
    state_digests: tuple[int, ...] = ()
    """Of the state after the prefix, where layers keep one."""
    pushed: bool = False

    @property
    def receiver(self) -> Peer:
        return self.grant.receiver

    def pushes(self, page_size: int, max_pages: int) -> Iterator[Push]:
        """All of it, at most `max_pages` at a time, and the state."""
        grant, skipped = self.grant, self.grant.first_token // page_size
        for first in range(0, self.pages, max_pages):
            last = min(first + max_pages, self.pages)
            yield Push(
                key=PushKey(room=grant.key.room, generation=grant.key.generation, first=first, count=last - first),
                peer=grant.receiver.incarnation,
                source=self.prefix.pages[skipped + first : skipped + last],
                target=grant.pages[first:last],
                digest=grant.digest,
                start_before=grant.expires,
            )
        if grant.state is not None:
            yield Push(
                key=PushKey(room=grant.key.room, generation=grant.key.generation, first=0, count=1, group=STATES),
                peer=grant.receiver.incarnation,
                source=(self.prefix.state,),
                target=(grant.state,),
                digest=grant.digest,
                start_before=grant.expires,
            )

    def proved(self, key: PushKey, digests: tuple[int, ...]) -> None:
        """A push has finished."""
        self.outstanding.remove(key)
        if key.group == STATES:
            self.state_digests = digests
        else:
            self.digests[key.first] = digests

    def all_digests(self) -> tuple[int, ...]:
        return tuple(digest for first in sorted(self.digests) for digest in self.digests[first])


@dataclass(kw_only=True, slots=True)
class PrefixSource:
    """Prefixes that one engine serves to others. Scheduler thread only."""

    host: StageHost
    transport: KvTransport
    peers: PeerLink
    drains: DrainBook
    closed: ClosedRooms
    clocks: PeerClocks
    max_pages: int
    """Of one push."""
    counters: PrefixCounters
    role: Role
    """A decode worker serves engines that compute for it, and continues with its own copy."""
    _transfers: dict[RoomKey, PrefixTransfer] = field(default_factory=dict)

    @property
    def transfers(self) -> Mapping[RoomKey, PrefixTransfer]:
        """Those that are not over."""
        return self._transfers

    def on_ask(self, message: PrefixAsk) -> None:
        """Serve what is cached here, or reply that nothing is."""
        grant = Grant.received(message.grant, self.host.clock, self.clocks)
        if grant.key in self.closed or grant.key in self._transfers:
            self.counters.ignored += 1
            return
        problem = self._problem_with(message, grant)
        if problem is not None:
            self._refuse(grant, problem)
            return
        transfer = self._serve(message, grant)
        if not transfer.pages:
            self._end(transfer)
            self._record(transfer)
            return
        self._transfers[grant.key] = transfer
        grant.confirm_if_doubtful(self.peers, self.host.clock.now())
        self._push(transfer)

    def on_renewed(self, message: GrantsRenewed) -> None:
        """An asker still waits."""
        expires = renewed_until(message, self.host.clock.now())
        if expires is None:
            return
        for named in message.rooms:
            transfer = self._transfers.get(room_key(named.room, named.generation))
            if transfer is not None and transfer.receiver.incarnation == message.sender.incarnation:
                transfer.grant = transfer.grant.renewed(expires)
                if not transfer.pushed:
                    self._push(transfer)

    def on_push_done(self, event: PushDone) -> None:
        """Bytes are out. `PrefillStage` updates the drain book, as for any other push."""
        transfer = self._transfers.get(room_key(event.key.room, event.key.generation))
        if transfer is None:
            return
        transfer.proved(event.key, event.digests)
        if not transfer.outstanding:
            self._over(transfer, moved=self.role is not Role.DECODE)
            self._record(transfer)
            self.counters.served += 1
            self.counters.served_pages += transfer.pages

    def on_push_failed(self, event: PushFailed) -> None:
        """A push will write no more, and so will the others that have not started."""
        transfer = self._transfers.get(room_key(event.key.room, event.key.generation))
        if transfer is not None:
            transfer.outstanding.discard(event.key)
            self._give_up(transfer, event.reason)

    def on_abort(self, message: TransferAborted) -> None:
        """The asker has stopped waiting. The ack is given by `PrefillStage`, once nothing is outstanding."""
        transfer = self._transfers.get(room_key(message.room, message.generation))
        if transfer is not None and transfer.receiver.incarnation == message.sender.incarnation:
            self._over(transfer)

    def tick(self) -> None:
        """Let time pass: push what has become readable, end what has expired."""
        now = self.host.clock.now()
        for transfer in [*self._transfers.values()]:
            if now >= transfer.grant.ends:
                self._give_up(transfer, "the grant expired")
            elif not transfer.pushed:
                self._push(transfer)

    def peer_gone(self, incarnation: str) -> None:
        """The requester is fenced: it will not read what is sent to it [dead-peer-released]."""
        for transfer in [
            transfer for transfer in self._transfers.values() if transfer.receiver.incarnation == incarnation
        ]:
            self._over(transfer)

    def forget_kv(self) -> None:
        """The prefixes being served are about to be replaced by KV of other weights."""
        for transfer in [*self._transfers.values()]:
            self._give_up(transfer, "the cache is being emptied")

    def _problem_with(self, message: PrefixAsk, grant: Grant) -> str | None:
        if len(self._transfers) >= MAX_PREFIX_TRANSFERS:
            return f"{MAX_PREFIX_TRANSFERS} prefixes are being sent already"
        try:
            tokens = len(unpack_tokens(message.tokens))
        except ValueError:
            return f"{len(message.tokens)} bytes are no whole number of tokens"
        if len(message.adapter) not in (0, DIGEST_BYTES):
            return f"{len(message.adapter)} bytes are no digest of an adapter"
        if tokens % self.host.memory.page_size:
            return f"{tokens} tokens are no whole number of pages"
        return grant.problem(
            tokens=tokens,
            page_size=self.host.memory.page_size,
            peer=message.sender.incarnation,
            adapter=message.adapter,
            stateful=self.host.memory.stateful,
        )

    def _serve(self, message: PrefixAsk, grant: Grant) -> PrefixTransfer:
        memory, spare = self.host.memory, max(0, self.host.spare_pages())
        tokens = unpack_tokens(message.tokens)
        # Requests cannot have locked pages, so the prefix is no longer than what they can spare.
        tokens = tokens[: grant.first_token + spare * memory.page_size]
        space = CacheSpace(message.salt, message.adapter)
        prefix = PinnedPrefix.of(memory, tokens, space=space, spare_pages=spare, with_state=True)
        return PrefixTransfer(
            grant=grant,
            prefix=prefix,
            pages=max(0, len(prefix.pages) - grant.first_token // memory.page_size),
        )

    def _push(self, transfer: PrefixTransfer) -> None:
        if self.host.clock.now() >= transfer.grant.expires or not transfer.prefix.readable:
            return
        transfer.pushed = True
        for push in transfer.pushes(self.host.memory.page_size, self.max_pages):
            transfer.outstanding.add(push.key)
            self.drains.started(push.key, push.peer)
            self.transport.push(push)

    def _record(self, transfer: PrefixTransfer) -> None:
        self.peers.send(
            transfer.receiver,
            PrefixRecord(
                room=transfer.grant.key.room,
                generation=transfer.grant.key.generation,
                sender=self.peers.me,
                pages=transfer.pages,
                digests=transfer.all_digests(),
                adapter=transfer.grant.adapter,
                ranks=self.transport.hello().num_ranks,
                groups=(GroupDigests(group=STATES, digests=transfer.state_digests),)
                if transfer.state_digests
                else UNSET,
                packed=self.transport.packs(transfer.receiver.incarnation),
            ),
        )

    def _give_up(self, transfer: PrefixTransfer, reason: str) -> None:
        logger.warning(
            "prefix %r: sending to %s failed: %s", str(transfer.grant.key), transfer.receiver.incarnation, reason
        )
        self._over(transfer)
        self._refuse(transfer.grant, reason)

    def _over(self, transfer: PrefixTransfer, *, moved: bool = False) -> None:
        del self._transfers[transfer.grant.key]
        self._end(transfer, moved=moved)

    def _end(self, transfer: PrefixTransfer, *, moved: bool = False) -> None:
        """Pages may be freed while a push still reads them: no record will vouch for what it writes."""
        self.closed.add(transfer.grant.key)
        transfer.prefix.give_back(spent=moved)

    def _refuse(self, grant: Grant, reason: str) -> None:
        self.closed.add(grant.key)
        notify_ended(self.peers, grant.receiver, grant.key, side=HandoffSide.SEND, reason=reason)
