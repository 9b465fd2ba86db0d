"""Moves that memory or time leaves no room for: nothing waits forever, and no stream is lost or changed.

The fake model reads its KV, so a page that is missing, torn or stale after a move becomes a wrong token.
"""

import random
from dataclasses import dataclass

import pytest

from tandem_engine.disaggregation.transport import Push
from tandem_engine.scheduler.migration import AT_ONCE
from tandem_testing.disagg_pair import GRANT_TIMEOUT, Side
from tandem_testing.fake_transport import FakeFabric, Fate
from tandem_testing.moving_fleet import MovingFleet, make_fleet
from tandem_testing.scheduler_builders import make_message

PAGES = 36
"""Of four tokens: a third of what the streams of a worker need at their ends."""
STREAMS = 8


@dataclass(kw_only=True)
class Link:
    """Pages go one after the other, in the order of their pushes."""

    fabric: FakeFabric
    ticks_per_page: int
    free_at: int = 0

    def __call__(self, push: Push) -> Fate:
        self.free_at = max(self.free_at, self.fabric.now) + self.ticks_per_page * len(push.source)
        return Fate(delay=self.free_at - self.fabric.now)


def full_fleet(dice: random.Random, *, pages: int = PAGES, **engine: object) -> MovingFleet:
    """Two workers, each with more streams than its memory has pages for."""
    fleet = make_fleet(("a", "b"), usable_pages=pages, max_retractions=500, **engine)
    for side in fleet.sides:
        for i in range(STREAMS):
            prompt = [dice.randrange(1, 90) for _ in range(dice.randrange(8, 16))]
            name = f"{side.peer.worker_id}{i}"
            fleet.submit(make_message(name, prompt, max_tokens=dice.randrange(20, 48)), side)
    for _ in range(12):
        fleet.turn()
    return fleet


def retracted(sides: list[Side]) -> int:
    return sum(side.engine.scheduler.tally.retracted for side in sides)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_streams_of_two_full_workers_swap_places(overlap, seed):  # [moves-without-room]
    """The gateway takes both to have room. What gets no pages gives up after its time, and resumes elsewhere."""
    dice = random.Random(seed)
    fleet = full_fleet(dice, enable_overlap=overlap)
    fleet.fabric.fates = lambda _push: Fate(delay=dice.randrange(8))
    for side in fleet.sides:
        side.engine.scheduler.decode_elsewhere(wanted=True)
    fleet.run(turns=8000)
    fleet.assert_exact()
    assert fleet.moved > 0


@pytest.mark.parametrize("seed", [0, 2])
def test_streams_without_a_place_are_retracted_where_they_are(seed):
    before, full = (full_fleet(random.Random(seed), pages=24) for _ in range(2))
    full.has_room = lambda: False
    for side in full.sides:
        side.engine.scheduler.decode_elsewhere(wanted=True)
    for fleet in (before, full):
        fleet.run()
        fleet.assert_exact()
    assert full.moved == 0
    assert retracted(full.sides) == retracted(before.sides) > 0


def streams_of_one(count: int, **engine: object) -> MovingFleet:
    """Two workers; all streams run on the first."""
    fleet = make_fleet(("a", "b"), usable_pages=400, max_rows=32, **engine)
    for i in range(count):
        fleet.submit(make_message(f"r{i}", range(i + 1, i + 9), max_tokens=120), fleet.sides[0])
    for _ in range(4):
        fleet.turn()
    return fleet


def moving_from(side: Side) -> int:
    return sum(req.handoff is not None and req.handoff.moving for req in side.engine.scheduler.queues.live())


def test_few_streams_move_at_once_over_a_slow_link():  # [moves-without-room]
    fleet = streams_of_one(AT_ONCE + 4)
    a = fleet.sides[0]
    fleet.fabric.fates = lambda _push: Fate(delay=12)
    fleet.drain(a)
    moving = []
    while fleet.moved < len(fleet.streams):
        fleet.turn()
        moving.append(moving_from(a))
        assert len(moving) < 400, f"{fleet.moved} of {len(fleet.streams)} have moved"
    assert max(moving) == AT_ONCE
    fleet.run()
    fleet.assert_exact()


def test_streams_without_a_place_move_once_there_is_one():  # [moves-without-room]
    """Each was asked once without result: it has to be asked again."""
    fleet = streams_of_one(AT_ONCE)
    places = []
    fleet.has_room = lambda: bool(places)
    fleet.drain(fleet.sides[0])
    for _ in range(10):
        fleet.turn()
    assert [stream.moves for stream in fleet.streams] == [0] * AT_ONCE
    places.append("b")
    fleet.run()
    fleet.assert_exact()
    assert fleet.moved == AT_ONCE


def moves_that_wait_for_memory() -> tuple[MovingFleet, Side, Side]:
    """Streams of the first worker are on their way to the second, which has granted pages to some of them alone."""
    fleet = full_fleet(random.Random(0))
    a, b = fleet.sides
    fleet.fabric.fates = lambda _push: Fate(delay=1000)
    fleet.drain(a)
    for _ in range(400):
        if len(b.stage.decode.prealloc) and b.stage.decode.holds.open_transfers():
            return fleet, a, b
        fleet.turn()
    raise AssertionError("no move waits for memory beside one that has it")


def test_moves_that_wait_for_memory_end_when_their_sender_is_silent():  # [moves-without-room]
    fleet, a, b = moves_that_wait_for_memory()
    fleet.end(a, reported=False)
    fleet.turn(GRANT_TIMEOUT + 1.0)
    fleet.turn()
    assert len(b.stage.decode.prealloc) == 0
    b.stage.peer_ended(a.peer.incarnation)
    fleet.run()
    fleet.assert_exact()


def test_fenced_sender_ends_its_moves_at_once_and_frees_pages_when_it_has_ended():  # [moves-without-room]
    """Without waiting for a deadline. Until its process has ended it may still write [late-write]."""
    fleet, a, b = moves_that_wait_for_memory()
    b.stage.peer_gone(a.peer.incarnation)
    assert len(b.stage.decode.prealloc) == b.stage.transferring() == 0
    assert b.stage.fenced_writers() == (a.peer,)
    assert [*b.stage.held_pages()]
    b.stage.peer_ended(a.peer.incarnation)
    assert [*b.stage.held_pages()] == []
    fleet.end(a)
    fleet.run()
    fleet.assert_exact()


@pytest.mark.parametrize("overlap", [False, True])
def test_streams_left_at_the_end_of_a_drain_are_recomputed(overlap):  # [late-moves-recompute]
    """Of four streams two pass the link in the time that their worker has for them."""
    fleet = make_fleet(("a", "b"), usable_pages=400, enable_overlap=overlap)
    a, b = fleet.sides
    streams = [fleet.submit(make_message(f"r{i}", range(i + 1, i + 33), max_tokens=80), a) for i in range(4)]
    for _ in range(8):
        fleet.turn()
    pages = (len(streams[0].message.input_ids) + len(streams[0].tokens)) // 4
    fleet.fabric.fates = Link(fabric=fleet.fabric, ticks_per_page=4)
    fleet.drain(a)
    # A turn of two workers is two ticks: a stream takes two turns per page, and two have arrived after six.
    for _ in range(6 * pages):
        fleet.turn()
    assert fleet.moved == 2
    fleet.end(a)
    fleet.run()
    fleet.assert_exact()
    assert sorted(stream.failures for stream in streams) == [0, 0, 1, 1]
    assert all(stream.side is b for stream in streams)
