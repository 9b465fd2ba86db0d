"""Requests that share what is being computed wait for it instead of computing it again [settled-before-shared]."""

import pytest

from tandem_engine.config import SchedulePolicy
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

PREFIX = [*range(1, 41)]
"""Ten pages of four."""


def computed(engine: Engine) -> int:
    """Prompt tokens that the model was given."""
    return sum(int(batch.extend_lens[: batch.num_extend].sum()) for batch in engine.executor.batches)


def engine_of(policy: SchedulePolicy = SchedulePolicy.LPM, **settings: object) -> Engine:
    return make_engine(schedule_policy=policy, **{"usable_pages": 400, **settings})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [SchedulePolicy.FCFS, SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT])
def test_prefix_that_came_with_several_requests_is_computed_once(policy, overlap):
    engine = engine_of(policy, enable_overlap=overlap)
    for number in range(5):
        engine.add(make_message(f"r{number}", [*PREFIX, 60 + number], max_tokens=2))
    engine.run()
    assert computed(engine) == 41 + 4
    engine.assert_expected()
    engine.assert_nothing_held()


def test_no_shared_prefix_wait_without_prefix_cache():
    engine = engine_of(SchedulePolicy.FCFS, radix=False)
    for number in range(5):
        engine.add(make_message(f"r{number}", [*PREFIX, 60 + number], max_tokens=2))
    engine.run()
    assert computed(engine) == 5 * 41


def test_fcfs_keeps_order_after_shared_prefix_wait():
    engine = engine_of(SchedulePolicy.FCFS)
    for rid, prompt in [("first", [*PREFIX, 60]), ("waits", [*PREFIX, 61]), ("other", [70, 71])]:
        engine.add(make_message(rid, prompt, max_tokens=2))
    engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["waits", "other"]
    assert engine.scheduler.stats().head_waits == "shared_prefix"
    engine.run()
    engine.assert_expected()


def test_others_are_not_held_up_by_those_that_wait():
    engine = engine_of()
    for rid, prompt in [("first", [*PREFIX, 60]), ("waits", [*PREFIX, 61]), ("other", [70, 71])]:
        engine.add(make_message(rid, prompt, max_tokens=2))
    engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["waits"]
    assert engine.scheduler.stats().head_waits == "shared_prefix"


def test_request_waits_only_for_shared_part_of_long_prompt():
    engine = engine_of(chunked_prefill_size=16, max_prefill_tokens=64)
    engine.add(make_message("long", [*PREFIX, *range(41, 90), *range(1, 60)], max_tokens=2))
    engine.add(make_message("short", [*PREFIX, 90], max_tokens=2))
    engine.step(2)
    assert "short" in {req.rid for req in engine.scheduler.queues.waiting}
    engine.step(2)
    assert engine.scheduler.queues.chunked.rid == "long"
    assert engine.received["short"].outputs[0].cached_tokens >= 32
    engine.run()
    engine.assert_expected()


def test_little_in_common_is_not_worth_waiting_for():
    engine = engine_of()
    for rid, own in [("one", 60), ("two", 61)]:
        engine.add(make_message(rid, [*PREFIX[:31], own, own], max_tokens=2))
    engine.step()
    assert not engine.scheduler.queues.waiting


def test_salts_share_nothing_to_wait_for():
    engine = engine_of()
    for salt in ("a", "b"):
        engine.add(make_message(salt, [*PREFIX, 60], max_tokens=2, cache_salt=salt))
    engine.step()
    assert len(engine.scheduler.queues.waiting) == 0


def test_shared_prefix_wait_ends_at_abort_of_first_request():
    engine = engine_of(chunked_prefill_size=16, max_prefill_tokens=16)
    engine.add(make_message("gone", [*PREFIX, 60], max_tokens=2))
    engine.add(make_message("waits", [*PREFIX, 61], max_tokens=2))
    engine.step()
    engine.scheduler.abort("gone")
    engine.run()
    engine.assert_expected("waits")
    assert computed(engine) == 41
    engine.assert_nothing_held()
