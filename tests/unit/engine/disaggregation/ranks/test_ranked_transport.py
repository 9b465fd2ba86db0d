"""A transfer between ranks is over when all ranks have done their part, and all of them are notified in the same
turn."""

from itertools import product

import msgspec
import pytest
import torch

from tandem_engine.base.names import DigestKind, LinkTransport, PageId
from tandem_engine.disaggregation.ranks.slices import head_slices, read_slice_room
from tandem_engine.disaggregation.transport import DigestOrder, Digests, Push, PushDone, PushFailed, PushKey
from tandem_testing.fake_transport import FakeFabric, Fate
from tandem_testing.rank_fabric import RankedNode, ranked_node

SOURCE, TARGET = (PageId(1), PageId(2)), (PageId(7), PageId(5))
KEY = PushKey(room="room", generation=3, first=0, count=2)
UNEQUAL = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 2)]


class Link:
    """A writer and a receiver that know each other; the receiver has granted pages."""

    def __init__(self, senders: int, receivers: int, *, kv_heads: int = 4) -> None:
        self.fabric = FakeFabric()
        self.here, self.there = (
            ranked_node(self.fabric, name, size, kv_heads=kv_heads) for name, size in (("p", senders), ("d", receivers))
        )
        self.here.connect(self.there)
        self.whole = torch.randn(9, 2, 2, kv_heads, 4, 2)
        self.here.fill(self.whole)

    def push(self, **more: object) -> None:
        push = Push(key=KEY, peer=self.there.name, source=SOURCE, target=TARGET, **more)
        for rank in self.here.ranks:
            rank.push(push)

    def prove(self, kind: DigestKind = DigestKind.SAMPLED, *, tail: int = 0, writers: int | None = None) -> Digests:
        order = DigestOrder(
            room="room",
            generation=3,
            pages=TARGET,
            kind=kind,
            tail=tail,
            writers=len(self.here.ranks) if writers is None else writers,
        )
        for rank in self.there.ranks:
            rank.digest(order)
        assert self.there.poll() == []
        (digests,) = self.there.poll()
        return digests

    def slow(self, sender: int, receiver: int, fate: Fate) -> None:
        """`fate` is that of one slice alone."""

        def of(push: Push) -> Fate:
            name = read_slice_room(push.key.room)
            return fate if (name.sender, name.receiver) == (sender, receiver) else Fate()

        self.fabric.fates = of


@pytest.mark.parametrize(("kind", "tail"), [(DigestKind.SAMPLED, 0), (DigestKind.SAMPLED, 3), (DigestKind.FULL, 0)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("senders", "receivers"), [*product((1, 2, 4), repeat=2)])
def test_ranks_receive_their_heads_and_digests_agree(senders, receivers, kv_heads, kind, tail):
    link = Link(senders, receivers, kv_heads=kv_heads)
    link.push(digest=kind, tail=tail)
    link.fabric.advance()
    (done,) = link.here.poll()
    assert link.there.holds(link.whole, SOURCE, TARGET)
    assert link.prove(kind, tail=tail) == Digests(room="room", generation=3, digests=done.digests)


@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
def test_transfer_to_ranks_is_done_only_when_the_last_slice_is(senders, receivers):
    link = Link(senders, receivers)
    link.slow(senders - 1, receivers - 1, Fate(delay=2))
    link.push()
    for _ in range(2):
        link.fabric.advance()
        assert link.here.poll() == []
    link.fabric.advance()
    assert [type(event) for event in link.here.poll()] == [PushDone]


@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
def test_one_slice_that_fails_fails_the_push_once_all_have_ended(senders, receivers):
    """An ack promises that nothing more is written [late-write]: by no rank."""
    link = Link(senders, receivers)

    def fate(push: Push) -> Fate:
        name = read_slice_room(push.key.room)
        return Fate(fail=True) if (name.sender, name.receiver) == (0, 0) else Fate(delay=3)

    link.fabric.fates = fate
    link.push()
    for _ in range(3):
        link.fabric.advance()
        assert link.here.poll() == []
    link.fabric.advance()
    (failed,) = link.here.poll()
    assert (type(failed), failed.key, failed.peer_lost) == (PushFailed, KEY, False)


@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
def test_rank_that_is_gone_loses_the_whole_peer(senders, receivers):
    link = Link(senders, receivers)
    link.slow(senders - 1, receivers - 1, Fate(lose_peer=True))
    link.push()
    link.fabric.advance()
    (failed,) = link.here.poll()
    assert (failed.key, failed.peer_lost) == (KEY, True)


@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
def test_flipped_bit_on_one_rank_is_seen_by_all(senders, receivers):
    link = Link(senders, receivers)
    link.slow(senders - 1, receivers - 1, Fate(corrupt=True))
    link.push(digest=DigestKind.FULL)
    link.fabric.advance()
    (done,) = link.here.poll()
    here, there = done.digests, link.prove(DigestKind.FULL).digests
    assert [mine == theirs for mine, theirs in zip(here, there, strict=True)] == [False, True]


@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
def test_missing_slice_is_found_by_the_digests_of_all_ranks(senders, receivers):
    link = Link(senders, receivers)
    link.push()
    link.fabric.advance()
    (done,) = link.here.poll()
    last = head_slices(4, senders=senders, receivers=receivers)[-1]
    link.there.pools[last.receiver].data[TARGET[0], :, :, [*last.part.target]] = 0.0
    assert link.prove().digests[0] != done.digests[0]


@pytest.mark.parametrize("writers", [1, 4, 7])
def test_record_of_another_rank_count_fails_verification(writers):
    link = Link(2, 2)
    link.push()
    link.fabric.advance()
    (done,) = link.here.poll()
    assert link.prove(writers=writers).digests != done.digests


def test_peer_with_other_head_ranges_fails_with_reason():
    link = Link(1, 2)
    hello = link.there.ranks[0].hello()
    swapped = msgspec.structs.replace(hello, ranks=hello.ranks[::-1])
    (sender,) = link.here.ranks
    sender.forget(link.there.name)
    sender.connect(swapped)
    link.push()
    (failed,) = link.here.poll()
    assert failed.reason == "its ranks' KV heads begin at [2, 0], ours would at [0, 2]"
    assert failed.peer_lost


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": 3}, "its pages hold 3 KV heads, where each of 2 ranks has 2 of 4"),
        ({"ranks": 3}, "3 ranks cannot share its 4 KV heads"),
    ],
)
def test_peer_incompatible_with_head_plan_fails_with_reason(change, reason):
    link = Link(1, 2)
    hello = link.there.ranks[0].hello()
    if "ranks" in change:
        change = {"ranks": (*hello.ranks, hello.ranks[0])}
    (sender,) = link.here.ranks
    sender.forget(link.there.name)
    sender.connect(msgspec.structs.replace(hello, **change))
    link.push()
    (failed,) = link.here.poll()
    assert failed.reason == reason


