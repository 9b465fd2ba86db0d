"""An operator's pause changes nothing but the time at which tokens come."""

import pytest

from tandem_engine.base.errors import BusyError
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_testing.disagg_pair import make_pair
from tandem_testing.scheduler_builders import Engine, make_engine, make_message
from tandem_testing.toy_grammar import ToyGrammars, toy_grammar

KEEPING = [PauseMode.IN_PLACE, PauseMode.RETRACT]


def busy_engine(*, overlap: bool, **settings: object) -> Engine:
    engine = make_engine(enable_overlap=overlap, chunked_prefill_size=4, enable_mixed_chunk=True, **settings)
    for i in range(4):
        engine.add(make_message(f"r{i}", range(1 + i, 10 + 3 * i), max_tokens=8, temperature=1.0, seed=i))
    return engine


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", KEEPING)
@pytest.mark.parametrize("every", [1, 3])
def test_pausing_at_any_moment_changes_no_token(overlap, mode, every):
    engine = busy_engine(overlap=overlap)
    for turn in range(200):
        if engine.scheduler.idle:
            break
        engine.step()
        if turn % every == 0:
            engine.scheduler.pause(mode)
            engine.step(2)
            engine.scheduler.resume()
            # A retracted request computes its prompt again: let it get somewhere before the next pause.
            engine.step(6)
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize("mode", KEEPING)
def test_nothing_is_launched_while_paused_and_new_requests_wait(mode):
    engine = busy_engine(overlap=True)
    engine.step(3)
    engine.scheduler.pause(mode)
    launched = engine.scheduler.launched
    engine.add(make_message("late", [5, 6], max_tokens=3))
    engine.step(5)
    assert engine.scheduler.launched == launched
    assert engine.scheduler.for_stages.step_in_flight is None
    assert engine.scheduler.stats().paused
    engine.scheduler.resume()
    engine.run()
    engine.assert_expected()


def test_pause_with_refuse_new_rejects_requests_as_retryable():
    engine = busy_engine(overlap=True)
    engine.step(3)
    engine.scheduler.pause(PauseMode.IN_PLACE, refuse_new=True)
    engine.add(make_message("late", [5, 6], max_tokens=3))
    assert (engine.finish("late").code, engine.finish("late").retryable) == ("paused", True)
    engine.scheduler.resume()
    engine.add(make_message("later", [5, 6], max_tokens=3))
    engine.run()
    engine.assert_expected("later", *(f"r{i}" for i in range(4)))


def test_in_place_keeps_kv_and_retract_gives_it_back():
    engine = busy_engine(overlap=True)
    engine.step(4)
    engine.scheduler.pause(PauseMode.IN_PLACE)
    held = engine.scheduler.audit().private
    assert held > 0
    assert engine.scheduler.pause(PauseMode.RETRACT) > 0
    assert engine.scheduler.audit().private == 0
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["r0", "r1", "r2", "r3"]


def test_pause_in_abort_mode_aborts_all_requests():
    engine = busy_engine(overlap=True)
    engine.step(3)
    assert engine.scheduler.pause(PauseMode.ABORT) == 4
    assert {engine.finish(f"r{i}").reason for i in range(4)} == {FinishReason.ABORT}
    engine.assert_nothing_held()


def test_aborts_and_deadlines_are_obeyed_while_paused():
    engine = busy_engine(overlap=True)
    engine.add(make_message("hasty", [9, 9], deadline_s=5.0))
    engine.step(3)
    engine.scheduler.pause(PauseMode.IN_PLACE)
    engine.scheduler.abort("r0")
    engine.clock.time = 6.0
    engine.step(2)
    assert engine.finish("r0").reason is FinishReason.ABORT
    assert engine.finish("hasty").code == "deadline_exceeded"


def test_cache_flush_requires_no_held_pages():
    engine = busy_engine(overlap=False, page_size=2)
    engine.step(4)
    with pytest.raises(BusyError, match="requests hold KV pages: wait"):
        engine.scheduler.require_flushable()
    engine.scheduler.pause(PauseMode.RETRACT)
    assert engine.scheduler.audit().tree > 0
    engine.scheduler.require_flushable()
    engine.scheduler.forget_kv()
    assert engine.scheduler.audit().tree == 0
    engine.scheduler.resume()
    engine.run()
    engine.assert_expected()


def test_end_started_fails_only_started_requests():
    engine = busy_engine(overlap=True, max_running_requests=2)
    engine.step(4)
    finish = Finish(reason=FinishReason.ERROR, error="replaced", code="model_replaced", retryable=True)
    assert engine.scheduler.end_started(finish) == 2
    assert [engine.finish(f"r{i}") for i in range(4)] == [finish, finish, None, None]
    engine.run()
    engine.assert_expected("r2", "r3")
    engine.assert_nothing_held()


def test_kv_that_waits_for_a_grammar_is_given_back_for_a_flush():
    grammars, spec = ToyGrammars(hold=True), toy_grammar()
    pair = make_pair(decode={"grammars": grammars})
    pair.submit("r", grammar=spec)
    pair.turn(20)
    decode = pair.decode.engine.scheduler
    assert [req.rid for req in decode.queues.parked()] == ["r"]
    assert decode.pause(PauseMode.RETRACT) == 1
    decode.require_flushable()
    decode.forget_kv()
    assert decode.audit().tree == 0
    decode.resume()
    grammars.finish(spec)
    pair.run()
    assert pair.decode.tokens("r") == pair.expected("r")
    pair.assert_clean()


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_that_is_half_scored_counts_as_begun(overlap):
    """Its prompt logprobs would come from two models."""
    engine = make_engine(enable_overlap=overlap, chunked_prefill_size=4)
    engine.add(make_message("scored", range(1, 20), max_tokens=2, prompt_logprobs=0))
    engine.add(make_message("waiting", range(30, 40), max_tokens=2, prompt_logprobs=0))
    engine.step(2)
    engine.scheduler.pause(PauseMode.RETRACT)
    finish = Finish(reason=FinishReason.ERROR, error="replaced", code="model_replaced", retryable=True)
    assert engine.scheduler.end_started(finish) == 1
    assert engine.finish("scored") == finish
    engine.scheduler.resume()
    engine.run()
    engine.assert_expected("waiting")
