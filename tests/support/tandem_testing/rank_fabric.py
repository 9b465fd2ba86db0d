"""Engines of several ranks on a `FakeFabric`, as far as transports go. Its ranks poll on threads of their own."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Generic, TypeVar

import torch

from tandem_engine.disaggregation.ranks.slices import heads_on
from tandem_engine.disaggregation.ranks.transport import RankedTransport, RankPlace
from tandem_engine.disaggregation.transport import TransportEvent
from tandem_engine.engine.peer_setup import divided
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.state_pool import StatePool
from tandem_testing.disagg_network import make_peer
from tandem_testing.fake_transport import FakeFabric, FakeTransport
from tandem_testing.scheduler_builders import ManualClock

T = TypeVar("T")

PATIENCE_S = 60.0
"""A rank that does not come has left the common order [same-collectives]."""


@dataclass
class Meeting(Generic[T]):
    """What `Agreement.gather` does, between threads."""

    size: int
    values: list[T] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._barrier = Barrier(self.size, timeout=PATIENCE_S)
        self.values = [None] * self.size

    def gather(self, rank: int) -> Callable[[T], Sequence[T]]:
        def gathered(value: T) -> Sequence[T]:
            self.values[rank] = value
            self._barrier.wait()
            everything = [*self.values]
            self._barrier.wait()
            return everything

        return gathered


@dataclass(kw_only=True)
class RankedNode:
    """One engine's transports, rank by rank."""

    name: str
    ranks: list[RankedTransport]
    locals: list[FakeTransport]
    pools: list[KvPool]
    clock: ManualClock
    states: list[StatePool] = field(default_factory=list)

    def poll(self) -> list[TransportEvent]:
        """What all ranks report in one turn; they must report the same."""
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            first, *others = threads.map(RankedTransport.poll, self.ranks)
        assert all(other == first for other in others)
        return first

    def connect(self, other: "RankedNode") -> None:
        for rank in self.ranks:
            rank.connect(other.ranks[0].hello())

    def fill(self, whole: torch.Tensor) -> None:
        """`whole`: [pages, layers, 2, KV heads of the model, slots, head_dim]."""
        for rank, pool in enumerate(self.pools):
            held = heads_on(whole.shape[3], rank=rank, size=len(self.pools))
            pool.data.copy_(whole[:, :, :, held.start : held.stop])

    def holds(self, whole: torch.Tensor, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether pages `target` of every rank hold its heads of pages `source` of `whole`."""
        return all(
            torch.equal(pool.data[[*target]], whole[[*source]][:, :, :, held.start : held.stop])
            for rank, pool in enumerate(self.pools)
            for held in [heads_on(whole.shape[3], rank=rank, size=len(self.pools))]
        )


def ranked_node(
    fabric: FakeFabric,
    name: str,
    size: int,
    *,
    kv_heads: int,
    num_pages: int = 9,
    num_layers: int = 2,
    facts: Sequence[Mapping[str, object]] = (),
    states: Sequence[StatePool] = (),
) -> RankedNode:
    """`facts`: further fields of each rank's `Hello`. `states`: of each rank."""
    me, clock = make_peer(name), ManualClock()
    pools = [
        KvPool(
            num_pages=num_pages,
            num_layers=num_layers,
            num_kv_heads=len(heads_on(kv_heads, rank=rank, size=size)),
            head_dim=2,
            page_size=4,
            dtype=torch.float32,
            device="cpu",
        )
        for rank in range(size)
    ]
    places = [
        RankPlace(rank=rank, size=size, kv_heads=kv_heads, states=divided(states[rank], size) if states else None)
        for rank in range(size)
    ]
    transports = [
        fabric.join(place.agent(me), pool, clock, own)
        for place, pool, own in zip(places, pools, states or [None] * size, strict=True)
    ]
    for transport, fields in zip(transports, facts, strict=False):
        transport.facts |= fields
    hellos = [transport.hello() for transport in transports]
    news: Meeting = Meeting(size)
    ranks = [
        RankedTransport.build(
            local=transport,
            me=me,
            place=place,
            gather_hellos=lambda _hello: hellos,
            gather=news.gather(place.rank),
            clock=clock,
        )
        for place, transport in zip(places, transports, strict=True)
    ]
    return RankedNode(name=me.incarnation, ranks=ranks, locals=transports, pools=pools, clock=clock, states=[*states])
