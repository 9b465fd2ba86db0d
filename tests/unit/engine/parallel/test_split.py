"""The ranks' parts of a tensor are the tensor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.parallel.sharding import INPUTS, OUTPUTS, VOCABULARY, Part, Split, share_of


@given(share=st.integers(1, 50), unit=st.integers(1, 16), size=st.integers(1, 8))
def test_parts_of_all_ranks_are_equal_and_cover_the_dimension_in_order(share, unit, size):
    length = share * unit * size
    parts = [Split(dim=0, unit=unit).part(length, rank=rank, size=size) for rank in range(size)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == length
    assert {part.length for part in parts} == {share * unit}


@given(length=st.integers(1, 500), size=st.integers(1, 8))
def test_padded_parts_are_equally_long_and_hold_every_index_once(length, size):
    parts = [VOCABULARY.part(length, rank=rank, size=size) for rank in range(size)]
    held = [index for part in parts for index in range(part.start, part.stop)]
    assert held == list(range(length))
    assert len({part.length for part in parts}) == 1
    # The layers derive a rank's first token id from its number and the length of its part.
    assert all(part.start in (rank * part.length, length) for rank, part in enumerate(parts))


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 2), (2, 4), (2, 8), (4, 4), (4, 2), (8, 2)])
def test_every_rank_holds_the_kv_head_that_its_query_heads_read(kv_heads, size):
    query_heads, head_dim = 8, 16
    queries, kv = query_heads // size, max(1, kv_heads // size)
    for rank in range(size):
        part = Split(dim=0, unit=head_dim).part(kv_heads * head_dim, rank=rank, size=size)
        held = range(part.start // head_dim, part.stop // head_dim)
        for local in range(queries):
            wanted = (rank * queries + local) // (query_heads // kv_heads)
            assert held[local // (queries // kv)] == wanted


def test_projections_split_by_output_or_by_input():
    assert OUTPUTS.part(96, rank=1, size=2) == INPUTS.part(96, rank=1, size=2) == Part(48, 96, 48)


@pytest.mark.parametrize(("runs", "size", "share"), [(8, 2, 4), (2, 8, 1), (6, 4, None), (4, 6, None)])
def test_runs_are_divided_or_repeated_or_not_shared_at_all(runs, size, share):
    assert share_of(runs, size) == share
