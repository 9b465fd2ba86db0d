import pytest
import torch

from tandem_engine.base.names import PADDING_ROW, PageId, ReqPoolIdx
from tandem_engine.memory.allocator import ReqToTokenPool


@pytest.fixture
def rows() -> ReqToTokenPool:
    return ReqToTokenPool(max_rows=2, max_pages=4)


def alloc(rows: ReqToTokenPool) -> ReqPoolIdx:
    row = rows.alloc()
    assert row is not None
    return row


def pages(*ids: int) -> list[PageId]:
    return [PageId(i) for i in ids]


def test_padding_row_is_never_given_out(rows: ReqToTokenPool) -> None:  # [dummy-page]
    given = [alloc(rows), alloc(rows)]
    assert sorted(given) == [1, 2]
    assert rows.alloc() is None
    assert rows.table[PADDING_ROW].tolist() == [0, 0, 0, 0]


def test_page_table_is_int32_on_cpu_with_one_extra_row(rows: ReqToTokenPool) -> None:
    assert rows.table.shape == (3, 4)
    assert rows.table.dtype == torch.int32
    assert rows.table.device.type == "cpu"


def test_page_table_row_has_written_pages_then_dummy_page(rows: ReqToTokenPool) -> None:
    row = alloc(rows)
    rows.write(row, 0, pages(7, 8))
    rows.write(row, 2, pages(9))
    assert rows.table[row].tolist() == [7, 8, 9, 0]


def test_rewrite_in_the_middle_keeps_later_entries(rows: ReqToTokenPool) -> None:
    row = alloc(rows)
    rows.write(row, 0, pages(7, 8, 9))
    rows.write(row, 0, pages(5, 6))
    assert rows.table[row].tolist() == [5, 6, 9, 0]


def test_recycled_row_shows_nothing_of_its_last_request(rows: ReqToTokenPool) -> None:
    first = alloc(rows)
    rows.write(first, 0, pages(7, 8, 9))
    rows.free(first)
    second = alloc(rows)
    rows.write(second, 0, pages(5))
    assert second == first
    assert rows.table[second].tolist() == [5, 0, 0, 0]


def test_freed_row_is_zeroed(rows: ReqToTokenPool) -> None:
    row = alloc(rows)
    rows.write(row, 0, pages(7, 8))
    rows.free_after(1, row)
    assert not rows.table.any()


def test_fenced_row_is_given_out_only_after_its_step(rows: ReqToTokenPool) -> None:
    fenced, other = alloc(rows), alloc(rows)
    rows.free_after(5, fenced)
    assert rows.alloc() is None
    rows.settled(4)
    assert rows.available == 0
    rows.settled(5)
    assert alloc(rows) == fenced
    assert {*rows.in_use()} == {fenced, other}


def test_row_freed_after_completed_step_is_not_fenced(rows: ReqToTokenPool) -> None:
    row = alloc(rows)
    rows.settled(5)
    rows.free_after(5, row)
    assert rows.available == 2


@pytest.mark.parametrize("step", [None, 3])
def test_row_freed_twice_is_a_bug(rows: ReqToTokenPool, step: int | None) -> None:  # [single-release]
    row = alloc(rows)
    if step is None:
        rows.free(row)
    else:
        rows.free_after(step, row)
    with pytest.raises(AssertionError, match=f"row {row} freed twice"):
        rows.free(row)


def test_padding_row_cannot_be_freed(rows: ReqToTokenPool) -> None:
    with pytest.raises(AssertionError, match="row 0"):
        rows.free(PADDING_ROW)


def test_writing_must_not_leave_a_gap(rows: ReqToTokenPool) -> None:
    row = alloc(rows)
    rows.write(row, 0, pages(7))
    with pytest.raises(AssertionError, match="leaves a gap"):
        rows.write(row, 2, pages(9))


def test_writing_past_the_end_of_a_row_is_a_bug(rows: ReqToTokenPool) -> None:
    row = alloc(rows)
    with pytest.raises(AssertionError, match="would need 5 pages"):
        rows.write(row, 0, pages(1, 2, 3, 4, 5))


def test_free_row_cannot_be_written(rows: ReqToTokenPool) -> None:
    row = alloc(rows)
    rows.free(row)
    with pytest.raises(AssertionError, match="is free"):
        rows.write(row, 0, pages(1))
