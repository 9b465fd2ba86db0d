"""In which order each policy serves a queue."""

import pytest

from tandem_engine.config import SchedulePolicy
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

FCFS, LPM, DFS = SchedulePolicy.FCFS, SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT
PRIORITY, SRF = SchedulePolicy.PRIORITY, SchedulePolicy.SRF


def engine_of(policy: SchedulePolicy, **settings: object) -> Engine:
    """Room for all in one step, in which first tokens come in the order of admission."""
    return make_engine(schedule_policy=policy, usable_pages=200, **settings)


def queue(engine: Engine, **prompts: list[int]) -> None:
    for rid, prompt in prompts.items():
        engine.add(make_message(rid, prompt, max_tokens=1))


def served(engine: Engine) -> list[str]:
    """Ids in the order of their first output."""
    return [*dict.fromkeys(output.rid for _, outputs in engine.deliveries for output in outputs)]


def warm(engine: Engine, *prompts: list[int]) -> None:
    """Have the cache know `prompts`."""
    for number, prompt in enumerate(prompts):
        engine.add(make_message(f"warm-{number}", [*prompt, 1], max_tokens=1))
        engine.run()
    engine.deliveries.clear()


def branch(number: int, pages: int = 2) -> list[int]:
    """Tokens of `pages` pages of four, unlike those of any other number."""
    return [number + i for i in range(4 * pages)]


def test_first_come_first_served():
    engine = engine_of(FCFS)
    queue(engine, a=branch(40), b=[1], c=branch(10))
    engine.run()
    assert served(engine) == ["a", "b", "c"]


def test_longest_cached_prefix_goes_first():
    engine = engine_of(LPM)
    warm(engine, branch(10, 4), branch(40, 2))
    queue(engine, cold=branch(60), short=[*branch(40, 2), 7], long=[*branch(10, 4), 7], tie=[5, 6])
    engine.run()
    assert served(engine) == ["long", "short", "cold", "tie"]


def test_prefix_shared_by_more_waiting_requests_is_served_first():
    engine = engine_of(DFS)
    warm(engine, branch(10, 4), branch(40, 2))
    queue(engine, long=[*branch(10, 4), 7], a=[*branch(40, 2), 7], cold=[5, 6], b=[*branch(40, 2), 8])
    engine.run()
    assert served(engine) == ["a", "b", "long", "cold"]


def test_branches_of_shared_prefix_run_depth_first_before_root():
    engine = engine_of(DFS)
    root = branch(10, 2)
    warm(engine, [*root, *branch(40)], [*root, *branch(60)], branch(80, 3))
    queue(
        engine,
        root=[*root, 9],
        left=[*root, *branch(40), 1],
        other=[*branch(80, 3), 1],
        right_1=[*root, *branch(60), 1],
        right_2=[*root, *branch(60), 2],
    )
    engine.run()
    assert served(engine) == ["right_1", "right_2", "left", "root", "other"]


def test_salts_are_separate_branches():
    engine = engine_of(DFS)
    for salt in ("a", "b"):
        engine.add(make_message(f"warm-{salt}", [*branch(10), 1], max_tokens=1, cache_salt=salt))
    engine.run()
    engine.deliveries.clear()
    for rid, salt in [("a1", "a"), ("b1", "b"), ("b2", "b")]:
        engine.add(make_message(rid, [*branch(10), 7], max_tokens=1, cache_salt=salt))
    engine.run()
    assert served(engine) == ["b1", "b2", "a1"]


def test_greatest_priority_goes_first_and_equals_in_their_order():
    engine = engine_of(PRIORITY)
    for rid, priority in [("low", -3), ("a", 0), ("high", 5), ("b", 0)]:
        engine.add(make_message(rid, [1, 2], max_tokens=1, priority=priority))
    engine.run()
    assert served(engine) == ["high", "a", "b", "low"]


def test_fewest_steps_left_go_first():
    engine = engine_of(SRF, chunked_prefill_size=4, max_prefill_tokens=4, max_running_requests=1)
    engine.add(make_message("talkative", [1], max_tokens=9))
    engine.add(make_message("long", branch(10, 5), max_tokens=2))
    engine.add(make_message("brief", [1, 2], max_tokens=2))
    engine.run()
    assert served(engine) == ["brief", "long", "talkative"]


def test_queue_too_long_to_match_is_served_in_its_order():
    engine = engine_of(LPM, max_running_requests=1)
    warm(engine, branch(10, 4))
    rids = [f"r{number}" for number in range(129)]
    for rid in rids:
        engine.add(make_message(rid, [5], max_tokens=1))
    engine.add(make_message("cached", [*branch(10, 4), 7], max_tokens=1))
    engine.step(2)
    assert served(engine) == ["r0", "r1"]
    engine.step()  # 128 wait: now they are matched
    assert served(engine) == ["r0", "r1", "cached"]


@pytest.mark.parametrize("policy", [FCFS, LPM, DFS, PRIORITY])
def test_newest_of_lowest_priority_is_retracted(policy):
    engine = make_engine(schedule_policy=policy, force_retract_every=2, policy_ageing_seconds=1000.0)
    for rid, priority in [("old", 0), ("important", 1), ("new", 0)]:
        engine.add(make_message(rid, [len(rid)] * 3, max_tokens=6, priority=priority))
        engine.clock.time += 1
    while not engine.scheduler.tally.retracted:
        engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["new"]


def test_srf_retracts_request_with_most_remaining_tokens():
    engine = make_engine(schedule_policy=SRF, force_retract_every=2)
    for rid, tokens in [("short", 6), ("long", 20), ("medium", 9)]:
        engine.add(make_message(rid, [len(rid)] * 3, max_tokens=tokens))
    while not engine.scheduler.tally.retracted:
        engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["long"]
