"""Slices of unequal numbers of ranks over NIXL: how many ranges NIXL gets, what arrives, and what both sides prove."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.nixl.agent import NixlAgent
from tandem_engine.disaggregation.nixl.transport import NixlTransport
from tandem_engine.disaggregation.ranks import transport as ranks_transport
from tandem_engine.disaggregation.transport import DigestOrder, Push, PushDone, PushKey
from tandem_testing.rank_fabric import RankedNode, ranked_node

HEADS, LAYERS, PAGES = 4, 32, 64
SOURCE = tuple(PageId(page) for page in range(1, 1 + PAGES))
TARGET = tuple(PageId(page) for page in range(PAGES, 0, -1))
KEY = PushKey(room="room", generation=1, first=0, count=PAGES)
PATIENCE_S = 60.0


@dataclass
class NixlFabric:
    """Joins ranks to NIXL, in place of a `FakeFabric`."""

    stack: ExitStack
    transports: list[NixlTransport] = field(default_factory=list)

    def join(self, me, pool, clock, states=None) -> NixlTransport:
        transport = NixlTransport(me=me, pool=pool, clock=MonotonicClock(), states=states)
        self.stack.callback(transport.close)
        return transport


@contextmanager
def nodes(senders: int, receivers: int, *, packs: bool) -> Iterator[tuple[RankedNode, RankedNode, torch.Tensor]]:
    """A writer and a receiver that know each other, and the pages of the writer as one rank would have them."""
    with ExitStack() as stack:
        fabric = NixlFabric(stack)
        here, there = (
            ranked_node(fabric, name, size, kv_heads=HEADS, num_pages=PAGES + 1, num_layers=LAYERS)
            for name, size in ((f"p{senders}{packs}", senders), (f"d{receivers}{packs}", receivers))
        )
        hello = msgspec.structs.replace(there.ranks[0].hello(), unpacks=packs)
        for rank in here.ranks:
            rank.connect(hello)
        whole = torch.randn(PAGES + 1, LAYERS, 2, HEADS, 4, 2)
        here.fill(whole)
        yield here, there, whole


def until(node: RankedNode, count: int) -> list[object]:
    """So many events of a node."""
    events, deadline = [], time.monotonic() + PATIENCE_S
    while len(events) < count:
        assert time.monotonic() < deadline, events
        events += node.poll()
        time.sleep(0.001)
    return events


def ranges_of(senders: int, receivers: int, monkeypatch: pytest.MonkeyPatch, *, packs: bool) -> int:
    """Moves `PAGES` pages and returns how many ranges NIXL got for them, on all ranks."""
    counts = []
    write = NixlAgent.write

    def counted(self, peer, descriptors, device):
        counts.append(len(descriptors.source))
        return write(self, peer, descriptors, device)

    monkeypatch.setattr(NixlAgent, "write", counted)
    with nodes(senders, receivers, packs=packs) as (here, there, whole):
        for rank in here.ranks:
            rank.push(Push(key=KEY, peer=there.name, source=SOURCE, target=TARGET, digest=DigestKind.FULL))
        (done,) = until(here, 1)
        assert isinstance(done, PushDone), done
        order = DigestOrder(
            room="room", generation=1, pages=TARGET, kind=DigestKind.FULL, tail=0, writers=senders, packed=packs
        )
        for rank in there.ranks:
            rank.digest(order)
        (proof,) = until(there, 1)
        assert proof.digests == done.digests
        for heads, pool in zip(whole.chunk(receivers, dim=3), there.pools, strict=True):
            assert torch.equal(pool.data[list(TARGET)], heads[list(SOURCE)])
    return sum(counts)


@pytest.mark.parametrize(("senders", "receivers"), [(1, 4), (4, 1), (2, 4)])
def test_packed_slice_is_a_range_for_each_page(senders, receivers, monkeypatch):
    """32k tokens of 32 layers in pages of 16 tokens were 131,072 ranges for each rank of the receiver."""
    monkeypatch.setattr(ranks_transport, "pays_to_pack", lambda *_: True)
    slices = max(senders, receivers)
    assert ranges_of(senders, receivers, monkeypatch, packs=True) == PAGES * slices


def test_peer_that_unpacks_nothing_gets_a_range_for_each_layer_and_part(monkeypatch):
    """One of an earlier release."""
    assert ranges_of(1, 4, monkeypatch, packs=False) == PAGES * 4 * 2 * LAYERS
