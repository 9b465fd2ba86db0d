"""States between engines with unequal numbers of ranks: by slices of their own, joined with those of pages."""

import pytest
import torch

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.ranks.slices import read_slice_room
from tandem_engine.disaggregation.transport import DigestOrder, Digests, Push, PushDone, PushFailed, PushKey
from tandem_engine.messages.transfer import STATES
from tandem_testing.divided_states import divided_states, whole_states
from tandem_testing.fake_transport import FakeFabric, Fate
from tandem_testing.rank_fabric import RankedNode, ranked_node

SOURCE, TARGET = (PageId(1), PageId(2)), (PageId(7), PageId(5))
SLOT, GRANTED = (PageId(3),), (PageId(2),)
UNEQUAL = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)]


class Link:
    """A writer and a receiver that know each other and have granted pages and a slot."""

    def __init__(self, senders: int, receivers: int, *, kv_heads: int) -> None:
        self.fabric, self.states = FakeFabric(), whole_states()
        self.here = ranked_node(
            self.fabric, "p", senders, kv_heads=kv_heads, states=divided_states(senders, self.states)
        )
        self.there = ranked_node(self.fabric, "d", receivers, kv_heads=kv_heads, states=divided_states(receivers))
        self.here.connect(self.there)
        self.whole = torch.randn(9, 2, 2, kv_heads, 4, 2)
        self.here.fill(self.whole)

    def push(self) -> list[PushDone | PushFailed]:
        for group, source, target in ((0, SOURCE, TARGET), (STATES, SLOT, GRANTED)):
            key = PushKey(room="room", generation=3, first=0, count=len(source), group=group)
            for rank in self.here.ranks:
                rank.push(Push(key=key, peer=self.there.name, source=source, target=target))
        self.fabric.advance()
        return self.here.poll()

    def prove(self, *, writers: int | None = None, pages: tuple[PageId, ...] = TARGET) -> Digests:
        order = DigestOrder(
            room="room",
            generation=3,
            pages=pages,
            kind=DigestKind.SAMPLED,
            tail=0,
            writers=len(self.here.ranks) if writers is None else writers,
            states=GRANTED,
        )
        for rank in self.there.ranks:
            rank.digest(order)
        assert self.there.poll() == []
        [digests] = self.there.poll()
        return digests

    def arrived(self) -> bool:
        """Every rank has its heads of the state, and of the pages."""
        expected = divided_states(len(self.there.ranks), self.states)
        states = zip(expected, self.there.states, strict=True)
        return self.there.holds(self.whole, SOURCE, TARGET) and all(
            torch.equal(found.bytes_view()[GRANTED[0]], whole.bytes_view()[SLOT[0]]) for whole, found in states
        )


def digests_of(ended: list[PushDone | PushFailed]) -> tuple[int, ...]:
    """Of pages, then of the state."""
    assert all(isinstance(event, PushDone) for event in ended)
    return tuple(digest for event in sorted(ended, key=lambda event: event.key.group) for digest in event.digests)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("senders", "receivers"), [*UNEQUAL, (2, 2)])
def test_ranks_receive_their_heads_of_states_and_pages(senders, receivers, kv_heads):
    """With fewer KV heads than ranks, pages and states come from other ranks."""
    link = Link(senders, receivers, kv_heads=kv_heads)
    ended = link.push()
    assert link.arrived()
    assert link.prove() == Digests(room="room", generation=3, digests=digests_of(ended))


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 2)])
def test_state_without_pages_is_proved(senders, receivers):
    link = Link(senders, receivers, kv_heads=2)
    assert link.prove(pages=()).digests[:-1] == ()
    sent = digests_of(link.push())
    assert link.prove(pages=()).digests == sent[-1:]


@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
def test_state_that_one_rank_lacks_proves_false(senders, receivers):
    link = Link(senders, receivers, kv_heads=2)
    last = (senders - 1, receivers - 1)

    def fate(push: Push) -> Fate:
        name = read_slice_room(push.key.room)
        return Fate(corrupt=push.key.group == STATES and (name.sender, name.receiver) == last)

    link.fabric.fates = fate
    sent, found = digests_of(link.push()), link.prove().digests
    assert [mine == theirs for mine, theirs in zip(sent, found, strict=True)] == [True, True, False]


@pytest.mark.parametrize("writers", [1, 3, 4, 7])
def test_record_of_another_rank_count_proves_no_state(writers):
    link = Link(2, 4, kv_heads=4)
    sent = digests_of(link.push())
    assert link.prove(writers=writers).digests[-1] != sent[-1]


def refusal(here: RankedNode, there: RankedNode) -> str:
    here.connect(there)
    key = PushKey(room="room", generation=3, first=0, count=1, group=STATES)
    for rank in here.ranks:
        rank.push(Push(key=key, peer=there.name, source=SLOT, target=GRANTED))
    [failed] = here.poll()
    assert isinstance(failed, PushFailed)
    return failed.reason


def test_peer_whose_states_are_of_another_size_is_refused():
    fabric = FakeFabric()
    here = ranked_node(fabric, "p", 1, kv_heads=4, states=divided_states(1))
    there = ranked_node(fabric, "d", 2, kv_heads=4, states=divided_states(4)[:2])
    assert "2 ranks have states of" in refusal(here, there)


def test_peer_without_states_is_refused():
    fabric = FakeFabric()
    here = ranked_node(fabric, "p", 1, kv_heads=4, states=divided_states(1))
    assert "2 ranks have states of [[], []] bytes" in refusal(here, ranked_node(fabric, "d", 2, kv_heads=4))
