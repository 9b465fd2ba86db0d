"""Lists of the runs of a step: chunks, copies of states, inputs of the convolution, and what padding is."""

from dataclasses import replace

import pytest
import torch

from tandem_engine.forward.batch import ForwardBatch, ForwardMode, Snapshot
from tandem_engine.memory.listed_runs import (
    NO_SLOT,
    ListedRuns,
    RunRoom,
    can_list_runs,
    inputs_before_a_token,
    list_runs,
    no_runs,
)
from tandem_engine.memory.state_pool import StatePool, StateSpec
from tandem_testing.forward_builders import Seq, make_batch
from tandem_testing.triton_kernels.tensors import kernels_on

HISTORY = 3


def step(*, snapshots: tuple[Snapshot, ...] = ()) -> ForwardBatch:
    """70 tokens that begin a sequence, 2 behind 5 others, and two decodes, of which one begins."""
    sequences = [
        Seq(seq_len=70, extend_len=70, pages=[1, 2, 3, 4, 5], row=4),
        Seq(seq_len=7, extend_len=2, pages=[6], row=2),
        Seq(seq_len=9, decode=True, pages=[7], row=3),
        Seq(seq_len=1, decode=True, pages=[8], row=1),
    ]
    return replace(make_batch(sequences), snapshots=snapshots)


def listed(batch: ForwardBatch, room: RunRoom | None = None) -> ListedRuns:
    return list_runs(batch, HISTORY, room or RunRoom.of(batch))


def test_sequences_have_chunks_and_decodes_are_apart():
    found = listed(step())
    assert found.rows.tolist() == [4, 2]
    assert found.fresh.tolist() == [True, False]
    assert found.first_chunks.tolist() == [0, 2, 3]
    counts = (found.chunk_tokens < 74).sum(1).tolist()
    assert (counts, found.chunk_tokens[:, 0].tolist()) == ([64, 6, 2], [0, 64, 70])
    assert found.decode_tokens.tolist() == [72, 73]
    assert (found.decode_rows.tolist(), found.decode_fresh.tolist()) == ([3, 1], [False, True])


def test_tokens_of_prompts_have_a_place_each_in_chunks():
    tokens = listed(step()).chunk_tokens.flatten().tolist()
    assert [token for token in tokens if token < 74] == list(range(72)), "decodes are no tokens of chunks"


def test_chunk_ends_where_a_state_is_copied():
    found = listed(step(snapshots=(Snapshot(0, 10, 8), Snapshot(0, 64, 9))))
    counts = (found.chunk_tokens < 74).sum(1).tolist()
    assert counts == [10, 54, 6, 2]
    assert found.chunk_slots.tolist() == [8, 9, 0, 0]
    assert found.first_chunks.tolist() == [0, 3, 4]
    assert found.rows.tolist() == [4, 2]


def test_whole_chunks_are_copied_without_a_cut():
    found = listed(step(snapshots=(Snapshot(0, 64, 9),)))
    assert found.chunk_slots.tolist() == [9, 0, 0]


def test_inputs_before_a_token_are_those_of_its_sequence():
    """Indices below 6 are the histories of two sequences."""
    found, first = listed(step()), 2 * HISTORY
    assert found.conv_inputs[0].tolist() == [0, 1, 2]
    assert found.conv_inputs[2].tolist() == [2, first, first + 1]
    assert found.conv_inputs[5].tolist() == [first + 2, first + 3, first + 4]
    assert found.conv_inputs[70].tolist() == [3, 4, 5]
    assert found.conv_inputs[71].tolist() == [4, 5, first + 70]


def test_newest_inputs_are_kept_for_sequences_and_copies():
    found, first = listed(step(snapshots=(Snapshot(0, 2, 8),))), 2 * HISTORY
    assert found.kept_slots.tolist() == [4, 2, 8, 0, 0, 0]
    assert found.kept_inputs[0].tolist() == [first + 67, first + 68, first + 69]
    assert found.kept_inputs[1].tolist() == [5, first + 70, first + 71]
    assert found.kept_inputs[2].tolist() == [2, first, first + 1]


def test_padding_names_no_sequence_and_no_token():
    batch, room = step(), RunRoom(tokens=80, sequences=4, chunks=6, decodes=5)
    assert room.holds(RunRoom.of(batch))
    found = listed(batch, room)
    assert found.first_chunks.tolist() == [0, 2, 3, 3, 3]
    assert found.rows.tolist() == [4, 2, 0, 0]
    assert found.chunk_tokens[3:].unique().tolist() == [80]
    assert (found.decode_rows.tolist(), found.decode_tokens.tolist()) == ([3, 1, *[NO_SLOT] * 3], [72, 73, 80, 80, 80])
    assert found.kept_slots.tolist() == [4, 2, *[0] * 8]


def test_run_lists_are_loaded_into_captured_tensors_in_place():
    batch, room = step(), RunRoom(tokens=80, sequences=4, chunks=6, decodes=5)
    captured = no_runs(room, HISTORY, torch.device("cpu"))
    assert captured.first_chunks.tolist() == [0] * 5
    assert captured.decode_rows.unique().tolist() == [NO_SLOT]
    places = [tensor.data_ptr() for tensor in captured.tensors]
    captured.load(listed(batch, room))
    assert [tensor.data_ptr() for tensor in captured.tensors] == places
    for own, given in zip(captured.tensors, listed(batch, room).tensors, strict=True):
        assert torch.equal(own, given)


@pytest.mark.parametrize(
    ("mode", "can"),
    [(ForwardMode.EXTEND, True), (ForwardMode.MIXED, True), (ForwardMode.TARGET_VERIFY, False)],
)
def test_runs_of_drafts_are_not_listed(mode, can):
    assert can_list_runs(replace(step(), mode=mode)) is can
    assert not can_list_runs(make_batch([Seq(seq_len=9, decode=True, pages=[7], row=3)]))


def test_runs_are_listed_where_kernels_move_states_on():
    spec = StateSpec(layers=1, history=3, channels=16, heads=2, key_size=4, value_size=4, dtype=torch.float32)
    states = StatePool(spec, rows=2, device="cpu")
    assert inputs_before_a_token(states) is None
    with kernels_on("cpu"):
        assert inputs_before_a_token(states) == HISTORY
        assert inputs_before_a_token(None) is None
