"""Conversations that the engine keeps: a turn brings only what is new."""

import msgspec
import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.config import HostConfig
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest, PoolingParams, SessionRef
from tandem_testing.disagg_pair import make_pair
from tandem_testing.scheduler_builders import (
    ADAPTER,
    Engine,
    expected_output,
    expected_prompt_logprobs,
    make_engine,
    make_message,
)
from tandem_testing.toy_grammar import toy_grammar

FIRST = (*range(1, 15),)
SECOND = (40, 41, 42)


def kept(**settings: object) -> Engine:
    return make_engine(**{"session_pages": 32, **settings})


def turn(engine: Engine, number: int | None, new: tuple[int, ...], *, session: str = "s", **fields: object) -> str:
    """Run one turn to its end; returns its rid."""
    rid = f"{session}-{number}-{len(engine.messages)}"
    engine.add(make_message(rid, new, session=SessionRef(id=session, turn=number), **{"max_tokens": 6, **fields}))
    engine.run()
    return rid


def whole(engine: Engine, first: str, second: str) -> GenerateRequest:
    """The second turn as a request that brings its whole conversation."""
    prompt = (*engine.messages[first].input_ids, *engine.output(first), *engine.messages[second].input_ids)
    return make_message("whole", prompt, max_tokens=engine.messages[second].sampling.max_tokens)


def refusal(engine: Engine, rid: str) -> Finish:
    finish = engine.finish(rid)
    assert finish is not None
    assert finish.param == "session"
    return finish


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_turn_continues_after_everything_before_it(overlap: bool, page_size: int):
    engine = kept(enable_overlap=overlap, page_size=page_size)
    first = turn(engine, 0, FIRST)
    second = turn(engine, 1, SECOND)
    assert engine.output(second) == expected_output(whole(engine, first, second))
    third = turn(engine, 2, (7,))
    history = (*whole(engine, first, second).input_ids, *engine.output(second), 7)
    assert engine.output(third) == expected_output(make_message("x", history, max_tokens=6))


def test_only_new_tokens_of_turn_are_computed():
    engine = kept()
    turn(engine, 0, FIRST)
    second = turn(engine, 1, SECOND)
    cached = next(o.cached_tokens for o in engine.received[second].outputs if o.cached_tokens is not None)
    assert cached == (len(FIRST) + 5) // 4 * 4  # the last output token was never computed


def test_session_pages_survive_eviction_by_other_requests():
    engine = kept(usable_pages=24)
    turn(engine, 0, FIRST)
    for number in range(12):
        engine.add(make_message(f"other-{number}", [50 + number] * 17, max_tokens=2))
        engine.run()
    second = turn(engine, 1, SECOND)
    assert max(o.cached_tokens or 0 for o in engine.received[second].outputs) == 16


def test_session_continues_after_large_request_evicts_its_pages():
    engine = kept(usable_pages=12)
    first = turn(engine, 0, FIRST)
    assert engine.scheduler.sessions.pinned_pages == 4
    engine.add(make_message("large", range(50, 90), max_tokens=5))
    engine.run()
    engine.assert_expected("large")
    assert engine.scheduler.sessions.pinned_pages == 0
    second = turn(engine, 1, SECOND)
    assert engine.output(second) == expected_output(whole(engine, first, second))


def test_running_requests_are_not_retracted_for_a_session():
    engine = kept(usable_pages=12)
    turn(engine, 0, FIRST)
    engine.add(make_message("long", range(50, 62), max_tokens=30))
    engine.run()
    engine.assert_expected("long")
    assert engine.scheduler.stats().retracted_total == 0


def test_transfer_that_needs_the_pages_gets_them():
    pair = make_pair(decode={"usable_pages": 12, "session_pages": 12})
    decode = pair.decode.engine
    decode.add(make_message("turn", FIRST, session=SessionRef(id="s"), max_tokens=6))
    decode.run()
    pair.submit("r", tuple(range(50, 90)), max_tokens=3)
    pair.run()
    assert decode.output("r") == pair.expected("r")


def test_pins_stay_within_their_bound_and_the_oldest_goes_first():
    engine = kept(session_pages=9)
    for name in ("a", "b", "c"):
        turn(engine, 0, tuple(ord(name) - 90 + i for i in range(14)), session=name)
    assert engine.scheduler.sessions.pinned_pages == 8
    assert len(engine.scheduler.sessions) == 3


