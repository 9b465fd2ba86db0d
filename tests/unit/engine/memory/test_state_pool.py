"""States of sequences: where they lie, and which of them a step reads and writes."""

from dataclasses import replace

import pytest
import torch

from tandem_engine.base.names import PADDING_ROW
from tandem_engine.executor.warm_up import padding
from tandem_engine.forward.batch import ForwardBatch, ForwardMode, Snapshot
from tandem_engine.memory.state_pool import (
    DraftedInputs,
    DraftedRuns,
    Run,
    StateCopy,
    StatePool,
    StateSpec,
    StepStates,
)
from tandem_engine.model.layers.delta import keep_accepted

SPEC = StateSpec(layers=2, history=3, channels=10, heads=2, key_size=4, value_size=3, dtype=torch.bfloat16)


@pytest.fixture
def pool() -> StatePool:
    """All bits of all slots are set: such numbers are NaN in both dtypes."""
    pool = StatePool(SPEC, rows=4, device="cpu")
    pool.bytes_view().fill_(0xFF)
    return pool


def step(rows: list[int], lens: list[int], totals: list[int], *, num_extend: int) -> ForwardBatch:
    return replace(
        padding(len(rows)),
        rows=torch.tensor(rows),
        extend_lens=torch.tensor(lens),
        seq_lens=torch.tensor(totals),
        num_extend=num_extend,
    )


def test_slot_is_one_run_of_bytes_of_all_layers(pool):
    pool.bytes_view().zero_()
    pool.matrices[3] = 1.0
    pool.inputs[3] = 1.0
    assert pool.matrices.shape == (5, 2, 2, 4, 3)
    assert pool.inputs.shape == (5, 2, 3, 10)
    assert pool.bytes_view().any(dim=1).tolist() == [False, False, False, True, False]
    assert int(pool.bytes_view()[3].count_nonzero()) == 2 * (2 * 2 * 4 * 3 + 2 * 3 * 10)
    assert (SPEC.slot_bytes % 256, pool.total_bytes) == (0, 5 * SPEC.slot_bytes)


def test_runs_come_first_and_decodes_after_them(pool):
    states = StepStates.of(pool, step([2, 4, 1], [3, 2, 1], [3, 9, 6], num_extend=2))
    assert states.runs == (Run(0, 3, 2, fresh=True), Run(3, 5, 4, fresh=False))
    assert states.decodes is not None
    assert states.decodes.tolist() == [1]
    assert states.fresh is not None
    assert (states.fresh.tolist(), states.first_decode) == ([False], 5)


def test_run_is_cut_where_a_copy_is_within_a_chunk(pool):
    made = step([2, 4], [6, 5], [6, 9], num_extend=2)
    states = StepStates.of(pool, replace(made, snapshots=(Snapshot(0, 2, 3), Snapshot(0, 4, 1), Snapshot(1, 8, 3))))
    assert states.runs == (
        Run(0, 2, 2, fresh=True, snapshots=((2, 3),)),
        Run(2, 4, 2, fresh=False, snapshots=((2, 1),)),
        Run(4, 6, 2, fresh=False),
        Run(6, 10, 4, fresh=False, snapshots=((4, 3),)),
        Run(10, 11, 4, fresh=False),
    )


def test_run_is_whole_where_copies_are_after_whole_chunks(pool):
    made = step([2, 4], [200, 190], [200, 250], num_extend=2)
    copies = (Snapshot(0, 64, 3), Snapshot(0, 192, 1), Snapshot(1, 64, 3), Snapshot(1, 192, 1))
    states = StepStates.of(pool, replace(made, snapshots=copies))
    assert states.runs == (
        Run(0, 200, 2, fresh=True, snapshots=((64, 3), (192, 1))),
        Run(200, 204, 4, fresh=False, snapshots=((4, 3),)),
        Run(204, 390, 4, fresh=False, snapshots=((128, 1),)),
    )


def test_parts_of_a_run_end_where_its_state_is_copied():
    run = Run(10, 210, 2, fresh=True, snapshots=(StateCopy(64, 3), StateCopy(128, 1)))
    assert [*run.parts()] == [
        Run(10, 74, 2, fresh=True, snapshots=((64, 3),)),
        Run(74, 138, 2, fresh=False, snapshots=((64, 1),)),
        Run(138, 210, 2, fresh=False),
    ]
    ends = Run(0, 64, 2, fresh=False, snapshots=(StateCopy(64, 3),))
    assert [*ends.parts()] == [ends]


