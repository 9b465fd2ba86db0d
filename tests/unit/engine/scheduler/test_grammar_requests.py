"""Requests with a grammar: waiting for it, following it, ending with it."""

from concurrent.futures import Future

import pytest

from tandem_engine.base.errors import GrammarCompilerError, InvalidRequestError
from tandem_engine.base.names import RequestId
from tandem_engine.forward.batch import ALL_ALLOWED, ForwardBatch, ForwardResult
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.sampling import ReasoningBudget, SamplingParams
from tandem_engine.sampling.grammar.compiler import NoGrammars
from tandem_engine.sampling.grammar.reasoning import BudgetedReasoning
from tandem_engine.scheduler.gates.grammar import JobState, fill_masks, open_masks
from tandem_engine.scheduler.queues import WaitingQueue
from tandem_engine.scheduler.request import GrammarProgress, Request
from tandem_testing.fake_executors import Computes, LateExecutor, ThreadedExecutor
from tandem_testing.scheduler_builders import VOCAB, Engine, expected_output, make_engine, make_message
from tandem_testing.scripted_proposer import ScriptedProposer
from tandem_testing.toy_grammar import EOS, ToyGrammar, ToyGrammars, toy_grammar, toy_rule, unpack


def held(**config: object) -> tuple[Engine, ToyGrammars]:
    """An engine whose grammars are compiled when the test says so."""
    grammars = ToyGrammars(hold=True)
    return make_engine(grammars=grammars, **config), grammars


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def overlap(request):
    return request.param


def following(overlap: bool, **config: object) -> Engine:
    return make_engine(enable_overlap=overlap, **config)


# Waiting


def test_request_awaiting_grammar_does_not_block_others():
    engine, grammars = held()
    spec = toy_grammar()
    engine.add(make_message("g", grammar=spec))
    engine.add(make_message("plain"))
    engine.step(20)
    assert engine.finish("plain") is not None
    assert "g" not in engine.received
    grammars.finish(spec)
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


def test_request_after_grammar_keeps_its_queue_position():
    engine, grammars = held(max_running_requests=1)
    spec = toy_grammar()
    engine.add(make_message("running", max_tokens=20))
    engine.step(2)
    for rid, grammar in (("a", None), ("g", spec), ("b", None), ("c", None)):
        engine.clock.time += 1.0
        engine.add(make_message(rid, grammar=grammar))
    engine.step()
    grammars.finish(spec)
    engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["a", "g", "b", "c"]
    engine.run()
    engine.assert_expected()


def test_request_after_grammar_queues_after_retracted_ones():  # [retraction-bounded]
    def request(rid: str, arrived_at: float, *, scheduled: bool = False) -> Request:
        return Request(
            rid=RequestId(rid),
            origin_input_ids=(1,),
            sampling=SamplingParams(max_tokens=1),
            arrived_at=arrived_at,
            first_scheduled_at=arrived_at if scheduled else None,
        )

    queue = WaitingQueue()
    for req in (request("retracted", 5.0, scheduled=True), request("later", 7.0)):
        queue.join(req)
    queue.join(request("g", 1.0))
    assert [req.rid for req in queue] == ["retracted", "g", "later"]


def test_equal_grammars_are_compiled_once_and_cached():
    engine, grammars = held()
    spec = toy_grammar()
    for rid in "ab":
        engine.add(make_message(rid, grammar=spec))
    engine.step()
    grammars.finish(spec)
    engine.run()
    engine.add(make_message("c", grammar=spec))
    engine.run()
    engine.assert_expected()
    assert grammars.compiled == 1


def test_waiting_for_a_grammar_counts_as_waiting():  # [one-home]
    engine, _ = held(max_queued_requests=2)
    for rid in "ab":
        engine.add(make_message(rid, grammar=toy_grammar(name=rid)))
    engine.add(make_message("c"))
    assert engine.finish("c").code == "queue_full"
    stats = engine.scheduler.stats()
    assert (stats.waiting, stats.running, stats.waiting_tokens) == (2, 0, 6)
    assert not engine.scheduler.idle
    assert {req.rid for req in engine.scheduler.queues.live()} == {"a", "b"}


