"""The policy `priority` puts running requests back for waiting ones [priority-preempts]."""

import pytest

from tandem_engine.config import SchedulePolicy
from tandem_testing.scheduler_builders import Engine, make_engine, make_message


def engine_of(**settings: object) -> Engine:
    return make_engine(
        schedule_policy=SchedulePolicy.PRIORITY,
        **{"priority_preemption_threshold": 5, "policy_ageing_seconds": 1000.0, **settings},
    )


def running(engine: Engine) -> set[str]:
    return {req.rid for req in engine.scheduler.queues.running}


def add(engine: Engine, rid: str, priority: int, *, tokens: int = 20, prompt: int = 4) -> None:
    engine.add(make_message(rid, [ord(rid[0]) - 90] * prompt, max_tokens=tokens, priority=priority))
    engine.clock.time += 0.01


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_lowest_priority_request_is_preempted_when_all_seats_are_taken(overlap, mixed):
    engine = engine_of(max_running_requests=2, enable_overlap=overlap, enable_mixed_chunk=mixed)
    add(engine, "low", 0)
    add(engine, "middle", 3)
    engine.step(4)
    add(engine, "urgent", 9)
    engine.step(2)
    assert running(engine) == {"middle", "urgent"}
    assert engine.scheduler.stats().preempted_total == 1
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize(("tokens", "left"), [(28, {"a", "b"}), (52, {"a"}), (76, set())])
@pytest.mark.parametrize("overlap", [False, True])
def test_urgent_request_preempts_only_as_many_requests_as_it_needs_pages_of(overlap, tokens, left):
    engine = engine_of(
        usable_pages=24, page_size=4, enable_overlap=overlap, init_new_token_ratio=1.0, min_new_token_ratio=1.0
    )
    for rid in ("a", "b", "c"):
        add(engine, rid, 0)
    engine.step(4)
    assert len(running(engine)) == 3
    add(engine, "urgent", 9, prompt=12, tokens=tokens)
    engine.step(2)
    assert running(engine) == {"urgent"} | left
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


def test_priority_difference_below_threshold_does_not_preempt():
    engine = engine_of(max_running_requests=1)
    add(engine, "low", 0)
    engine.step(3)
    add(engine, "close", 4)
    engine.step(3)
    assert running(engine) == {"low"}
    assert engine.scheduler.stats().head_waits == "no_seat"
    add(engine, "urgent", 5)
    engine.step(1)
    assert running(engine) == {"urgent"}
    engine.run()
    engine.assert_expected()


def test_no_preemption_if_it_would_not_free_enough():
    engine = engine_of(usable_pages=24, page_size=4, init_new_token_ratio=1.0, min_new_token_ratio=1.0)
    add(engine, "small", 0, tokens=8)
    add(engine, "peer", 9, tokens=60)
    engine.step(3)
    add(engine, "urgent", 9, prompt=40, tokens=40)
    engine.step(2)
    assert running(engine) == {"small", "peer"}
    engine.run()
    engine.assert_expected()


def test_chunked_prefill_is_preempted_by_urgent_chunked_prompt():
    engine = engine_of(chunked_prefill_size=4, max_prefill_tokens=16)
    add(engine, "background", 0, prompt=40, tokens=2)
    engine.step(3)
    add(engine, "urgent", 9, prompt=12, tokens=2)
    engine.step()
    assert engine.scheduler.queues.chunked.rid == "urgent"
    engine.run()
    engine.assert_expected()
    # What was computed of it before is still in the cache: no token was computed twice.
    assert sum(int(batch.extend_lens[: batch.num_extend].sum()) for batch in engine.executor.batches) == 40 + 12
    engine.assert_nothing_held()


def test_aged_request_is_not_preempted():
    engine = engine_of(max_running_requests=1, policy_ageing_seconds=10.0)
    add(engine, "patient", 0)
    engine.step(2)
    engine.clock.time += 10.0 * 5
    add(engine, "urgent", 9)
    engine.step(2)
    assert running(engine) == {"patient"}


def test_preempted_request_passes_the_cap_of_the_queue():  # [retraction-bounded]
    engine = engine_of(max_running_requests=1, max_queued_requests=1)
    add(engine, "low", 0)
    engine.step(2)
    add(engine, "urgent", 9)
    engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["low"]
    engine.run()
    engine.assert_expected()


def test_preemptions_of_a_request_are_bounded_without_failure():  # [retraction-bounded]
    engine = engine_of(max_running_requests=1, max_retractions=2)
    add(engine, "low", 0, tokens=60)
    for number in range(5):
        while running(engine) != {"low"}:
            engine.step()
        add(engine, f"urgent{number}", 9, tokens=2)
        engine.step(2)
    engine.run()
    assert engine.scheduler.stats().preempted_total == 2
    engine.assert_expected()
