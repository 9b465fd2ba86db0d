"""New prompts wait for others while requests decode: `scheduler_delay_factor`."""

import math

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import SchedulerConfig
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

WAYS = [
    {"enable_mixed_chunk": mixed, "enable_overlap": overlap} for mixed in (False, True) for overlap in (False, True)
]


def why(engine: Engine) -> str:
    return engine.scheduler.stats().head_waits


def after_a_prompt_of_one_second(**config) -> Engine:
    """One request decodes; the step with its prompt took a second."""
    engine = make_engine(usable_pages=200, **config)
    engine.add(make_message("running", [1, 2, 3], max_tokens=60))
    for _ in range(3):
        engine.step()
        engine.clock.time += 1.0
    return engine


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_delayed_prompts_are_computed_together(way):
    engine = after_a_prompt_of_one_second(scheduler_delay_factor=2.0, **way)
    for number in range(4):
        engine.add(make_message(f"r{number}", [number + 1, 5, 6], max_tokens=3))
        engine.step()
        assert why(engine) == "delayed", number
        engine.clock.time += 0.6
    engine.step()
    assert why(engine) == ""
    assert not len(engine.scheduler.queues.waiting)
    engine.run()
    engine.assert_expected()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_first_output_has_the_time_of_the_delay(way):
    engine = after_a_prompt_of_one_second(scheduler_delay_factor=2.0, **way)
    engine.add(make_message("first", [4, 5, 6], max_tokens=3))
    for _ in range(4):
        engine.step()
        engine.clock.time += 0.6
    engine.add(make_message("last", [7, 5, 6], max_tokens=3))
    engine.step()
    engine.clock.time += 0.25
    engine.run()
    delays = {rid: [output.delay_s for output in engine.received[rid].outputs] for rid in ("first", "last", "running")}
    # It waited for the delay from its first plan to the one that admitted it.
    assert delays["first"][0] == pytest.approx(2.4)
    assert {*delays["first"][1:], *delays["last"], *delays["running"]} == {None}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_factor_admits_each_prompt_at_once(way):
    engine = after_a_prompt_of_one_second(**way)
    engine.add(make_message("late", [4, 5, 6], max_tokens=3))
    engine.step()
    assert not len(engine.scheduler.queues.waiting)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_prompt_waits_for_nothing_while_nothing_decodes(way):
    engine = make_engine(scheduler_delay_factor=1000.0, **way)
    for number in range(3):
        engine.add(make_message(f"r{number}", [number + 1, 5, 6], max_tokens=1))
        engine.step()
        assert not len(engine.scheduler.queues.waiting)
        engine.clock.time += 1.0
        engine.run()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_retracted_request_is_not_delayed(way):
    engine = make_engine(scheduler_delay_factor=1e6, force_retract_every=3, usable_pages=200, **way)
    for number in range(3):
        engine.add(make_message(f"r{number}", [number + 1, 5, 6], max_tokens=12))
    steps = 0
    while not engine.scheduler.idle:
        engine.step()
        engine.clock.time += 0.1
        steps += 1
        assert steps < 500
    assert engine.scheduler.tally.retracted
    engine.assert_expected()


def test_idle_time_does_not_count_as_step_time_for_the_delay():
    engine = make_engine(scheduler_delay_factor=1.0, usable_pages=200, enable_overlap=False)
    engine.add(make_message("first", [1, 2, 3], max_tokens=1))
    engine.run()
    engine.step()
    engine.clock.time += 3600.0
    engine.add(make_message("running", [1, 2, 3], max_tokens=30))
    engine.step()
    engine.clock.time += 0.1
    engine.step()
    assert engine.scheduler._loop.planner.delay.last_step_s == pytest.approx(0.1)


@pytest.mark.parametrize("factor", [-0.5, math.inf, math.nan])
def test_factor_that_is_no_number_from_zero_is_refused(factor):
    with pytest.raises(ConfigError, match="--scheduler-delay-factor"):
        SchedulerConfig(scheduler_delay_factor=factor)
