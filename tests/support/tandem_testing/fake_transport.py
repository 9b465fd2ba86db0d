"""A transport between engines of one process, with faults on demand. For tests only.

Nothing happens by itself: `FakeFabric.advance` moves time by one tick and delivers what is due, so a test
decides between which two scheduler steps bytes land. Bytes are read from the source pages and written to
the target pages when the push is delivered, not when it is asked for, so reuse of pages by either side
while a push is outstanding shows as wrong bytes, exactly as with the real transport [late-write]. A push that follows a
step moves at most `Push.least_layers` layers per tick, so other things happen between them.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from torch import Tensor

from tandem_engine.base.clock import Clock
from tandem_engine.disaggregation.digest import PageDigester, answer
from tandem_engine.disaggregation.nixl.layout import Descriptors, describe, describe_packed
from tandem_engine.disaggregation.nixl.transport import group_pool, region_of, region_of_states
from tandem_engine.disaggregation.packed_pages import PackedPages, words_of
from tandem_engine.disaggregation.transport import (
    DigestOrder,
    Digests,
    HeadPart,
    PagePool,
    Push,
    PushDone,
    PushFailed,
    PushKey,
    StateSlots,
    TransportEvent,
)
from tandem_engine.forward.kv_progress import VOID
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import Hello


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """What becomes of one push. The default is a perfect fabric."""

    delay: int = 0
    """Ticks until the bytes move. Different delays reorder pushes."""
    corrupt: bool = False
    """One bit of the first page arrives wrong."""
    fail: bool = False
    """The push fails, this one alone."""
    lose_peer: bool = False
    """The push fails and the receiver is lost with it."""
    seconds: float = 0.0
    """The duration that is reported to the sender."""


Fates = Callable[[Push], Fate]
"""Decides the fate of each push when it starts."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Flight:
    sender: "FakeTransport"
    push: Push
    fate: Fate
    due: int
    layers: int = 0
    """Written so far."""


@dataclass(kw_only=True, slots=True)
class FakeFabric:
    """Connects the transports of one test."""

    fates: Fates = field(default=lambda _push: Fate())
    now: int = 0
    endpoints: "dict[str, FakeTransport]" = field(default_factory=dict)
    _flights: list[_Flight] = field(default_factory=list)

    def join(self, me: Peer, pool: PagePool, clock: Clock, states: StateSlots | None = None) -> "FakeTransport":
        """A transport for one engine."""
        transport = FakeTransport(fabric=self, me=me, pool=pool, clock=clock, states=states)
        self.endpoints[me.incarnation] = transport
        return transport

    def kill(self, incarnation: str) -> None:
        """The engine's process dies: what it was sending or about to receive stops."""
        del self.endpoints[incarnation]
        self._flights = [flight for flight in self._flights if flight.sender.me.incarnation != incarnation]

    def start(self, sender: "FakeTransport", push: Push) -> None:
        fate = self.fates(push)
        self._flights.append(_Flight(sender=sender, push=push, fate=fate, due=self.now + fate.delay))

    def advance(self) -> None:
        """One tick: deliver every push that is due, or the next of its layers."""
        due = [flight for flight in self._flights if flight.due <= self.now]
        self.now += 1
        for flight in due:
            # A peer that is lost takes its other flights with it.
            if flight in self._flights and self._deliver(flight):
                self._flights.remove(flight)

    def in_flight(self) -> int:
        return len(self._flights)

    def drop_flights(self, sender: "FakeTransport", peer: str) -> list[PushKey]:
        """Stop what `sender` is pushing to `peer`."""
        dropped = [f for f in self._flights if f.sender is sender and f.push.peer == peer]
        self._flights = [flight for flight in self._flights if flight not in dropped]
        return [flight.push.key for flight in dropped]

    def _deliver(self, flight: _Flight) -> bool:
        """True when the flight is over."""
        sender, push, fate = flight.sender, flight.push, flight.fate
        receiver = self.endpoints.get(push.peer)
        if receiver is None or fate.lose_peer:
            self._flights.remove(flight)
            sender.lose(push.peer, push.key)
            return False
        total = sender.pool_of(push).layout.layers
        ready = total if push.progress is None else push.progress.layers
        if fate.fail or ready == VOID:
            sender.events.append(PushFailed(key=push.key, reason="injected fault, or a failed step", peer_lost=False))
            return True
        layers = min(ready, total if push.progress is None else flight.layers + push.least_layers, total)
        self._write(sender, receiver, flight, layers)
        if layers < total:
            return False
        self._arrive(sender, receiver, flight)
        return True

    def _write(self, sender: "FakeTransport", receiver: "FakeTransport", flight: _Flight, layers: int) -> None:
        push = flight.push
        if push.key.group and push.heads is not None:
            _write_state_heads(sender.states, receiver.states, push, push.heads)
            flight.layers = layers
            return
        if push.packed and push.heads is not None:
            _write_packed(sender.pool, receiver.pool, push, push.heads, range(flight.layers, layers))
            flight.layers = layers
            return
        here, there = _by_heads(sender.pool_of(push)), _by_heads(receiver.pool_of(push))
        heads = push.heads or HeadPart(range(here.shape[3]), range(there.shape[3]))
        source, target = (slice(part.start, part.stop) for part in heads)
        written = slice(flight.layers, layers)
        there[list(push.target), written, :, target] = here[list(push.source), written, :, source]
        flight.layers = layers

    def _arrive(self, sender: "FakeTransport", receiver: "FakeTransport", flight: _Flight) -> None:
        push, key = flight.push, flight.push.key
        digests = sender.digester.begin_sent(push).take()
        if flight.fate.corrupt:
            receiver.pool_of(push).bytes_view()[push.target[0]] ^= 1
        sender.events.append(PushDone(key=key, digests=digests, seconds=flight.fate.seconds))


