"""Heads of states between numbers of ranks: each head arrives where its rank keeps it, and is proved there."""

import ctypes

import pytest
import torch

from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl.layout import describe
from tandem_engine.disaggregation.nixl.transport import region_of_states
from tandem_engine.disaggregation.ranks.slices import HeadSlice, head_slices
from tandem_engine.disaggregation.transport import HeadStates
from tandem_engine.memory.state_pool import PartedSpec, ShapedPart, StatePool, StateSpec
from tandem_testing.divided_states import KEY_HEADS, divided_states, spec_of, whole_states

SENT, RECEIVED = 2, 3
"""Slots."""


@pytest.fixture
def whole() -> StatePool:
    return whole_states()


def write(one: HeadSlice, source: StatePool, target: StatePool) -> None:
    """As NIXL does."""
    here, there = region_of_states(source), region_of_states(target)
    ranges = describe(here, [SENT], there, [RECEIVED], range(1), one.part)
    for (at, size, _), (to, room, _) in zip(ranges.source.tolist(), ranges.target.tolist(), strict=True):
        assert size == room
        ctypes.memmove(to, at, size)


def digest(pool: StatePool, slot: int, heads: range) -> tuple[int, ...]:
    digester = PageDigester(pool, head_blocks=pool.head_blocks)
    return digester.begin([slot], room="room", generation=1, first=0, heads=heads, group=1).take()


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (4, 2), (2, 4), (1, 4)])
def test_heads_of_each_rank_arrive_whole_and_proved(whole, senders, receivers):
    sources, targets = divided_states(senders, whole), divided_states(receivers)
    for one in head_slices(KEY_HEADS, senders=senders, receivers=receivers):
        source, target = sources[one.sender], targets[one.receiver]
        write(one, source, target)
        assert digest(source, SENT, one.part.source) == digest(target, RECEIVED, one.part.target)
    for expected, found in zip(divided_states(receivers, whole), targets, strict=True):
        assert torch.equal(found.bytes_view()[RECEIVED], expected.bytes_view()[SENT])


@pytest.mark.parametrize("byte", [0, 5759, 5760, 6191])
def test_byte_of_a_head_that_differs_is_noticed(whole, byte):
    """The first and the last of the matrices of two heads, and of their inputs in one token."""
    [source], [target, _] = divided_states(1, whole), divided_states(2)
    one = head_slices(KEY_HEADS, senders=1, receivers=2)[0]
    write(one, source, target)
    target.bytes_view()[RECEIVED][byte] += 1
    assert digest(source, SENT, one.part.source) != digest(target, RECEIVED, one.part.target)


def test_runs_of_heads_fill_a_slot():
    for ranks in (1, 2, 4):
        spec = spec_of(ranks)
        states = HeadStates(heads=KEY_HEADS, head_bytes=sum(spec.head_blocks))
        assert (spec.key_heads, states.slot_bytes(ranks)) == (KEY_HEADS // ranks, spec.slot_bytes)
        assert len(spec.head_blocks) == 3 + 3 * 3 * 2
    assert HeadStates(heads=KEY_HEADS, head_bytes=1000).slot_bytes(3) == 0


@pytest.mark.parametrize(
    "spec",
    [
        StateSpec(layers=1, history=1, channels=7, heads=2, key_size=4, value_size=3, dtype=torch.float32),
        StateSpec(layers=1, history=1, channels=3, heads=1, key_size=1, value_size=1, dtype=torch.float32),
        PartedSpec(parts=(ShapedPart((2, 3), torch.float32),), layers=1),
    ],
    ids=["other-channels", "less-than-alignment", "computed-by-transformers"],
)
def test_states_with_indistinct_heads_are_not_divided(spec):
    assert StatePool(spec, rows=1, device="cpu").head_blocks == ()