@pytest.mark.parametrize("end", ["abort", "deadline", "client", "all"])
def test_request_that_waits_for_grammar_can_end(end):  # [one-home]
    engine, grammars = held()
    engine.add(make_message("g", grammar=toy_grammar(), deadline_s=5.0), client=b"gone")
    engine.step(2)
    if end == "abort":
        engine.scheduler.abort(RequestId("g"))
    elif end == "deadline":
        engine.clock.time += 6.0
    elif end == "client":
        engine.scheduler.abort_client(b"gone")
    else:
        engine.scheduler.abort_all()
    engine.step(2)
    assert engine.finish("g").reason is FinishReason.ABORT
    assert engine.scheduler.idle
    assert engine.scheduler._parts.gate.jobs == {}
    assert all(future.cancelled() for future in grammars.pending.values())


def test_abort_drops_grammar_compilation_that_cannot_cancel():  # [same-collectives]
    engine, grammars = held()
    spec = toy_grammar()
    engine.add(make_message("g", grammar=spec))
    grammars.pending[spec].set_running_or_notify_cancel()
    engine.scheduler.abort(RequestId("g"))
    engine.step(2)
    assert engine.scheduler._parts.gate.jobs == {}
    assert engine.scheduler.idle


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (InvalidRequestError("it is wrong", param="grammar"), "invalid_request", False),
        (GrammarCompilerError("no process"), "grammar_compiler_error", True),
        (ValueError("a bug"), "grammar_compiler_error", True),
    ],
)
def test_grammar_that_fails_ends_its_requests_alone(error, code, retryable):
    engine, grammars = held()
    spec = toy_grammar()
    for rid, grammar in (("a", spec), ("plain", None), ("b", spec)):
        engine.add(make_message(rid, grammar=grammar))
    engine.step()
    grammars.fail(spec, error)
    engine.run()
    for rid in "ab":
        assert (engine.finish(rid).code, engine.finish(rid).retryable) == (code, retryable)
    engine.assert_expected("plain")
    engine.assert_nothing_held()


def test_grammar_that_was_refused_is_refused_at_once():
    engine, grammars = held()
    spec = toy_grammar()
    engine.add(make_message("a", grammar=spec))
    grammars.fail(spec, InvalidRequestError("it is wrong", param="grammar"))
    engine.step()
    engine.add(make_message("b", grammar=spec))
    assert (engine.finish("b").code, engine.finish("b").param) == ("invalid_request", "grammar")
    assert grammars.compiled == 1
    assert engine.scheduler.stats().refused_total == 1


def test_without_a_backend_a_grammar_is_refused():
    engine = make_engine(grammars=NoGrammars("nobody compiles here"))
    engine.add(make_message("g", grammar=toy_grammar()))
    assert engine.finish("g").code == "invalid_request"
    assert engine.scheduler.idle


def test_reasoning_budget_needs_no_backend():
    engine = make_engine(grammars=NoGrammars("nobody compiles here"))
    budget = ReasoningBudget(tokens=2, begin=(1,), end=(60, 61), opened=True)
    engine.add(make_message("b", max_tokens=9, reasoning_budget=budget))
    engine.run()
    engine.assert_expected()
    assert engine.output("b")[2:4] == [60, 61]


def test_max_tokens_cuts_an_output_within_its_reasoning():
    engine = make_engine()
    budget = ReasoningBudget(tokens=2, begin=(1,), end=(60, 61), opened=True)
    engine.add(make_message("b", max_tokens=3, reasoning_budget=budget))
    engine.run()
    assert (engine.output("b")[2], engine.finish("b").reason) == (60, FinishReason.LENGTH)


