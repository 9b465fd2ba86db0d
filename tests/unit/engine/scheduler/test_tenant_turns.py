"""Prompts of several tenants are computed in turns, and in small parts while there are several."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem_engine.config import SchedulePolicy
from tandem_engine.scheduler.prefill_adder import BESIDE_BEHIND
from tandem_engine.scheduler.queues import TENANT_WINDOW_S
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

CHUNK, SHARED, STEP = 32, 8, 64
"""Tokens: of one request in a step, of a step while there are several tenants, of a step."""


def engine_of(**config: object) -> Engine:
    settings = {
        "chunked_prefill_size": CHUNK,
        "shared_prefill_tokens": SHARED,
        "max_prefill_tokens": STEP,
        "enable_mixed_chunk": True,
        "usable_pages": 400,
        "max_rows": 64,
        "context_length": 512,
        **config,
    }
    return make_engine(**settings)


def send(engine: Engine, rid: str, tenant: str, tokens: int, **fields: object) -> None:
    """A prompt that shares no prefix with another."""
    number = sum(map(ord, rid)) % 50
    prompt = [1 + (number + position * (number + 1)) % 60 for position in range(tokens)]
    engine.add(make_message(rid, prompt, tenant=tenant, max_tokens=1, **fields))


def parts(engine: Engine) -> list[list[int]]:
    """Prompt tokens of each step, by request."""
    return [batch.extend_lens[: batch.num_extend].tolist() for batch in engine.executor.batches]


def first_tokens(engine: Engine) -> list[str]:
    """Requests in the order of their first tokens."""
    outputs = [output for _, delivered in engine.deliveries for output in delivered]
    return [*dict.fromkeys(output.rid for output in outputs if output.token_ids)]


def test_chunks_of_one_tenant_alone_are_whole():
    engine = engine_of()
    send(engine, "one", "a", 80)
    engine.step()
    send(engine, "two", "a", 40)
    engine.run()
    assert parts(engine) == [[32], [32], [16, 32], [8]]
    engine.assert_expected()


def test_prompt_of_another_tenant_goes_before_a_chunk():
    engine = engine_of()
    send(engine, "long", "big", 200)
    engine.step(2)
    send(engine, "short", "small", 10)
    engine.run()
    # A whole chunk was computed before the other tenant came; its whole prompt is in the next step.
    assert parts(engine)[:5] == [[32], [32], [10, 1], [8], [8]]
    assert first_tokens(engine) == ["short", "long"]
    engine.assert_expected()


def test_prompt_above_a_chunk_is_whole_next_to_a_chunked_one():
    engine = engine_of()
    send(engine, "long", "big", 300)
    engine.step(3)
    send(engine, "medium", "small", 50)
    engine.step()
    assert parts(engine)[-1] == [50, 1]
    engine.run()
    engine.assert_expected()


def test_prompt_that_comes_during_a_step_is_in_the_next():
    """In overlap mode, too, where the next step of one tenant is launched before this one has settled."""
    for other, expected in (("small", [5, 1]), ("big", [SHARED])):
        engine = engine_of(enable_overlap=True)
        send(engine, "earlier", "small", 4)
        engine.run()
        send(engine, "long", "big", 200)
        while parts(engine)[-1:] != [[SHARED]]:
            engine.step()
        launched = len(parts(engine))
        send(engine, "short", other, 5)
        while len(parts(engine)) == launched:
            engine.step()
        assert parts(engine)[launched] == expected
        engine.run()
        engine.assert_expected()


def test_prompt_of_another_tenant_goes_before_a_queue():
    engine = engine_of()
    for number in range(6):
        send(engine, f"big{number}", "big", 30)
    engine.step()
    send(engine, "small", "small", 10)
    engine.run()
    assert first_tokens(engine)[2] == "small"
    engine.assert_expected()


@pytest.mark.parametrize("length", [3, 4, SHARED])
def test_step_of_a_tenant_behind_has_few_tokens_of_a_queue(length):
    """As of 128 prompts in one request: a step has several of them, and the short prompt waits for none."""
    engine = engine_of(shared_prefill_tokens=SHARED * 2)
    send(engine, "earlier", "small", 1)
    engine.run()
    for number in range(40):
        send(engine, f"big{number}", "big", length)
    engine.step(3)
    launched = len(parts(engine))
    assert sum(parts(engine)[-1]) == SHARED * 2
    send(engine, "short", "small", 3)
    engine.step()
    assert sum(parts(engine)[launched]) - 3 <= SHARED * 2 // BESIDE_BEHIND
    assert "short" in first_tokens(engine)
    engine.step()
    assert sum(parts(engine)[-1]) == SHARED * 2, "the next step is theirs"
    engine.run()
    engine.assert_expected()


def test_chunked_prompt_is_computed_beside_many_tenants_behind():
    """Each tenant is behind all others together: the prompt has the first tokens of steps once its turn has passed."""
    engine = engine_of()
    send(engine, "long", "big", 300)
    engine.step(2)
    steps = 0
    while "long" not in first_tokens(engine):
        send(engine, f"short{steps}", f"tenant {steps}", SHARED)
        engine.step()
        steps += 1
    # The others have as many tokens as the whole prompt first, and the rest of it the usual part of each step.
    assert steps <= 300 // SHARED + 300 // SHARED
    assert len(first_tokens(engine)) >= steps, "the others are computed as they come"
    engine.run()
    engine.assert_expected()


def test_prompts_that_end_before_their_turn_are_not_charged():
    engine = engine_of()
    for number in range(8):
        send(engine, f"big{number}", "big", 30)
    for number in range(2):
        send(engine, f"gone{number}", "small", 300)
    engine.step()
    for number in range(2):
        engine.scheduler.abort(f"gone{number}")
    engine.step()
    send(engine, "small", "small", 10)
    engine.run()
    assert first_tokens(engine).index("small") <= 2


def test_order_of_one_tenant_is_arrival():
    engine = engine_of()
    for number in range(5):
        send(engine, f"big{number}", "big", 20)
        send(engine, f"small{number}", "small", 5)
    engine.run()
    for tenant in ("big", "small"):
        mine = [rid for rid in first_tokens(engine) if rid.startswith(tenant)]
        assert mine == [f"{tenant}{number}" for number in range(5)]


def test_long_prompt_progresses_during_flood_of_short_ones():
    engine = engine_of()
    send(engine, "long", "big", 200)
    engine.step()
    for number in range(60):
        send(engine, f"s{number}", "small", 8)
        engine.step()
    order = first_tokens(engine)
    # Token for token: as many tokens of the flood as of the prompt, which was ahead by a chunk.
    assert "long" in order
    assert order.index("long") <= (200 + CHUNK) // 8
    engine.run()
    engine.assert_expected()


def test_chunks_are_full_after_other_tenants_become_idle():
    engine = engine_of()
    send(engine, "other", "small", 4)
    engine.step(2)
    send(engine, "long", "big", 400)
    engine.step(2)
    assert parts(engine)[-1] == [SHARED]
    engine.clock.time += TENANT_WINDOW_S + 1
    engine.step(2)
    assert parts(engine)[-1] == [CHUNK]
    engine.run()
    engine.assert_expected()


def test_without_a_shared_budget_only_the_order_changes():
    engine = engine_of(shared_prefill_tokens=0)
    for number in range(6):
        send(engine, f"big{number}", "big", 60)
    engine.step()
    send(engine, "small", "small", 10)
    engine.run()
    assert parts(engine)[0] == [CHUNK]
    assert first_tokens(engine).index("small") <= 2
    engine.assert_expected()


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_every_policy_finishes_requests_of_several_tenants(policy):
    engine = engine_of(schedule_policy=policy)
    for number in range(8):
        send(engine, f"big{number}", "big", 70)
        send(engine, f"small{number}", "small", 9)
        engine.step()
    engine.run()
    engine.assert_expected()


lengths = st.integers(1, 120)


@example(flood=[120, 1], before=15, small=2)
@settings(max_examples=30, deadline=None)
@given(flood=st.lists(lengths, min_size=1, max_size=12), before=st.integers(0, 20), small=st.integers(1, STEP - SHARED))
def test_tokens_before_a_single_prompt_are_of_one_step(flood, before, small):
    """However much another tenant has queued: the next step computes the single prompt, or a chunk of it."""
    engine = engine_of()
    send(engine, "first", "small", 1)
    engine.run()
    for number, tokens in enumerate(flood):
        send(engine, f"big{number}", "big", tokens)
    engine.step(before)
    computed = sum(sum(lens) for lens in parts(engine)[1:])
    launched = len(engine.executor.batches)
    # A chunk is enough where no other prompt is partly computed.
    wanted = small if engine.scheduler.queues.chunked is not None else min(small, CHUNK)
    send(engine, "lone", "small", small)
    engine.step()
    lens = parts(engine)[launched]
    if computed >= small:
        assert wanted in lens
        assert sum(lens) - wanted <= max(1, SHARED // BESIDE_BEHIND)
    engine.run()
    engine.assert_expected()
