"""What the scheduler tells the device about edits, and when."""

import pytest

from tandem_engine.forward.logit_edits import ANY, LogitEdits
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.finishing import PenaltySlots
from tandem_engine.scheduler.schedule_batch import NO_EDITS, EditColumns
from tandem_testing.edit_builders import make_edits, make_request
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

PENALIZED = {"presence_penalty": 1.5, "repetition_penalty": 2.0}
PLAIN = SamplingParams(max_tokens=9)


def edits_of(engine: Engine) -> list[LogitEdits | None]:
    return [batch.sampling.edits for batch in engine.executor.batches]


def loads(engine: Engine) -> list[tuple[int, ...]]:
    """Output tokens of every history that was sent."""
    return [history.output_ids for edits in edits_of(engine) if edits for history in edits.histories]


def test_edit_columns_are_absent_without_edits():
    assert EditColumns.of([make_request(1, PLAIN), make_request(2, PLAIN)], PenaltySlots()) is NO_EDITS
    engine = make_engine(enable_overlap=True)
    engine.add(make_message(max_tokens=5, min_tokens=2, stop=("ab",), logprobs=1))
    engine.run()
    assert edits_of(engine) == [None] * len(engine.executor.batches)


def test_unused_edit_columns_are_none():
    edits = make_edits([make_request(1, PLAIN), make_request(2, SamplingParams(max_tokens=9, logit_bias=((4, 1.5),)))])
    assert (edits.penalties, edits.allowed, edits.forbidden, edits.bad_words, edits.histories) == (None,) * 4 + ((),)
    assert edits.biases.index.tolist() == [1]
    assert edits.biases.token_ids.tolist() == [4]
    assert edits.biases.values.tolist() == [1.5]


def test_bad_words_are_right_aligned_single_tokens_separate():
    params = SamplingParams(max_tokens=9, bad_words=((7,), (1, 2, 3), (8, 9)))
    edits = make_edits([make_request(3, PLAIN), make_request(5, params)])
    assert (edits.forbidden.index.tolist(), edits.forbidden.token_ids.tolist()) == ([1], [7])
    words = edits.bad_words
    assert words.prefixes.tolist() == [[1, 2], [ANY, 8]]
    assert (words.index.tolist(), words.rows.tolist(), words.last.tolist()) == ([1, 1], [5, 5], [3, 9])
    assert (words.recalled_index.tolist(), words.recalled_rows.tolist()) == ([1], [5])


def test_history_is_sent_once_for_each_row_the_request_gets():  # [device-history]
    engine = make_engine(enable_overlap=True)
    engine.add(make_message(max_tokens=8, **PENALIZED))
    engine.run()
    assert loads(engine) == [()]
    assert sum(edits is not None for edits in edits_of(engine)) == len(engine.executor.batches)


def test_resumed_tokens_are_output_in_the_history():  # [history-rebuilt]
    engine = make_engine()
    engine.add(make_message(prompt=(1, 2, 3), resume=(7, 8), max_tokens=5, **PENALIZED))
    engine.run()
    [history] = edits_of(engine)[0].histories
    assert (history.prompt_ids, history.output_ids) == ((1, 2, 3), (7, 8))


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_request_brings_its_history_back(overlap):  # [history-rebuilt]
    engine = make_engine(enable_overlap=overlap, force_retract_every=3, max_retractions=99)
    engine.add(make_message(max_tokens=12, **PENALIZED))
    engine.run()
    engine.assert_expected()
    output = engine.output()
    assert engine.scheduler.tally.retracted >= 2
    assert loads(engine) == [tuple(output[: len(history)]) for history in loads(engine)]
    assert len(loads(engine)) == engine.scheduler.tally.retracted + 1


def test_prompt_ids_are_sent_only_for_repetition_penalty():
    engine = make_engine()
    engine.add(make_message(prompt=range(1, 50), max_tokens=2, presence_penalty=1.0))
    engine.run()
    assert [history.prompt_ids for history in edits_of(engine)[0].histories] == [()]


def test_slot_count_is_that_of_penalized_running_requests():
    engine = make_engine(enable_overlap=True, max_rows=16, max_running_requests=3)
    for number in range(9):
        engine.add(make_message(f"penalised-{number}", [number + 1], max_tokens=5 + number, **PENALIZED))
        engine.add(make_message(f"plain-{number}", [number + 1, 2], max_tokens=4))
    engine.run()
    engine.assert_expected()
    slots = engine.scheduler._shared.slots
    assert slots.used <= 3
    assert sorted(slots.free) == [*range(slots.used)]


def test_aborted_request_gives_its_slot_back():
    engine = make_engine(enable_overlap=True)
    engine.add(make_message(max_tokens=50, **PENALIZED))
    engine.step(4)
    engine.scheduler.abort("r")
    engine.run()
    assert engine.scheduler._shared.slots.free == [0]


def test_requests_with_bad_words_alone_take_no_slot():
    request = make_request(1, SamplingParams(max_tokens=9, bad_words=((1, 2),)), outputs=(4,))
    [history] = make_edits([request]).histories
    assert (history.slot, history.row, history.output_ids) == (None, 1, (4,))
    assert request.penalty_slot is None


def test_moving_a_request_with_tokens_in_flight_is_a_bug():
    request = make_request(1, SamplingParams(max_tokens=9, presence_penalty=1.0))
    request.tokens_in_flight = 1
    with pytest.raises(AssertionError, match="in flight"):
        make_edits([request])
