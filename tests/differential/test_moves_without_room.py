"""Moves that memory or time leaves no room for: nothing waits forever, and no stream is lost or changed.

The fake model reads its KV, so a page that is missing, torn or stale after a move becomes a wrong token.
"""

import random
from dataclasses import dataclass

import pytest

from tandem_engine.disaggregation.transport import Push
from tandem_testing.disagg_pair import Side
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