def test_session_continues_after_cache_flush():
    engine = kept()
    turn(engine, 0, tuple(range(1, 15)))
    engine.run()
    engine.scheduler.require_flushable()
    engine.scheduler.forget_kv()
    assert engine.scheduler.audit().tree == 0
    rid = turn(engine, 1, (3, 4))
    engine.run()
    assert engine.received[rid].outputs[0].cached_tokens == 0
    engine.assert_nothing_held()


def test_session_larger_than_the_bound_is_kept_without_its_pages():
    engine = kept(session_pages=3)
    first = turn(engine, 0, FIRST)
    assert engine.scheduler.sessions.pinned_pages == 0
    second = turn(engine, 1, SECOND)
    assert engine.output(second) == expected_output(whole(engine, first, second))


def test_session_that_is_not_used_is_forgotten():
    engine = kept(session_ttl=10.0)
    turn(engine, 0, FIRST)
    engine.clock.time += 10.0
    engine.step()
    assert len(engine.scheduler.sessions) == 0
    assert engine.scheduler.sessions.pinned_pages == 0
    assert "expired" in refusal(engine, turn(engine, 1, SECOND)).error


def test_session_expired_while_engine_was_idle_is_lost():
    engine = kept(session_ttl=10.0)
    turn(engine, 0, FIRST)
    engine.clock.time += 10.0
    engine.add(make_message("late", SECOND, session=SessionRef(id="s", turn=1)))
    assert (refusal(engine, "late").code, refusal(engine, "late").retryable) == ("session_lost", False)


def test_use_keeps_a_session_alive():
    engine = kept(session_ttl=10.0)
    turn(engine, 0, FIRST)
    engine.clock.time += 9.0
    turn(engine, 1, SECOND)
    engine.clock.time += 9.0
    assert engine.finish(turn(engine, 2, SECOND)).reason is FinishReason.LENGTH


def test_no_more_sessions_are_kept_than_allowed():
    engine = kept(max_sessions=2)
    for name in ("a", "b", "c"):
        turn(engine, 0, FIRST, session=name)
    refusal(engine, turn(engine, 1, SECOND, session="a"))
    assert engine.finish(turn(engine, 1, SECOND, session="b")).reason is FinishReason.LENGTH


def test_session_turn_without_number_continues_after_latest():
    engine = kept()
    first = turn(engine, 0, FIRST)
    second = turn(engine, None, SECOND)
    assert engine.output(second) == expected_output(whole(engine, first, second))
    assert refusal(engine, turn(engine, None, SECOND, session="unknown")).code == "session_lost"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prompt_logprobs_are_those_of_the_new_turn(page_size: int):  # [logprobs-past-cache] [logprobs-through-chunks]
    engine = kept(page_size=page_size)
    first = turn(engine, 0, FIRST)
    second = turn(engine, 1, SECOND, prompt_logprobs=1)
    conversation = whole(engine, first, second)
    scored = make_message("x", conversation.input_ids, prompt_logprobs=1, logprob_start=len(FIRST) + 6)
    assert engine.received[second].prompt_logprobs == expected_prompt_logprobs(scored)
    assert engine.output(second) == expected_output(conversation)


def test_embedding_continues_no_session():
    engine = kept()
    turn(engine, 0, FIRST)
    turn_of_s = make_message("e", SECOND, session=SessionRef(id="s", turn=1), max_tokens=1)
    engine.add(msgspec.structs.replace(turn_of_s, pooling=PoolingParams()))
    refusal(engine, "e")
    assert engine.finish(turn(engine, 1, SECOND)).reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [False, True])
def test_worker_that_receives_the_first_turn_keeps_the_session(overlap: bool):
    pair = make_pair(enable_overlap=overlap, decode={"session_pages": 12})
    decode = pair.decode.engine
    pair.submit_prefill("first", FIRST, max_tokens=6)
    pair.submit_decode("first", FIRST, max_tokens=6, session=SessionRef(id="s"))
    pair.run()
    assert pair.decode.tokens("first") == pair.expected("first")
    assert decode.scheduler.sessions.pinned_pages > 0
    second = turn(decode, 1, SECOND)
    assert decode.received[second].outputs[0].cached_tokens > 0
    assert decode.output(second) == expected_output(whole(decode, "first", second))
    pair.submit_decode("handed", SECOND, session=SessionRef(id="s", turn=2))
    assert "without a handoff" in refusal(decode, "handed").error


