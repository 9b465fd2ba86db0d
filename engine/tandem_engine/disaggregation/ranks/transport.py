"""`KvTransport` of an engine whose KV, or that of its peers, is spread over several ranks.

Every rank has one, around a local transport (`local`) with its pool and its NIXL agent. The schedulers of all ranks are
the same and make the same calls in the same iterations. Each call becomes this rank's part of it, and the reports of
the local transports become one event that all ranks see in the same iteration.

    scheduler (every rank)      here                                      local transport (this rank's)

    push(pages)           ──▶   one slice per rank of the peer that    ─▶  push(pages, heads)
                                this rank has heads for (`slices`)
    digest(pages)         ──▶   one per rank of the writer that has    ─▶  digest(pages, heads)
                                written here
    poll()                ──▶   reports of this rank's transport       ◀─  events
          ◀── joined events ──  exchanged with all ranks (`gather`), joined (`slices`)

States are divided by heads of their own (`HeadStates`). Where ranks do not divide them, rank i writes to rank i of an
engine with equally many, and no other engine is written to.

Ranks exchange reports only in iterations with an open push or proof, which is the same on all ranks [same-collectives].
Between two engines with one rank each nothing is sliced, renamed or joined.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Self

import msgspec
from msgspec import UNSET

from tandem_engine.base.clock import Clock
from tandem_engine.disaggregation.base import RoomKey, room_key
from tandem_engine.disaggregation.ranks.slices import (
    HeadSlice,
    JoinedProof,
    JoinedPush,
    Route,
    SliceRoom,
    agent_name,
    can_hold,
    head_slices,
    heads_on,
    read_slice_room,
    slice_room,
)
from tandem_engine.disaggregation.transport import (
    DigestOrder,
    Digests,
    HeadStates,
    KvTransport,
    Push,
    PushDone,
    PushFailed,
    PushKey,
    TransportEvent,
)
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import Hello, RankPool

logger = logging.getLogger(__name__)

NEAR_S = 0.1
"""After something happened on this rank the same is expected of the others."""


class RankNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank's transport has reported since the last turn."""

    done: tuple[PushDone, ...] = ()
    failed: tuple[PushFailed, ...] = ()
    digests: tuple[Digests, ...] = ()

    @classmethod
    def of(cls, events: Iterable[TransportEvent]) -> "RankNews":
        return cls(
            done=tuple(event for event in events if isinstance(event, PushDone)),
            failed=tuple(event for event in events if isinstance(event, PushFailed)),
            digests=tuple(event for event in events if isinstance(event, Digests)),
        )


GatherNews = Callable[[RankNews], Sequence[RankNews]]
"""What each rank passes, on every rank, in order of rank."""

