"""Names of ranks and slices are read as they were written, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.disaggregation.ranks.slices import SliceRoom, agent_name, read_slice_room, slice_room


def test_rank_is_named_after_the_incarnation_unless_it_is_alone():
    assert agent_name("w@3", rank=1, ranks=2) == "w@3#1"
    assert agent_name("w@3", rank=0, ranks=1) == "w@3"


@given(st.text(min_size=1), st.integers(1, 64), st.integers(1, 64), st.data())
def test_slice_is_read_as_it_was_named(room, senders, receivers, data):
    sender, receiver = (data.draw(st.integers(0, size - 1)) for size in (senders, receivers))
    name = SliceRoom(room, sender, senders, receiver, receivers)
    assert read_slice_room(slice_room(name)) == name


@pytest.mark.parametrize(
    "text", ["room", "2/2>0/1|room", "0/1>1/1|room", "0/65>0/1|room", "0/1>0/1|", "0/1>0/1", "²/3>0/1|r"]
)
def test_name_without_slice_is_not_parsed_as_slice(text):
    assert read_slice_room(text) is None