@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize("overlap", [False, True])
def test_session_of_grammar_that_ends_with_first_token_is_cached_where_it_is_kept(overlap: bool, max_tokens: int):
    """The KV is handed over although the output is complete, and the output ends as on one worker."""
    grammar = toy_grammar(length=1)
    alone = kept(enable_overlap=overlap)
    single = turn(alone, 0, FIRST, max_tokens=max_tokens, grammar=grammar)
    pair = make_pair(enable_overlap=overlap, decode={"session_pages": 12})
    decode = pair.decode.engine
    # A gateway lets the prefill worker go on: nothing but the grammar ends the output there.
    pair.submit_prefill("first", FIRST, max_tokens=max_tokens + 1, grammar=grammar, keeps_session=True)
    pair.submit_decode("first", FIRST, max_tokens=max_tokens, grammar=grammar, session=SessionRef(id="s"))
    pair.run()
    assert pair.decode.tokens("first") == alone.output(single)
    assert pair.decode.finish("first") == alone.finish(single)
    assert decode.scheduler.sessions.pinned_pages == alone.scheduler.sessions.pinned_pages > 0
    second, again = turn(decode, 1, SECOND), turn(alone, 1, SECOND)
    assert decode.received[second].outputs[0].cached_tokens == alone.received[again].outputs[0].cached_tokens > 0
    assert decode.output(second) == alone.output(again) == expected_output(whole(alone, single, again))
    pair.assert_clean()


@pytest.mark.parametrize("before", [0, 1], ids=["new session", "existing session"])
def test_turn_whose_output_ended_at_the_prefill_worker_leaves_session_as_it_was(before: int):
    """It would compute a turn forever, and refuse every other one."""
    pair = make_pair(decode={"session_pages": 12})
    decode = pair.decode.engine
    if before:
        first = turn(decode, 0, FIRST)
    pair.submit_prefill("gone", FIRST, max_tokens=1)
    pair.submit_decode("gone", FIRST, max_tokens=1, session=SessionRef(id="s"))
    pair.run()
    assert pair.decode.finish("gone") is None
    assert len(decode.scheduler.sessions) == before
    if before:
        second = turn(decode, 1, SECOND)
        assert decode.output(second) == expected_output(whole(decode, first, second))
    else:
        assert decode.finish(turn(decode, 0, SECOND)).reason is FinishReason.LENGTH
    pair.decode.engine.scheduler.sessions.close("", "s")
    pair.assert_clean()


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        (SessionRef(id="s", turn=5), "has 1 turns"),
        (SessionRef(id="unknown", turn=1), "not kept here"),
        (SessionRef(id="", turn=0), "1 to 256 bytes"),
        (SessionRef(id="x" * 300, turn=0), "1 to 256 bytes"),
        (SessionRef(id="s", turn=-1), "at least 0"),
    ],
)
def test_turn_that_cannot_be_is_refused_by_name(ref: SessionRef, says: str):
    engine = kept()
    turn(engine, 0, FIRST)
    engine.add(make_message("bad", SECOND, session=ref))
    assert says in refusal(engine, "bad").error
    assert engine.finish(turn(engine, 1, SECOND)).reason is FinishReason.LENGTH


def test_session_computes_one_turn_at_a_time():
    engine = kept()
    engine.add(make_message("one", FIRST, session=SessionRef(id="s"), max_tokens=6))
    engine.add(make_message("two", FIRST, session=SessionRef(id="s"), max_tokens=6))
    assert "another turn" in refusal(engine, "two").error
    engine.run()
    engine.assert_expected("one")


def test_tenant_cannot_continue_the_session_of_another():
    engine = kept()
    turn(engine, 0, FIRST, cache_salt="mine")
    refusal(engine, turn(engine, 1, SECOND, cache_salt="yours"))


def test_session_belongs_to_one_adapter():
    engine = kept()
    first = turn(engine, 0, FIRST, adapter=ADAPTER)
    assert "another adapter, or without one" in refusal(engine, turn(engine, 1, SECOND)).error
    second = turn(engine, 1, SECOND, adapter=ADAPTER)
    assert engine.output(second) == expected_output(whole(engine, first, second))
    assert next(o.cached_tokens for o in engine.received[second].outputs if o.cached_tokens is not None) > 0


def test_aborted_new_beginning_leaves_the_adapter_as_it_was():
    engine = kept()
    first = turn(engine, 0, FIRST)
    engine.add(make_message("gone", SECOND, session=SessionRef(id="s", turn=0), adapter=ADAPTER, max_tokens=9))
    engine.scheduler.abort(RequestId("gone"))
    engine.run()
    assert "another adapter" in refusal(engine, turn(engine, 1, SECOND, adapter=ADAPTER)).error
    second = turn(engine, 1, SECOND)
    assert engine.output(second) == expected_output(whole(engine, first, second))


