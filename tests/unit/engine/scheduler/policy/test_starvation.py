"""A stream of requests that a policy prefers, and one that it does not: how long does that one wait?"""

import pytest

from tandem_engine.config import SchedulePolicy
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

AGING = 20.0
CACHED = [*range(1, 33)]


def unloved(policy: SchedulePolicy) -> dict[str, object]:
    """What the policy puts last."""
    if policy is SchedulePolicy.SRF:
        return {"prompt": [80] * 40, "max_tokens": 30}
    return {"prompt": [80, 81], "max_tokens": 1, "priority": -1 if policy is SchedulePolicy.PRIORITY else 0}


def favorite(engine: Engine, number: int) -> None:
    """What every policy puts first: cached, short, important."""
    engine.add(make_message(f"f{number}", [*CACHED, number % 90 + 1], max_tokens=1, priority=0))


def seconds_until_served(policy: SchedulePolicy) -> float:
    """One seat, and two favorites arrive for each that is served: a queue that never gets shorter."""
    engine = make_engine(schedule_policy=policy, max_running_requests=1, usable_pages=400, policy_ageing_seconds=AGING)
    engine.add(make_message("warm", [*CACHED, 99 % 90], max_tokens=1))
    engine.run()
    favorite(engine, 0)
    start = engine.clock.time
    engine.add(make_message("unloved", **unloved(policy)))
    for number in range(1, 200):
        favorite(engine, number)
        engine.step()
        if "unloved" in engine.received:
            return engine.clock.time - start
        engine.clock.time += 1.0
        favorite(engine, 500 + number)
    raise AssertionError(f"{policy} never served it")


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_queue_wait_is_bounded_by_aging_period(policy):
    # Two favorites arrive for each second: under `priority` those of the first AGING seconds go before it.
    before = 2 * AGING if policy is SchedulePolicy.PRIORITY else AGING
    assert seconds_until_served(policy) <= before + 2


@pytest.mark.parametrize("policy", [SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT, SchedulePolicy.PRIORITY])
def test_request_without_aging_waits_for_all_later_ones(policy):
    assert seconds_until_served(policy) >= AGING - 1


def test_priority_lower_by_n_is_overtaken_for_n_aging_periods():
    engine = make_engine(
        schedule_policy=SchedulePolicy.PRIORITY,
        max_running_requests=1,
        policy_ageing_seconds=10.0,
        priority_preemption_threshold=100,
    )
    engine.add(make_message("running", [1], max_tokens=3))
    engine.step()
    for time, rid, priority in [(0.0, "low", 0), (29.0, "before", 3), (31.0, "after", 3)]:
        engine.clock.time = time
        engine.add(make_message(rid, [1, 2], max_tokens=1, priority=priority))
    engine.run()
    order = [*dict.fromkeys(output.rid for _, outputs in engine.deliveries for output in outputs)]
    assert order == ["running", "before", "low", "after"]


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_overdue_requests_run_fcfs_in_policies_without_priority(policy):
    engine = make_engine(schedule_policy=policy, max_running_requests=1, policy_ageing_seconds=5.0)
    for number, prompt in enumerate([[80] * 20, [1, 2], [70] * 9, [3]]):
        engine.add(make_message(f"r{number}", prompt, max_tokens=1 + 3 * (number == 0)))
        engine.clock.time += 1.0
    engine.clock.time += 10.0
    engine.run()
    assert [*dict.fromkeys(o.rid for _, outputs in engine.deliveries for o in outputs)] == ["r0", "r1", "r2", "r3"]