def test_chained_copies_of_states_are_made_in_order(pool):
    pool.matrices[1], pool.matrices[2] = 1.0, 2.0
    pool.copy(((1, 3), (2, 1)))
    assert pool.matrices[:, 0, 0, 0, 0][1:4].tolist() == [2.0, 2.0, 1.0]


def test_sequence_that_begins_reads_nothing_of_its_slot(pool):
    states = StepStates.of(pool, step([2], [3], [3], num_extend=1))
    inputs, matrices = states.of_run(0, states.runs[0])
    assert not inputs.any()
    assert not matrices.any()


def test_rows_of_padding_begin_and_others_continue(pool):
    pool.matrices[1], pool.inputs[1] = 2.0, 2.0
    states = StepStates.of(pool, step([1, PADDING_ROW], [1, 1], [8, 1], num_extend=0))
    inputs, matrices = states.of_decodes(1)
    assert matrices[:, 0, 0, 0].tolist() == [2.0, 0.0]
    assert inputs[:, 0, 0].tolist() == [2.0, 0.0]


def test_step_writes_the_slots_of_its_rows_alone(pool):
    states = StepStates.of(pool, step([2, 4], [3, 1], [3, 9], num_extend=1))
    assert states.decodes is not None
    for layer in range(2):
        states.keep(layer, states.runs[0].row, torch.zeros(3, 10), torch.zeros(2, 4, 3))
        states.keep_decodes(layer, states.decodes, torch.zeros(1, 3, 10).bfloat16(), torch.zeros(1, 2, 4, 3))
    whole = pool.matrices.isfinite().flatten(1).all(1) & pool.inputs.isfinite().flatten(1).all(1)
    assert whole.tolist() == [False, False, True, False, True]


def test_verify_step_leaves_states_of_running_requests(pool):
    made = step([1, 2, 3, 4], [5, 3, 3, 1], [5, 40, 9, 20], num_extend=4)
    sampling = {"sample_index": torch.tensor([1, 2, 3]), "draft_lens": (0, 2, 0)}
    states = StepStates.of(pool, replace(made, mode=ForwardMode.TARGET_VERIFY, **sampling))
    assert states.runs == (Run(0, 5, 1, fresh=True), Run(5, 8, 2, fresh=False))
    assert states.decodes is None
    assert states.drafted is not None
    assert states.drafted.rows.tolist() == [3, 4]
    assert states.drafted.tokens.tolist() == [[8, 9, 10], [11, 11, 11]]
    assert states.drafted.places.tolist() == [0, 1, 2, 3]


def test_prompt_of_one_token_that_begins_is_no_run_of_drafts(pool):
    made = step([1, 2], [1, 3], [1, 9], num_extend=2)
    sampling = {"sample_index": torch.tensor([0, 1]), "draft_lens": (0, 2)}
    states = StepStates.of(pool, replace(made, mode=ForwardMode.TARGET_VERIFY, **sampling))
    assert states.runs == (Run(0, 1, 1, fresh=True),)
    assert states.drafted is not None
    assert states.drafted.rows.tolist() == [2]


def accepted(pool: StatePool, lens: tuple[int, ...]) -> None:
    """Runs of up to three tokens in rows 1 and 2, of which `lens` count."""
    draw = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(2, 3, *shape, generator=draw)

    layers = [
        DraftedInputs(
            inputs=torch.arange(6.0).expand(10, 2, 6).permute(1, 2, 0).to(torch.bfloat16),
            key=numbers(2, 4),
            value=numbers(2, 3),
            decay=-numbers(2),
            beta=numbers(2),
        )
        for _ in range(2)
    ]
    nothing = torch.zeros(0, dtype=torch.int64)
    runs = DraftedRuns(rows=torch.tensor([1, 2]), tokens=nothing, places=nothing, layers=layers)
    keep_accepted(pool, runs, torch.tensor(lens), longest=max(lens))


def test_accepted_tokens_move_a_state_on_and_others_leave_no_bit():
    pools = [StatePool(SPEC, rows=4, device="cpu") for _ in range(3)]
    for each, lens in zip(pools, [(1, 3), (1, 1), (3, 3)], strict=True):
        each.matrices.fill_(0.5)
        accepted(each, lens)
    mixed, short, long = pools
    assert torch.equal(mixed.matrices[1], short.matrices[1])
    assert torch.equal(mixed.matrices[2], long.matrices[2])
    assert not torch.equal(short.matrices[2], long.matrices[2])
    assert mixed.inputs[1, 0, :, 0].tolist() == [1.0, 2.0, 3.0]
    assert mixed.inputs[2, 1, :, 9].tolist() == [3.0, 4.0, 5.0]
    assert mixed.matrices[3].unique().tolist() == [0.5]
