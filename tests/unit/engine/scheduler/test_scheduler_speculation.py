"""Runs of accepted drafts inside the scheduler: what they may take, and where they end."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem_engine.base.clock import Clock
from tandem_engine.forward.batch import ForwardBatch, ForwardMode
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.scheduler.speculation import StepDrafts
from tandem_testing.fake_executors import EagerExecutor
from tandem_testing.scheduler_builders import (
    VOCAB,
    Engine,
    ManualClock,
    decode_text,
    expected_output,
    make_engine,
    make_message,
)
from tandem_testing.scripted_proposer import ScriptedProposer, always_right, always_wrong, wrong_every

PROMPT = (1, 2, 3, 4, 5)


def drafting(*, mistake=always_right, lengths=lambda limit: limit, writes_kv=False, **settings: object) -> Engine:
    proposer = ScriptedProposer(vocab_size=VOCAB, mistake=mistake, lengths=lengths, writes_kv=writes_kv)
    return make_engine(proposer=proposer, **settings)


def run_one(engine: Engine, **sampling: object) -> list[list[int]]:
    """Tokens of each output of one request."""
    engine.add(make_message("r", PROMPT, **sampling))
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()
    return [list(output.token_ids) for output in engine.received["r"].outputs]


def test_step_with_right_drafts_yields_them_and_one_more():
    runs = run_one(drafting(num_draft_tokens=3), max_tokens=9)
    assert [len(run) for run in runs] == [1, 4, 4]


def test_step_with_wrong_drafts_yields_one_token():
    runs = run_one(drafting(mistake=always_wrong), max_tokens=5)
    assert [len(run) for run in runs] == [1] * 5


def test_run_ends_with_its_first_wrong_draft():
    # Drafts stand at positions 6, 7, 8; number 7 is wrong and replaced by what was sampled there.
    runs = run_one(drafting(mistake=wrong_every(7), num_draft_tokens=3), max_tokens=4)
    assert [len(run) for run in runs] == [1, 2, 1]


def test_batch_computes_drafts_after_the_last_token():
    engine = drafting(num_draft_tokens=3)
    run_one(engine, max_tokens=5)
    prefill, verify = engine.executor.batches
    assert (prefill.mode, verify.mode) == (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY)
    output = engine.output()
    assert verify.input_ids.tolist() == output[:4]
    assert verify.positions.tolist() == [5, 6, 7, 8]
    assert verify.sampling.position.tolist() == [6, 7, 8, 9]
    assert (verify.draft_lens, verify.num_extend) == ((3,), 1)


def test_no_more_is_drafted_than_may_be_output():  # [earliest-stop]
    engine = drafting(num_draft_tokens=10)
    runs = run_one(engine, max_tokens=4)
    assert [len(run) for run in runs] == [1, 3]
    assert engine.executor.batches[1].draft_lens == (2,)
    assert engine.finish().reason is FinishReason.LENGTH


def test_run_is_cut_after_stop_token_in_its_middle():  # [earliest-stop] [one-cut]
    stop = expected_output(make_message("r", PROMPT, max_tokens=9))[3]
    engine = drafting(num_draft_tokens=8)
    runs = run_one(engine, max_tokens=9, stop_token_ids=(stop,), logprobs=0)
    assert [len(run) for run in runs] == [1, 3]
    assert engine.finish().matched_stop == stop
    assert len(engine.received["r"].logprobs) == 4
    assert engine.scheduler.tally.output_tokens == 4


def test_named_logprobs_are_those_of_every_position_of_a_run():
    engine = drafting(num_draft_tokens=8)
    engine.add(make_message("other", [7], max_tokens=9, logprobs=1))
    run_one(engine, max_tokens=9, logprobs=0, logprob_token_ids=(5, 3))
    assert [logprob.top for logprob in engine.received["r"].logprobs] == [((5, -7.0), (3, -5.0))] * 9
    assert {len(logprob.top) for logprob in engine.received["other"].logprobs} == {1}


def test_stop_string_is_found_at_any_position_of_a_run():  # [stop-window]
    text = decode_text(expected_output(make_message("r", PROMPT, max_tokens=9)))
    engine = drafting(num_draft_tokens=8)
    run_one(engine, max_tokens=9, stop=(text[2:5],))
    assert engine.output() == expected_output(make_message("r", PROMPT, max_tokens=9))[:5]
    assert engine.finish().matched_stop == text[2:5]


def test_min_tokens_are_counted_per_position_and_not_per_step():  # [every-accepted-token]
    plain = expected_output(make_message("r", PROMPT, max_tokens=12))
    stops = tuple(set(plain))
    engine = drafting(num_draft_tokens=6)
    run_one(engine, max_tokens=12, min_tokens=4, stop_token_ids=stops)
    assert len(engine.output()) >= 5
    suppressed = [batch.sampling.suppress for batch in engine.executor.batches]
    assert [bool(ids) for ids in suppressed[1][:4]] == [True, True, True, False]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_are_those_of_drafted_tokens_and_no_more(page_size):  # [draft-pages]
    engine = drafting(page_size=page_size, num_draft_tokens=5)
    engine.add(make_message("r", PROMPT, max_tokens=40))
    engine.step(2)
    kv = engine.scheduler.queues.requests["r"].held_kv
    computed = int(engine.executor.batches[-1].seq_lens[0])
    assert len(kv.pages) == -(-computed // page_size)
    engine.run()


def test_kv_is_committed_up_to_the_newest_token_alone():
    engine = drafting(mistake=wrong_every(8), num_draft_tokens=4)
    engine.add(make_message("r", PROMPT, max_tokens=40))
    for _ in range(8):
        engine.step()
        req = engine.scheduler.queues.requests["r"]
        assert req.held_kv.committed_len == req.launched_len == req.seq_len - 1
        assert req.tokens_in_flight == 0
    engine.run()
    engine.assert_expected()


def test_drafts_are_cut_to_free_pages_without_retraction():  # [one-memory-check]
    engine = drafting(page_size=1, usable_pages=16, num_draft_tokens=8, radix=False, init_new_token_ratio=0.1)
    engine.add(make_message("a", [1, 2, 3], max_tokens=4))
    engine.add(make_message("b", [4, 5, 6], max_tokens=9))
    engine.run()
    assert engine.scheduler.tally.retracted == 0
    engine.assert_expected()
    engine.assert_nothing_held()


def test_step_with_drafts_waits_for_previous_completion():
    engine = drafting(enable_overlap=True, num_draft_tokens=3)
    engine.add(make_message("r", PROMPT, max_tokens=30))
    engine.step(5)
    # Nothing is left to the device to look up: each run was settled before the next was planned.
    assert all(int(batch.input_ids.min()) >= 0 for batch in engine.executor.batches)
    engine.run()
    engine.assert_expected()


def test_steps_overlap_without_drafts():
    engine = drafting(enable_overlap=True, max_draft_batch=1)
    for rid in ("a", "b"):
        engine.add(make_message(rid, PROMPT, max_tokens=30))
    engine.step(8)
    modes = [batch.mode for batch in engine.executor.batches]
    assert ForwardMode.TARGET_VERIFY not in modes
    assert int(engine.executor.batches[-1].input_ids.min()) < 0
    engine.run()
    engine.assert_expected()


def test_drafts_never_accepted_stop_and_overlap_resumes():
    engine = drafting(mistake=always_wrong, adaptive=True, enable_overlap=True, usable_pages=100)
    engine.add(make_message("r", PROMPT, max_tokens=200))
    engine.run()
    engine.assert_expected()
    verified = [batch.mode is ForwardMode.TARGET_VERIFY for batch in engine.executor.batches]
    assert 0 < sum(verified) < 30
    assert int(engine.executor.batches[-1].input_ids.min()) < 0


def on_a_machine(step_s: Callable[[ForwardBatch], float], **settings: object) -> Engine:
    """Its forwards take so long."""

    def pass_time(batch: ForwardBatch) -> None:
        engine.clock.time += step_s(batch)

    engine = drafting(
        adaptive=True,
        usable_pages=300,
        executor=lambda model: EagerExecutor(model, pass_time),
        **settings,
    )
    for index in range(4):
        engine.add(make_message(f"r{index}", [*PROMPT, index], max_tokens=200))
    engine.run()
    engine.assert_expected()
    return engine


def verified(engine: Engine) -> int:
    return sum(batch.mode is ForwardMode.TARGET_VERIFY for batch in engine.executor.batches)


@pytest.mark.parametrize("overlap", [False, True])
def test_adaptive_drafting_stops_where_verification_is_slow(overlap):
    cheap = on_a_machine(lambda batch: 1.0 + 0.01 * batch.num_tokens, enable_overlap=overlap)
    assert verified(cheap) >= 200 // 5 - 3
    dear = on_a_machine(lambda batch: 1.0 + (batch.num_tokens > 4) * 9.0, enable_overlap=overlap)
    assert 0 < verified(dear) < 15


def test_ranks_choose_equal_drafts_despite_different_clocks():  # [rank-zero-drafts]
    shared: list[StepDrafts] = []

    def rank(agree: Callable[[StepDrafts], StepDrafts], own_clock: Clock) -> list[tuple[int, ...]]:
        engine = drafting(mistake=wrong_every(3), adaptive=True, enable_overlap=True, usable_pages=200)
        speculation = engine.scheduler._shared.speculation
        speculation.agree, speculation.stopwatch = agree, own_clock
        for index in range(3):
            engine.add(make_message(f"r{index}", [*PROMPT, index], max_tokens=120))
        while not engine.scheduler.idle:
            # The agreed clock: rank 0's, and it moves between turns alone.
            engine.clock.time += 1.0 + 0.5 * (engine.scheduler.tally.loops % 5)
            engine.step()
        engine.assert_expected()
        return [batch.draft_lens for batch in engine.executor.batches]

    def publish(drafts: StepDrafts) -> StepDrafts:
        shared.append(drafts)
        return drafts

    class Wild:
        """Jumps ahead whenever it is read."""

        def __init__(self) -> None:
            self.time = 0.0

        def now(self) -> float:
            self.time += 50.0 + self.time
            return self.time

    first = rank(publish, ManualClock())
    followed = iter(shared)
    assert rank(lambda _: next(followed), Wild()) == first
    assert any(first)


def test_request_without_drafts_is_proposed_for_less_often():
    engine = drafting(lengths=lambda _: 0, adaptive=True, enable_overlap=True)
    engine.add(make_message("r", PROMPT, max_tokens=60))
    engine.run()
    engine.assert_expected()
    assert 0 < len(engine.scheduler._shared.speculation.proposer.proposals) < 20


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_during_verification_discards_drafts(overlap):  # [abort-before-token]
    engine = drafting(enable_overlap=overlap)
    engine.add(make_message("r", PROMPT, max_tokens=30))
    engine.step(3)
    before = engine.output()
    engine.scheduler.abort("r")
    engine.run()
    assert engine.finish().reason is FinishReason.ABORT
    assert engine.output()[: len(before)] == before
    engine.assert_nothing_held()


def test_proposer_forgets_a_request_before_its_row_is_given_back():  # [row-state-forgotten]
    engine = drafting(force_retract_every=2, max_retractions=99)
    run_one(engine, max_tokens=20)
    released = engine.scheduler._shared.speculation.proposer.released
    assert len(released) == engine.scheduler.tally.retracted + 1
    whole = [*PROMPT, *engine.output()]
    assert all(tokens == whole[: len(tokens)] for _, tokens in released)


def test_failed_verification_step_is_recomputed_without_loss():
    def fail_third(batch):
        if batch.step == 3:
            raise RuntimeError("by chance")

    engine = drafting(executor=lambda model: EagerExecutor(model, fail_third))
    engine.add(make_message("r", PROMPT, max_tokens=30))
    engine.run()
    engine.add(make_message("after", PROMPT, max_tokens=9))
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()
    assert engine.scheduler.stats().engine_errors_total == 1


def test_nan_in_verification_fails_only_its_request():
    class CorruptingSampler:
        """From the sixth step on the first sequence of every step is corrupted."""

        def __init__(self, model):
            self.model = model

        def forward(self, batch):
            return replace(self.model.forward(batch), corrupted=(0,) if batch.step >= 6 else ())

    engine = drafting(executor=lambda model: EagerExecutor(CorruptingSampler(model)))
    engine.add(make_message("bad", PROMPT, max_tokens=30))
    engine.run()
    engine.assert_nothing_held()
    assert engine.finish("bad").code == "engine_error"
    assert engine.output("bad") == expected_output(engine.messages["bad"])[: len(engine.output("bad"))]


def test_results_of_drafts_are_counted():
    engine = drafting(mistake=wrong_every(7), num_draft_tokens=3)
    run_one(engine, max_tokens=4)
    stats = engine.scheduler.stats().speculation
    assert (stats.proposer, stats.runs_total, stats.drafted_total, stats.accepted_total) == ("SCRIPTED", 1, 2, 1)
    assert stats.accept_length == 2.0
    assert make_engine().scheduler.stats().speculation is None


def test_proposer_that_fails_costs_drafts_and_no_request(caplog):
    engine = drafting()

    def fail(requests):
        raise RuntimeError("draft model lost")

    engine.scheduler._shared.speculation.proposer.propose = fail
    engine.scheduler._shared.speculation.confined = True
    runs = run_one(engine, max_tokens=5)
    assert [len(run) for run in runs] == [1] * 5
    assert "without drafts" in caplog.text
    assert engine.scheduler.stats().speculation.drafted_total == 0


def test_proposer_failure_is_decided_by_rank_0():  # [rank-zero-drafts]
    engine = drafting()
    speculation = engine.scheduler._shared.speculation
    speculation.confined = True
    speculation.proposer.propose = None  # what this rank has by itself counts for nothing
    speculation.agree = lambda _: StepDrafts(chains=((),))
    run_one(engine, max_tokens=5)
    assert not speculation.broken
    engine = drafting()
    engine.scheduler._shared.speculation.agree = lambda mine: StepDrafts(
        chains=tuple(() for _ in mine.chains), broken=True
    )
    runs = run_one(engine, max_tokens=5)
    assert engine.scheduler._shared.speculation.broken
    assert [len(run) for run in runs] == [1] * 5
