"""Pages as address ranges."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.nixl.layout import Region, describe
from tandem_testing import cpu_kernel_reference as reference

HERE = Region(1000, 10, 50, "DRAM", 0)
THERE = Region(5000, 10, 50, "VRAM", 3)


def pages(*ids: int) -> tuple[PageId, ...]:
    return tuple(PageId(i) for i in ids)


def described(source: tuple[PageId, ...], target: tuple[PageId, ...]) -> tuple[list[list[int]], list[list[int]]]:
    descriptors = describe(HERE, source, THERE, target)
    return descriptors.source.tolist(), descriptors.target.tolist()


def test_neighbours_on_both_sides_become_one_range():
    assert described(pages(1, 2, 3), pages(7, 8, 9)) == ([[1010, 30, 0]], [[5070, 30, 3]])


def test_gap_on_either_side_starts_a_new_range():
    assert described(pages(1, 2, 4), pages(7, 9, 10)) == (
        [[1010, 10, 0], [1020, 10, 0], [1040, 10, 0]],
        [[5070, 10, 3], [5090, 10, 3], [5100, 10, 3]],
    )


def test_pages_in_falling_order_are_no_neighbours():
    assert len(described(pages(3, 2, 1), pages(3, 2, 1))[0]) == 3


@given(st.lists(st.tuples(st.integers(1, 49), st.integers(1, 49)), min_size=1, max_size=20))
def test_ranges_move_every_page_to_its_place(moves):
    source, target = pages(*(a for a, _ in moves)), pages(*(b for _, b in moves))
    moved, ranges = [], described(source, target)
    for (start, size, _), (goal, goal_size, _) in zip(*ranges, strict=True):
        assert size == goal_size
        moved += [((start + i - 1000) // 10, (goal + i - 5000) // 10) for i in range(0, size, 10)]
    assert moved == moves
    runs = [((a - 1000) // 10, (b - 5000) // 10, size // 10) for (a, size, _), (b, _, _) in zip(*ranges, strict=True)]
    assert runs == [*reference.merged_runs(source, target)]


def test_some_layers_of_a_page_are_one_range_each():
    here, there = HERE._replace(layers=5), THERE._replace(layers=5)
    parts = describe(here, pages(1, 2), there, pages(7, 8), range(2, 4))
    assert parts.source.tolist() == [[1014, 4, 0], [1024, 4, 0]]
    assert parts.target.tolist() == [[5074, 4, 3], [5084, 4, 3]]


def test_all_layers_are_the_whole_page():
    here = HERE._replace(layers=5)
    everything = describe(here, pages(1, 2), THERE, pages(7, 8), range(5))
    assert everything.source.tolist() == [[1010, 20, 0]]