def test_resumed_tokens_beyond_the_budget_are_refused():
    engine = make_engine()
    budget = ReasoningBudget(tokens=2, begin=(1,), end=(60, 61), opened=True)
    engine.add(make_message("b", resume=(5, 6, 7), max_tokens=9, reasoning_budget=budget))
    assert (engine.finish("b").code, engine.finish("b").param) == ("invalid_request", "resume_ids")
    assert engine.scheduler.idle


@pytest.mark.parametrize(
    ("elsewhere", "code"),
    [(JobState.PENDING, None), (JobState.FAILED, "grammar_compiler_error"), (JobState.REFUSED, "invalid_request")],
)
def test_grammar_state_is_least_of_all_ranks(elsewhere, code):  # [least-of-ranks]
    engine, grammars = held(least=lambda states: [min(state, elsewhere) for state in states])
    spec = toy_grammar()
    engine.add(make_message("g", grammar=spec))
    grammars.finish(spec)
    engine.step()
    if code is None:
        assert [*engine.scheduler.queues.compiling] == ["g"]
        return
    assert engine.finish("g").code == code
    # What is kept must be the same on every rank, whatever this one has.
    engine.add(make_message("again", grammar=spec))
    assert (engine.finish("again") is not None) == (elsewhere is JobState.REFUSED)
    assert grammars.compiled == (1 if elsewhere is JobState.REFUSED else 2)


def test_ranks_agree_on_nothing_without_compilation():  # [same-collectives]
    def never(states: object) -> list[int]:
        raise AssertionError(f"asked about {states}")

    engine = make_engine(least=never)
    engine.add(make_message("plain"))
    engine.run()
    engine.assert_expected()


# Following


def test_grammar_constrains_tokens_and_its_end_stops_output(overlap):
    engine = following(overlap)
    engine.add(make_message("g", max_tokens=30, grammar=toy_grammar(every=5, length=7)))
    engine.run()
    engine.assert_expected()
    assert len(engine.output("g")) == 7
    assert engine.finish("g").reason is FinishReason.STOP


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_allowed_by_grammar_stops_output_despite_ignore_eos(overlap, ignore_eos):
    engine = following(overlap)
    # Every token but one is forbidden once EOS is allowed: 97 is prime, so only EOS is left.
    spec = toy_grammar(every=97, optional=0)
    engine.add(make_message("g", [4], max_tokens=30, ignore_eos=ignore_eos, grammar=spec))
    engine.run()
    engine.assert_expected()
    assert engine.output("g")[-1] == EOS
    assert engine.finish("g").reason is FinishReason.STOP


def test_max_tokens_ends_output_with_reason_length(overlap):
    engine = following(overlap)
    engine.add(make_message("g", max_tokens=6, grammar=toy_grammar(length=7)))
    engine.run()
    assert engine.finish("g").reason is FinishReason.LENGTH


def test_grammar_that_ends_with_the_last_token_is_a_stop(overlap):
    engine = following(overlap)
    engine.add(make_message("g", max_tokens=7, grammar=toy_grammar(length=7)))
    engine.run()
    assert engine.finish("g").reason is FinishReason.STOP


def test_end_of_the_grammar_outweighs_min_tokens(overlap):
    engine = following(overlap)
    engine.add(make_message("g", max_tokens=30, min_tokens=20, grammar=toy_grammar(length=7)))
    engine.run()
    assert (len(engine.output("g")), engine.finish("g").reason) == (7, FinishReason.STOP)


def test_request_that_its_grammar_leaves_no_token_ends_alone(overlap):
    engine = following(overlap)
    engine.add(make_message("g", max_tokens=30, grammar=toy_grammar(stuck=4)))
    engine.add(make_message("plain", max_tokens=12))
    engine.run()
    finish = engine.finish("g")
    assert (finish.code, finish.param, finish.retryable) == ("invalid_request", "grammar", False)
    assert "after 4 output tokens" in finish.error
    assert engine.output("g") == expected_output(engine.messages["g"])[:4]
    engine.assert_expected("plain")
    engine.assert_nothing_held()