def test_forgotten_peer_ends_the_pushes_of_all_ranks():
    link = Link(2, 4)
    link.slow(0, 0, Fate(delay=100))
    link.push()
    link.fabric.advance()
    assert link.here.poll() == []
    for rank in link.here.ranks:
        rank.forget(link.there.name)
    (failed,) = link.here.poll()
    assert (failed.key, failed.peer_lost) == (KEY, True)


def test_transfer_between_engines_of_one_rank_passes_keys_and_peers_unchanged():
    link = Link(1, 1)
    started = []
    link.fabric.fates = lambda push: started.append(push) or Fate()
    link.push()
    assert [(push.key, push.peer, push.heads) for push in started] == [(KEY, "d@1", None)]


def test_rank_0_awaits_other_ranks_briefly_after_an_event():
    link = Link(2, 2)
    first = link.here.ranks[0]
    assert not first.awaits_ranks
    link.push()
    link.fabric.advance()
    link.here.poll()
    assert first.awaits_ranks
    link.here.clock.time += 1.0
    assert not first.awaits_ranks
    assert not Link(1, 2).here.ranks[0].awaits_ranks


def node_names(node: RankedNode) -> list[str]:
    return [rank.local.hello().sender.incarnation for rank in node.ranks]


def test_each_rank_has_an_agent_of_its_own():
    link = Link(1, 2)
    assert node_names(link.here) == ["p@1"]
    assert node_names(link.there) == ["d@1#0", "d@1#1"]


@pytest.mark.parametrize(
    ("machines", "is_first"), [(("a", "a"), True), (("a", "b"), False), (("a", ""), False), (("", "b"), False)]
)
def test_ranks_on_several_machines_report_no_peer_machine(machines, is_first):
    facts = [
        {"machine": machines[0], "transports": (LinkTransport.TCP, LinkTransport.RDMA, LinkTransport.SHM)},
        {"machine": machines[1], "transports": (LinkTransport.TCP, LinkTransport.SHM)},
    ]
    hello = ranked_node(FakeFabric(), "w", 2, kv_heads=2, facts=facts).ranks[0].hello()
    assert (hello.machine in machines and hello.machine != "") is is_first
    # Where one rank cannot be notified, none is.
    assert (hello.machine == "") is ("" in machines)
    assert hello.transports == (LinkTransport.TCP, LinkTransport.SHM)


@pytest.mark.parametrize(
    ("senders", "receivers", "facts", "packed"),
    [
        (1, 4, {}, True),
        (1, 4, {"unpacks": False}, False),  # a peer of an earlier release
        (4, 1, {}, False),  # a CPU would unpack for as long as ranges take
        (4, 1, {"device": "VRAM"}, True),
        (2, 2, {"device": "VRAM"}, False),  # whole pages
    ],
)
def test_slices_are_packed_where_it_pays_and_the_peer_unpacks_them(senders, receivers, facts, packed):
    link = Link(senders, receivers)
    hello = msgspec.structs.replace(link.there.ranks[0].hello(), **facts)
    pushed = []
    link.fabric.fates = lambda push: pushed.append(push.packed) or Fate()
    for rank in link.here.ranks:
        rank.forget(link.there.name)
        rank.connect(hello)
        assert rank.packs(link.there.name) is packed
        assert not rank.packs("another")
    link.push(digest=DigestKind.FULL)
    link.fabric.advance()
    (done,) = link.here.poll()
    assert {*pushed} == {packed}
    order = DigestOrder(
        room="room", generation=3, pages=TARGET, kind=DigestKind.FULL, tail=0, writers=senders, packed=packed
    )
    for rank in link.there.ranks:
        rank.digest(order)
    link.there.poll()
    (proof,) = link.there.poll()
    assert proof.digests == done.digests
    assert link.there.holds(link.whole, SOURCE, TARGET)