@pytest.mark.parametrize("steps", range(4))
def test_aborted_turn_leaves_the_session_as_it_was(steps: int):
    engine = kept(enable_overlap=True)
    first = turn(engine, 0, FIRST)
    engine.add(make_message("gone", SECOND, session=SessionRef(id="s", turn=1), max_tokens=9))
    engine.step(steps)
    engine.scheduler.abort(RequestId("gone"))
    engine.run()
    second = turn(engine, 1, (33, 34))
    assert engine.output(second) == expected_output(whole(engine, first, second))


@pytest.mark.parametrize("steps", range(4))
def test_turn_need_not_wait_for_the_end_of_one_that_was_aborted(steps: int):
    engine = kept(enable_overlap=True)
    first = turn(engine, 0, FIRST)
    engine.add(make_message("gone", SECOND, session=SessionRef(id="s", turn=1), max_tokens=9))
    engine.step(steps)
    engine.scheduler.abort(RequestId("gone"))
    second = turn(engine, 1, (33, 34))
    assert engine.output(second) == expected_output(whole(engine, first, second))
    third = turn(engine, 2, (35,))
    assert engine.finish(third).reason is FinishReason.LENGTH


def test_first_turn_that_is_aborted_leaves_no_session():
    engine = kept()
    engine.add(make_message("gone", FIRST, session=SessionRef(id="s")))
    engine.scheduler.abort(RequestId("gone"))
    engine.run()
    assert len(engine.scheduler.sessions) == 0


def test_turn_zero_restarts_the_session():
    engine = kept()
    turn(engine, 0, FIRST)
    again = turn(engine, 0, SECOND)
    assert engine.output(again) == expected_output(make_message("x", SECOND, max_tokens=6))


def test_closed_session_unpins_its_pages():
    engine = kept()
    turn(engine, 0, FIRST)
    engine.scheduler.sessions.close("", "s")
    assert engine.scheduler.sessions.pinned_pages == 0
    engine.scheduler.sessions.close("", "never seen")
    assert engine.memory.clear_cache() > 0
    engine.assert_nothing_held()


def test_conversation_counts_towards_the_context():
    engine = kept(context_length=32)
    turn(engine, 0, FIRST)
    engine.add(make_message("long", (1,) * 12, session=SessionRef(id="s", turn=1), max_tokens=2))
    assert "context" in engine.finish("long").error


def test_session_survives_retraction():
    engine = kept(force_retract_every=2, max_retractions=1000)
    first = turn(engine, 0, FIRST)
    second = turn(engine, 1, SECOND)
    assert engine.output(second) == expected_output(whole(engine, first, second))


def test_pin_keeps_nothing_in_host_memory():
    """What the device has of a conversation is pinned; host memory may have a continuation of its last, uncomputed
    token."""
    engine = kept(host_pages=32, host=HostConfig(enable_cache=True), page_size=4, session_pages=32)
    longer = make_message("longer", FIRST, max_tokens=14)
    engine.add(longer)
    engine.run()
    engine.step(4)
    engine.memory.allocator.free(engine.memory.cache.evict(engine.memory.cache.evictable_pages()))
    # 14 + 10 tokens: the last of a page is sampled and never computed here.
    engine.add(make_message("turn", FIRST, session=SessionRef(id="s"), max_tokens=10))
    engine.run()
    assert engine.output("turn") == engine.output("longer")[:10]
    engine.scheduler.sessions.close("", "s")
    engine.step(4)
    blocks = engine.memory.host.tier.blocks
    assert blocks.evictable == len(blocks) > 0


def test_session_expires_while_another_is_busy():
    engine = kept(session_ttl=10.0)
    engine.add(make_message("long", FIRST, session=SessionRef(id="busy"), max_tokens=60))
    engine.step(3)
    turn_of_another = make_message("short", SECOND, session=SessionRef(id="idle"), max_tokens=2)
    engine.add(turn_of_another)
    engine.step(8)
    assert engine.finish("short") is not None
    engine.clock.time += 11.0
    engine.step()
    assert engine.finish("long") is None
    assert len(engine.scheduler.sessions) == 1
    engine.run()


@pytest.mark.parametrize("steps", range(4))
def test_aborted_session_restart_keeps_previous_turns(steps: int):
    engine = kept(enable_overlap=True)
    first = turn(engine, 0, FIRST)
    engine.add(make_message("gone", SECOND, session=SessionRef(id="s"), max_tokens=9))
    engine.step(steps)
    engine.scheduler.abort(RequestId("gone"))
    engine.run()
    second = turn(engine, 1, (33, 34))
    assert engine.output(second) == expected_output(whole(engine, first, second))