def test_constraints_without_common_token_fail_the_request(overlap):
    engine = following(overlap)
    # Of the multiples of 60 only 60 is in the vocabulary, and min_tokens suppresses it.
    spec = toy_grammar(every=60, length=3)
    engine.add(make_message("g", min_tokens=4, stop_token_ids=(60,), grammar=spec))
    engine.run()
    assert engine.finish("g").code == "invalid_request"
    assert "no token satisfies both" in engine.finish("g").error
    engine.assert_nothing_held()


@pytest.mark.parametrize(
    ("resume", "reason"),
    [((3, 9), FinishReason.STOP), ((3, 9, 6), FinishReason.STOP), ((3, 4), FinishReason.ERROR)],
    ids=["goes on", "is complete", "breaks the grammar"],
)
@pytest.mark.parametrize("known", [False, True])
def test_resumed_tokens_are_replayed(overlap, resume, reason, known):
    engine = following(overlap)
    spec = toy_grammar(every=3, length=3)
    if known:
        engine.add(make_message("before", grammar=spec))
        engine.run()
    engine.add(make_message("g", resume=resume, max_tokens=20, grammar=spec))
    engine.run()
    assert engine.finish("g").reason is reason
    if reason is FinishReason.ERROR:
        assert (engine.finish("g").code, engine.finish("g").param) == ("invalid_request", "resume_ids")
    else:
        engine.assert_expected("g")
    engine.assert_nothing_held()


# Deferred masks


def test_batch_without_grammars_has_no_masks():
    engine = following(overlap=True)
    engine.add(make_message("plain"))
    engine.run()
    assert all(batch.sampling.masks is None for batch in engine.executor.batches)


def test_masks_name_the_rows_they_are_for_in_mixed_steps():  # [masks-after-settling] [mask-per-row]
    engine = following(overlap=True, enable_mixed_chunk=True, chunked_prefill_size=4)
    engine.add(make_message("a", max_tokens=30))
    engine.add(make_message("g", max_tokens=30, grammar=toy_grammar()))
    engine.step(3)
    engine.add(make_message("h", range(1, 12), max_tokens=5, grammar=toy_grammar(every=7)))
    engine.run()
    engine.assert_expected()
    rows = {batch.sampling.masks.rows for batch in engine.executor.batches if batch.sampling.masks is not None}
    assert {(1,), (0, 2)} <= rows


class OpenAtLaunch(LateExecutor):
    """Notes of each step with masks whether they were still to be filled when it was launched."""

    def __init__(self, model: Computes) -> None:
        super().__init__(model)
        self.open: list[bool] = []

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        if batch.sampling.masks is not None:
            self.open.append(bool((batch.sampling.masks.bitmask == ALL_ALLOWED).all()))
        return super().launch(batch)


@pytest.mark.parametrize("proposer", [None, ScriptedProposer(vocab_size=VOCAB)], ids=["plain", "drafts"])
def test_forward_is_under_way_while_its_masks_are_filled(proposer):  # [masks-after-settling]
    engine = following(overlap=True, executor=OpenAtLaunch, proposer=proposer)
    engine.add(make_message("g", max_tokens=12, grammar=toy_grammar()))
    engine.run()
    engine.assert_expected()
    assert engine.executor.open
    assert all(engine.executor.open)


def test_failed_step_before_it_does_not_keep_a_step_waiting():
    def fail_third(batch: object) -> None:
        if batch.step == 3:
            raise RuntimeError("a broken device")

    engine = following(overlap=True, executor=lambda model: LateExecutor(model, fail_third))
    engine.add(make_message("g", max_tokens=20, grammar=toy_grammar()))
    engine.add(make_message("h", [9, 9], max_tokens=20, grammar=toy_grammar()))
    engine.run()
    engine.assert_expected("g", "h")
    engine.assert_nothing_held()