GatherHellos = Callable[[Hello], Sequence[Hello]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Which part of an engine's KV lies here."""

    rank: int
    size: int
    kv_heads: int
    """Of the model."""
    states: HeadStates | None = None
    """None: the model has none, or ranks do not divide them."""

    def agent(self, me: Peer) -> Peer:
        """This rank as its transport is known to peers' transports."""
        name = agent_name(me.incarnation, rank=self.rank, ranks=self.size)
        return msgspec.structs.replace(me, incarnation=name)


@dataclass(kw_only=True, slots=True)
class RankedTransport:
    """One rank's end. Scheduler thread only."""

    local: KvTransport
    place: RankPlace
    gather: GatherNews
    clock: Clock
    """This rank's own."""
    _hello: Hello
    _peers: dict[str, int] = field(default_factory=dict)
    """Ranks of each peer that was met."""
    _unpacking: set[str] = field(default_factory=set)
    """Of those, the ones that slices are packed for."""
    _refused: dict[str, str] = field(default_factory=dict)
    """Why a peer cannot be written to."""
    _pushes: dict[PushKey, JoinedPush] = field(default_factory=dict)
    _proofs: dict[RoomKey, JoinedProof] = field(default_factory=dict)
    _own: list[TransportEvent] = field(default_factory=list)
    """What all ranks know without asking each other."""
    _received_at: float | None = None

    @classmethod
    def build(
        cls,
        *,
        local: KvTransport,
        me: Peer,
        place: RankPlace,
        gather_hellos: GatherHellos,
        gather: GatherNews,
        clock: Clock,
    ) -> Self:
        """Meet the other ranks, which build theirs in the same moment. `local` is named `place.agent(me)`."""
        hellos = gather_hellos(local.hello())
        return cls(
            local=local,
            place=place,
            gather=gather,
            clock=clock,
            _hello=_joined_hello(me, hellos, place),
        )

    @property
    def awaits_ranks(self) -> bool:
        """Other ranks may soon report, which wakes no thread here."""
        near = self._received_at is not None and self.clock.now() < self._received_at + NEAR_S
        return self.place.size > 1 and near

    # KvTransport

    def hello(self) -> Hello:
        return self._hello

    def rename(self, me: Peer) -> None:
        self._hello = msgspec.structs.replace(self._hello, sender=me)
        self.local.rename(self.place.agent(me))

    def connect(self, hello: Hello) -> None:
        peer, ranks = hello.sender.incarnation, hello.num_ranks
        problem = _problem_with(hello, ranks, self.place.kv_heads)
        problem = problem or _problem_with_groups(hello, self._hello, self.place.states)
        if problem is not None:
            self._refused[peer] = problem
            logger.warning("cannot write to %r: %s", peer, problem)
            return
        self._refused.pop(peer, None)
        self._peers[peer] = ranks
        slices = self._slices(ranks)
        equal = self._heads_per_rank(self.place.size) == self._heads_per_rank(ranks)
        if not equal and hello.unpacks and pays_to_pack(hello, slices):
            self._unpacking.add(peer)
        slices += self._state_slices(senders=self.place.size, receivers=ranks)
        for rank in dict.fromkeys(one.receiver for one in slices if one.sender == self.place.rank):
            self.local.connect(_hello_of(hello, rank))

    def forget(self, incarnation: str) -> None:
        ranks = self._peers.pop(incarnation, 1)
        self._unpacking.discard(incarnation)
        self._refused.pop(incarnation, None)
        for rank in range(ranks):
            self.local.forget(agent_name(incarnation, rank=rank, ranks=ranks))

    def packs(self, peer: str) -> bool:
        return peer in self._unpacking

    def push(self, push: Push) -> None:
        ranks = self._peers.get(push.peer)
        if ranks is None:
            reason = self._refused.get(push.peer, f"not connected to {push.peer}")
            self._own.append(PushFailed(key=push.key, reason=reason, peer_lost=True))
        elif self._is_plain(ranks):
            self.local.push(push)
        else:
            self._push_slices(push, ranks)

    def digest(self, order: DigestOrder) -> None:
        assert order.heads is None, "the ranks of both sides say which heads are proved"
        if self._is_plain(order.writers):
            self.local.digest(order)
            return
        # So many ranks may be more than can share the heads; then what they wrote proves false, as one's.
        writers = order.writers if can_hold(self.place.kv_heads, order.writers) else 1
        key = room_key(order.room, order.generation)
        slices = head_slices(self.place.kv_heads, senders=writers, receivers=self.place.size)
        apart = self._state_slices(senders=writers, receivers=self.place.size) if order.states else ()
        self._proofs[key] = JoinedProof(key=key, slices=slices, state_slices=apart)
        pages = replace(order, states=()) if apart else order
        states = replace(order, pages=(), tail=0)
        here = [one for one in slices if one.receiver == self.place.rank]
        # Orders are carried out in turn, so those behind the first find pages that have their layout.
        unpack = tuple(one.part.target for one in here) if order.packed and len(here) > 1 else ()
        for number, one in enumerate(here):
            room = self._written(order, one, writers)
            part = replace(pages, room=room, heads=one.part.target, packed=bool(unpack))
            self.local.digest(part if number else replace(part, unpack=unpack))
        for one in apart:
            if one.receiver == self.place.rank:
                room = self._written(order, one, writers)
                self.local.digest(replace(states, room=room, state_heads=one.part.target))

    def expect(self, transfers: int) -> None:
        self.local.expect(transfers)

    def poll(self) -> list[TransportEvent]:
        reported = self.local.poll()
        if reported:
            self._received_at = self.clock.now()
        events, self._own = self._own, []
        if self.place.size > 1 and not (self._pushes or self._proofs):
            assert not reported, f"rank {self.place.rank} got {reported}, which no rank waits for"
            return events
        for news in self.gather(RankNews.of(reported)):
            events += self._on_rank_message(news)
        return events

    @property
    def alone(self) -> bool:
        return self.place.size == 1

    @property
    def errors(self) -> int:
        return self.local.errors

    def fileno(self) -> int:
        return self.local.fileno()

    def close(self) -> None:
        self.local.close()

    # Slices

    def _is_plain(self, peer_ranks: int) -> bool:
        return self.place.size == peer_ranks == 1

    def _slices(self, receivers: int) -> tuple[HeadSlice, ...]:
        return head_slices(self.place.kv_heads, senders=self.place.size, receivers=receivers)

    def _state_slices(self, *, senders: int, receivers: int) -> tuple[HeadSlice, ...]:
        """Those of states, where they are not the slices of pages."""
        states = self.place.states
        if states is None or senders == receivers or not (states.slot_bytes(senders) and states.slot_bytes(receivers)):
            return ()
        return head_slices(states.heads, senders=senders, receivers=receivers)

    def _written(self, order: DigestOrder, one: HeadSlice, writers: int) -> str:
        """The room of what a rank of the peer has written here."""
        return slice_room(SliceRoom(order.room, one.sender, writers, one.receiver, self.place.size))

    def _heads_per_rank(self, ranks: int) -> int:
        return len(heads_on(self.place.kv_heads, rank=0, size=ranks))

    def _push_slices(self, push: Push, ranks: int) -> None:
        apart = self._state_slices(senders=self.place.size, receivers=ranks) if push.key.group else ()
        slices = apart or self._slices(ranks)
        self._pushes[push.key] = JoinedPush(key=push.key, slices=slices)
        whole = not apart and self._heads_per_rank(self.place.size) == self._heads_per_rank(ranks)
        packed = push.peer in self._unpacking and not push.key.group
        for one in slices:
            if one.sender != self.place.rank:
                continue
            name = slice_room(SliceRoom(push.key.room, one.sender, self.place.size, one.receiver, ranks))
            self.local.push(
                replace(
                    push,
                    key=replace(push.key, room=name),
                    peer=agent_name(push.peer, rank=one.receiver, ranks=ranks),
                    heads=None if whole else one.part,
                    packed=packed,
                )
            )

    # What the ranks report

    def _on_rank_message(self, news: RankNews) -> Iterator[TransportEvent]:
        for done in news.done:
            yield from self._pushed(done)
        for failed in news.failed:
            yield from self._pushed(failed)
        for digests in news.digests:
            yield from self._proved(digests)

    def _pushed(self, event: PushDone | PushFailed) -> Iterator[TransportEvent]:
        name = read_slice_room(event.key.room)
        key = None if name is None else replace(event.key, room=name.room)
        push = None if key is None else self._pushes.get(key)
        if name is None or key is None or push is None:
            yield event
            return
        ended = push.ended(Route(name.sender, name.receiver), event)
        if ended is not None:
            del self._pushes[key]
            yield ended

    def _proved(self, event: Digests) -> Iterator[TransportEvent]:
        name = read_slice_room(event.room)
        key = None if name is None else room_key(name.room, event.generation)
        proof = None if key is None else self._proofs.get(key)
        if name is None or key is None or proof is None:
            yield event
            return
        digests = proof.add(Route(name.sender, name.receiver), event)
        if digests is not None:
            del self._proofs[key]
            yield digests


def pays_to_pack(hello: Hello, slices: Sequence[HeadSlice]) -> bool:
    """Whether `slices` go faster to this peer as one run per page, copies included.

    They do where a slice is a whole page there (512 MiB between CPUs, to 4 ranks: 0.15 s in place of 0.6), and where a
    GPU unpacks. A CPU would take as long for that as ranges do.
    """
    return len(slices) == hello.num_ranks or hello.device == "VRAM"


def _joined_hello(me: Peer, hellos: Sequence[Hello], place: RankPlace) -> Hello:
    first = msgspec.structs.replace(hellos[0], sender=me)
    if len(hellos) == 1:
        return first
    first = msgspec.structs.replace(
        first,
        machine=_common_machine([hello.machine for hello in hellos]),
        transports=tuple(each for each in first.transports if all(each in hello.transports for hello in hellos)),
    )
    ranks = tuple(
        RankPool(
            nixl_metadata=hello.nixl_metadata,
            pool_address=hello.pool_address,
            device_id=hello.device_id,
            first_head=heads_on(place.kv_heads, rank=rank, size=place.size).start,
            groups=hello.groups,
        )
        for rank, hello in enumerate(hellos)
    )
    return msgspec.structs.replace(first, ranks=ranks)


def _common_machine(machines: Sequence[str]) -> str:
    """That of all ranks. Ranks on several machines are on none that a peer could be on: their slowest link counts."""
    if len(set(machines)) == 1 or "" in machines:
        return machines[0] if "" not in machines else ""
    return blake2b("|".join(machines).encode(), digest_size=8).hexdigest()


def _hello_of(hello: Hello, rank: int) -> Hello:
    """As the transport of this rank of the peer would introduce itself."""
    if not hello.ranks:
        return hello
    pool = hello.ranks[rank]
    name = agent_name(hello.sender.incarnation, rank=rank, ranks=len(hello.ranks))
    return msgspec.structs.replace(
        hello,
        sender=msgspec.structs.replace(hello.sender, incarnation=name),
        nixl_metadata=pool.nixl_metadata,
        pool_address=pool.pool_address,
        device_id=pool.device_id,
        groups=pool.groups,
        ranks=(),
    )


def _problem_with(hello: Hello, ranks: int, kv_heads: int) -> str | None:
    """Why the heads of a peer's ranks do not fit the plan; None if they do."""
    if len(hello.ranks) == 1 or not can_hold(kv_heads, ranks):
        return f"{len(hello.ranks)} ranks cannot share its {kv_heads} KV heads"
    expected = [heads_on(kv_heads, rank=rank, size=ranks) for rank in range(ranks)]
    if hello.heads != len(expected[0]):
        return (
            f"its pages hold {hello.heads} KV heads, where each of {ranks} ranks has {len(expected[0])} of {kv_heads}"
        )
    firsts = [heads.start for heads in expected]
    theirs = [pool.first_head for pool in hello.ranks] or [0]
    if theirs != firsts:
        return f"its ranks' KV heads begin at {theirs}, ours would at {firsts}"
    return None


def _problem_with_groups(hello: Hello, own: Hello, states: HeadStates | None) -> str | None:
    """Why what a peer keeps in further groups of layers is not what this engine keeps; None if it is.

    Of `states` that ranks divide, each rank of the peer has to have its share.
    """
    if states is not None and hello.num_ranks != own.num_ranks:
        expected = states.slot_bytes(hello.num_ranks)
        pools = [pool.groups for pool in hello.ranks] or [hello.groups]
        found = [[] if groups is UNSET else [group.slot_bytes for group in groups] for groups in pools]
        if expected and found == [[expected]] * hello.num_ranks:
            return None
        return f"{hello.num_ranks} ranks have states of {found} bytes; {states.heads} heads are {expected} on each"
    if _layouts(hello) != _layouts(own):
        return f"its states are {_layouts(hello)}, ours {_layouts(own)}"
    if own.groups is not UNSET and hello.num_ranks != own.num_ranks:
        return f"its states are divided among {hello.num_ranks} ranks, ours among {own.num_ranks}"
    return None


def _layouts(hello: Hello) -> list[str]:
    return [] if hello.groups is UNSET else [group.layout for group in hello.groups]
