"""Pages as address ranges."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.disaggregation.nixl.layout import Descriptors, Region, describe
from tandem_engine.names import PageId

HERE = Region(1000, 10, 50, "DRAM", 0)
THERE = Region(5000, 10, 50, "VRAM", 3)


def pages(*ids: int) -> tuple[PageId, ...]:
    return tuple(PageId(i) for i in ids)


def test_neighbours_on_both_sides_become_one_range():
    assert describe(HERE, pages(1, 2, 3), THERE, pages(7, 8, 9)) == Descriptors([(1010, 30, 0)], [(5070, 30, 3)])


def test_a_gap_on_either_side_starts_a_new_range():
    assert describe(HERE, pages(1, 2, 4), THERE, pages(7, 9, 10)) == Descriptors(
        [(1010, 10, 0), (1020, 10, 0), (1040, 10, 0)], [(5070, 10, 3), (5090, 10, 3), (5100, 10, 3)]
    )


@given(st.lists(st.tuples(st.integers(1, 49), st.integers(1, 49)), min_size=1, max_size=20))
def test_ranges_move_every_page_to_its_place(moves):
    source, target = pages(*(a for a, _ in moves)), pages(*(b for _, b in moves))
    descriptors = describe(HERE, source, THERE, target)
    moved = []
    for (start, size, _), (goal, goal_size, _) in zip(*descriptors, strict=True):
        assert size == goal_size
        moved += [((start + i - 1000) // 10, (goal + i - 5000) // 10) for i in range(0, size, 10)]
    assert moved == moves