def test_exception_in_completion_releases_step_awaiting_masks(monkeypatch):
    engine = following(overlap=True, executor=ThreadedExecutor)
    engine.add(make_message("g", max_tokens=20, grammar=toy_grammar()))
    engine.step(2)

    def broken(*_: object) -> None:
        raise AssertionError("a bug of ours")

    monkeypatch.setattr(type(engine.scheduler._loop.settlement), "settle", broken)
    with pytest.raises(AssertionError, match="a bug of ours"):
        engine.step()
    # Would hang forever if the forward still waited.
    engine.executor.shutdown()


def test_abort_while_masks_are_due_lets_the_step_finish(overlap):
    engine = following(overlap, executor=ThreadedExecutor if overlap else None)
    engine.add(make_message("g", max_tokens=50, grammar=toy_grammar()))
    engine.add(make_message("h", max_tokens=9, grammar=toy_grammar(every=7)))
    engine.step(4)
    engine.scheduler.abort(RequestId("g"))
    engine.run()
    assert engine.finish("g").reason is FinishReason.ABORT
    engine.assert_expected("h")
    engine.assert_nothing_held()


# Drafts


def request_with_grammar(**rule: object) -> Request:
    spec = toy_grammar(**rule)
    req = Request(rid=RequestId("g"), origin_input_ids=(1,), sampling=SamplingParams(max_tokens=9, grammar=spec))
    req.grammar = GrammarProgress.start(ToyGrammar(toy_rule(spec)))
    return req


def masks_after(req: Request, drafts: tuple[int, ...]) -> list[set[int] | None]:
    """What each position of a run allows; None where everything is."""
    masks = open_masks([req], (0,), (len(drafts),))
    assert masks.rows == tuple(range(len(drafts) + 1))
    fill_masks(masks, [(req, drafts)])
    bits = masks.wait().numpy()
    return [None if (row == -1).all() else unpack(row) for row in bits]


def test_each_position_of_a_run_has_mask_after_its_drafts():
    req = request_with_grammar(every=3)
    rule = toy_rule(req.sampling.grammar)
    req.output_ids = [3]
    assert masks_after(req, (6, 9)) == [rule.allowed([3]), rule.allowed([3, 6]), rule.allowed([3, 6, 9])]
    assert req.grammar.followed == 1


def test_positions_after_rejected_grammar_draft_are_unmasked():
    req = request_with_grammar(every=3)
    rule = toy_rule(req.sampling.grammar)
    assert masks_after(req, (6, 5, 9)) == [rule.allowed([]), rule.allowed([6]), None, None]


def test_drafts_that_stall_the_grammar_leave_its_state_intact():
    req = request_with_grammar(every=3, stuck=2)
    rule = toy_rule(req.sampling.grammar)
    req.output_ids = [3]
    assert masks_after(req, (6, 9)) == [rule.allowed([3]), None, None]
    assert req.to_finish is None
    assert (req.grammar.matcher.problem, req.grammar.followed) == (None, 1)


def test_masks_of_different_widths_share_a_step():
    """A grammar's tokenizer may know fewer tokens than the model: what it does not know stays forbidden."""
    narrow = request_with_grammar(every=3)
    budget = ReasoningBudget(tokens=0, begin=(1,), end=(120,), opened=True)
    wide = Request(
        rid=RequestId("b"), origin_input_ids=(1,), sampling=SamplingParams(max_tokens=9, reasoning_budget=budget)
    )
    wide.grammar = GrammarProgress.start(BudgetedReasoning.of(budget, None, vocab_size=160, eos_token_ids=set()))
    masks = open_masks([narrow, wide], (0, 1), ())
    fill_masks(masks, [(narrow, ()), (wide, ())])
    assert [unpack(row) for row in masks.wait().numpy()] == [toy_rule(narrow.sampling.grammar).allowed([]), {120}]


def test_grammar_masks_follow_row_order_of_requests():  # [mask-per-row]
    first, plain, second = request_with_grammar(every=3), request_with_grammar(), request_with_grammar(every=5)
    masks = open_masks([first, plain, second], (0, 2), (1, 2, 0))
    assert masks.rows == (0, 1, 5)