@dataclass(kw_only=True, slots=True)
class FakeTransport:
    """`KvTransport` of one engine on a `FakeFabric`."""

    fabric: FakeFabric
    me: Peer
    pool: PagePool
    clock: Clock
    states: StateSlots | None = None
    connected: set[str] = field(default_factory=set)
    expected: int = 0
    events: deque[TransportEvent] = field(default_factory=deque)
    verified: deque[Digests] = field(default_factory=deque)
    """Reported one poll later than they could be: a real transport has a thread for them."""
    closed: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    """Further fields of its `Hello`."""

    def hello(self) -> Hello:
        return Hello(
            sender=self.me,
            nixl_metadata=b"",
            pool_address=0,
            page_bytes=self.pool.page_bytes,
            num_pages=self.pool.num_pages,
            heads=self.pool.layout.heads,
            device_id=0,
            groups=UNSET if self.states is None else (group_pool(self.states),),
            **({"device": "DRAM", "unpacks": True} | self.facts),
        )

    def pool_of(self, push: Push) -> PagePool:
        """Of the group of layers that `push` concerns."""
        if not push.key.group:
            return self.pool
        assert self.states is not None, f"group {push.key.group} of an engine that has pages alone"
        return self.states

    @property
    def digester(self) -> PageDigester:
        states = self.states
        own = None if states is None else PageDigester(states, head_blocks=states.head_blocks)
        return PageDigester(self.pool, states=own)

    def rename(self, me: Peer) -> None:
        self.me = me

    def connect(self, hello: Hello) -> None:
        self.connected.add(hello.sender.incarnation)

    def forget(self, incarnation: str) -> None:
        self.connected.discard(incarnation)
        for key in self.fabric.drop_flights(self, incarnation):
            self.events.append(PushFailed(key=key, reason="forgotten", peer_lost=True))

    def packs(self, peer: str) -> bool:
        return False

    def push(self, push: Push) -> None:
        if push.peer not in self.connected:
            self.events.append(PushFailed(key=push.key, reason="not connected", peer_lost=True))
        elif self.clock.now() >= push.start_before:
            self.events.append(PushFailed(key=push.key, reason="the grant expired", peer_lost=False))
        else:
            self.fabric.start(self, push)

    def digest(self, order: DigestOrder) -> None:
        self.verified.append(answer(order, self.digester.begin_order(order)))

    def expect(self, transfers: int) -> None:
        self.expected = transfers

    def poll(self) -> list[TransportEvent]:
        events = [*self.events]
        self.events.clear()
        self.events.extend(self.verified)
        self.verified.clear()
        return events

    @property
    def alone(self) -> bool:
        return True

    @property
    def errors(self) -> int:
        return 0

    def fileno(self) -> int:
        """Nothing to wait for: events come only from `FakeFabric.advance`."""
        return -1

    def close(self) -> None:
        self.closed = True

    def lose(self, peer: str, key: PushKey) -> None:
        """The peer vanished while `key` was being written."""
        self.events.append(PushFailed(key=key, reason="peer lost", peer_lost=True))
        self.forget(peer)


def _by_heads(pool: PagePool) -> Tensor:
    """The bytes of all pages: [num_pages, layers, 2, heads, bytes of a head], a view."""
    return pool.bytes_view().view(pool.num_pages, pool.layout.layers, pool.layout.parts, pool.layout.heads, -1)


def _write_packed(here: PagePool, there: PagePool, push: Push, heads: HeadPart, layers: range) -> None:
    """As the transfer thread does: heads are copied to a slot, unless they are whole pages; one run for each page."""
    if not layers:
        return
    slot = None
    if len(heads.source) < here.layout.heads:
        ring = PackedPages(words=words_of(here), layout=here.layout, register=lambda *_: None, slot_bytes=1 << 16)
        assert ring.room_for(layers, heads.source) >= len(push.source)
        slot = ring.pack(push.source, layers, heads.source)
    regions = region_of(here), region_of(there)
    address = None if slot is None else slot.address
    ranges = describe_packed(regions[0], push.source, regions[1], push.target, layers, heads, slot=address)
    _move(ranges)


def _move(ranges: Descriptors) -> None:
    for (source, size, _), (target, room, _) in zip(ranges.source.tolist(), ranges.target.tolist(), strict=True):
        assert size == room
        ctypes.memmove(target, source, size)


def _write_state_heads(here: StateSlots | None, there: StateSlots | None, push: Push, heads: HeadPart) -> None:
    assert here is not None, "a push of states of an engine that keeps none"
    assert there is not None, "a push of states to an engine that keeps none"
    _move(describe(region_of_states(here), push.source, region_of_states(there), push.target, heads=heads))
