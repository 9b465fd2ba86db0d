"""Pages as address ranges."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.disaggregation.nixl.layout import Region, all_pages, describe
from tandem_engine.names import PageId

HERE = Region(1000, 10, 50, "DRAM", 0)
THERE = Region(5000, 10, 50, "VRAM", 3)


def pages(*ids: int) -> tuple[PageId, ...]:
    return tuple(PageId(i) for i in ids)


@given(st.lists(st.tuples(st.integers(1, 49), st.integers(1, 49)), min_size=1, max_size=20))
def test_ranges_move_every_page_to_its_place(moves):
    source, target = pages(*(a for a, _ in moves)), pages(*(b for _, b in moves))
    here, there = (side.tolist() for side in describe(HERE, source, THERE, target, range(1)))
    assert here == [[1000 + 10 * page, 10, 0] for page in source]
    assert there == [[5000 + 10 * page, 10, 3] for page in target]


def test_some_layers_of_a_page_are_one_range_each():
    here, there = HERE._replace(layers=5), THERE._replace(layers=5)
    parts = describe(here, pages(1, 2), there, pages(7, 8), range(2, 4))
    assert parts.source.tolist() == [[1014, 4, 0], [1024, 4, 0]]
    assert parts.target.tolist() == [[5074, 4, 3], [5084, 4, 3]]


def test_a_pool_is_described_page_by_page():
    assert all_pages(THERE._replace(num_pages=3)).tolist() == [[5000, 10, 3], [5010, 10, 3], [5020, 10, 3]]
