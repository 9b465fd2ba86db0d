"""Workers for latency objectives, one situation at a time."""

import math
from dataclasses import replace

import pytest

from tandem_operator.scaling import load as by_load
from tandem_operator.scaling.load import DecodeLoad, PrefillLoad, Targets
from tandem_operator.scaling.policy import ScalingState, decide
from tandem_operator.scaling.slo_need import Decode, decode_need, largest_batch, prefill_need
from tandem_testing.fluid_service import FluidService, config_of
from tandem_testing.latency_figures import distribution_of, prompts_of, steps_of

TARGETS = Targets(queue_seconds=1.0, kv_usage=0.85, latency_s=1.0)
LENGTHS = [200.0, 400.0, 800.0, 300.0] * 50


def prefill(tokens_per_s: float, queued: float = 0.0, lengths=LENGTHS, **figures) -> PrefillLoad:
    return PrefillLoad(
        queued_tokens=queued,
        oldest_wait_s=0.0,
        arrived_tokens_per_s=tokens_per_s,
        worker_tokens_per_s=1000.0,
        prompts=prompts_of(lengths, tokens_per_s, **figures),
    )


def decode(sequences: float, *, batch: float = 20.0, **figures) -> DecodeLoad:
    """Of workers with 100 places and 1000 pages; a sequence holds 2. `batch`: of each worker."""
    return DecodeLoad(
        running=sequences,
        waiting=0.0,
        oldest_wait_s=0.0,
        arrived_per_s=3.0,
        seconds_each=10.0,
        worker_places=100.0,
        used_pages=sequences * 2,
        worker_pages=1000.0,
        steps=steps_of(served_per_s=sequences / steps_of().step_s(batch), **figures),
    )


def test_tighter_objective_needs_more_prefill_workers():
    needs = [prefill_need(prefill(3000.0), replace(TARGETS, latency_s=seconds)).workers for seconds in (1.0, 2.0, 20.0)]
    assert needs[0] > needs[1] > needs[2] > 3.0


def test_burstier_arrivals_need_more_prefill_workers():
    steady, bursty = (prefill_need(prefill(3000.0, arrivals_variation=value), TARGETS) for value in (0.5, 4.0))
    assert bursty.workers > steady.workers


def test_margin_and_correction_are_applied():
    plain = prefill_need(prefill(3000.0), TARGETS).workers
    assert prefill_need(prefill(3000.0, margin=2.0), TARGETS).workers > plain
    assert prefill_need(prefill(3000.0, correction=1.2), replace(TARGETS, latency_s=5.0)).workers > 1.2 * 3.0


def test_backlog_is_cleared_as_without_objective():
    assert prefill_need(prefill(3000.0, queued=63_000.0), TARGETS).workers > 3.0 + 60_000 / 30 / 1000
    patient = replace(TARGETS, latency_s=20.0)
    within = prefill_need(prefill(3000.0, queued=55_000.0), patient).workers
    assert within == prefill_need(prefill(3000.0), patient).workers, "that much may wait"


def test_few_prompts_over_a_long_observation_are_enough_for_a_need():
    few = [200.0, 400.0, 800.0]
    new, old = (prefill_need(prefill(10.0, lengths=few, observed_s=seconds), TARGETS) for seconds in (60.0, 400.0))
    assert (new.lacks_figures, old.lacks_figures) == (True, False)
    assert old.workers < 1.0


def test_prompts_of_no_tokens_ask_for_no_fleet():
    load = prefill(0.0, queued=2000.0, lengths=[0.0] * 50, step_base_s=0.01)
    assert prefill_need(load, TARGETS).workers < 10


def test_reason_of_the_prefill_need_names_load_and_wait():
    reason = prefill_need(prefill(3000.0), TARGETS).reason
    assert "3000 tokens/s come" in reason
    assert "wait at most" in reason


def test_prompts_too_long_alone_are_reported_not_scaled_for():
    load = prefill(3000.0, lengths=[5000.0] * 100)
    need = prefill_need(load, TARGETS)
    assert need.workers == by_load.prefill_need(load, TARGETS).workers == 3.0
    assert "within 1 s it computes 1000" in need.infeasible


def test_without_lengths_nothing_is_removed():
    load = replace(prefill(900.0), prompts=None)
    need = prefill_need(load, TARGETS)
    assert (need.workers, need.lacks_figures) == (0.9, True)
    assert not prefill_need(replace(load, arrived_tokens_per_s=0.0), TARGETS).lacks_figures


def test_batch_is_the_largest_within_the_objective():
    assert largest_batch(steps_of(), 100.0, 0.03) == 40
    assert largest_batch(steps_of(), 16.0, 0.03) == 16
    assert largest_batch(steps_of(margin=1.5), 100.0, 0.03) == 20
    assert largest_batch(steps_of(correction=2.0), 100.0, 0.03) == 10
    assert largest_batch(steps_of(kv_token_s=5e-7), 100.0, 0.03) == 20
    assert largest_batch(steps_of(sequence_s=0.0), 100.0, 0.03) == 100
    assert largest_batch(steps_of(), 100.0, 0.005) == 0


def test_decode_workers_follow_the_batch_and_a_headroom():
    targets = replace(TARGETS, latency_s=0.03)
    need = decode_need(decode(80.0, batch=40.0, arrived_per_s=5.0), targets)
    assert 80 / 40 < need.workers < 1.3 * 80 / 40
    assert "steps of 40 sequences" in need.reason


def test_memory_of_a_worker_bounds_its_batch():
    """No longer steps are expected than those of the sequences that fit."""
    load = replace(decode(8.0, batch=2.0, arrived_per_s=0.1), used_pages=2400.0)
    need = decode_need(load, replace(TARGETS, latency_s=0.06))
    assert need.workers == pytest.approx(2400 / 850, rel=0.05)
    assert "KV pages" in need.reason


def test_sequences_take_longer_in_the_batch_that_is_allowed():
    """Survivors are judged with all of the load: their steps are longer, and sequences at once are more."""
    targets = replace(TARGETS, latency_s=0.03)
    small = decode_need(decode(30.0, batch=10.0, arrived_per_s=0.1), targets)
    large = decode_need(decode(60.0, batch=40.0, arrived_per_s=0.1), targets)
    assert small.workers == pytest.approx(large.workers), "steps take 15 ms and 30 ms"
    assert 30 * 2.0 / 40 < small.workers < 2


@pytest.mark.parametrize("steps_each", [0.0, 500.0])
def test_waiting_sequences_add_decode_workers_at_any_time(steps_each):
    """Also before the lengths of outputs are known."""
    load = decode(20.0, batch=20.0, arrived_per_s=0.1, steps_each=steps_each)
    targets = replace(TARGETS, latency_s=0.03)
    assert decode_need(replace(load, waiting=200.0), targets).workers > decode_need(load, targets).workers + 1


def test_one_moment_of_many_sequences_adds_no_decode_worker():
    """Of a minute in the mean there are few: their variation is part of the headroom."""
    load = decode(20.0, batch=20.0, arrived_per_s=0.1)
    targets = replace(TARGETS, latency_s=0.03)
    assert decode_need(replace(load, running=60.0), targets).workers == decode_need(load, targets).workers


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_decode_workers_keep_their_batch_at_the_percentile(workers):
    """Sequences come at random, and the more there are the longer each takes: a birth-death process."""
    steps = steps_of()
    fleet = Decode(steps, 40, 0.95)
    rate = fleet.bearable(workers)
    weight, total, above = 1.0, 1.0, 0.0
    for sequences in range(1, 60 * workers):
        # Steps per second of all sequences.
        weight *= rate / (sequences / steps.step_s(sequences / workers))
        total += weight
        above += weight * (sequences > 40 * workers)
    assert 0.005 < above / total < 0.08


def test_step_too_long_for_one_sequence_is_reported():
    load = decode(80.0)
    need = decode_need(load, replace(TARGETS, latency_s=0.001))
    assert need.workers == by_load.decode_need(load, TARGETS).workers
    assert "a step with one sequence takes 0.0105 s" in need.infeasible


def test_without_a_fit_no_decode_worker_is_removed():
    need = decode_need(replace(decode(80.0), steps=None), TARGETS)
    assert (need.workers, need.lacks_figures) == (0.8, True)


def objective_config(**changes):
    config = config_of(**changes)
    return replace(
        config,
        prefill=replace(config.prefill, targets=replace(config.prefill.targets, latency_s=1.0)),
        decode=replace(config.decode, targets=replace(config.decode.targets, latency_s=0.03)),
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_figures_that_are_no_numbers_change_nothing(value):  # [figures-or-hold]
    load = replace(FluidService(config_of()).load(), prefill=prefill(100.0, arrivals_variation=value))
    outcome = decide(load, {"prefill": 5, "decode": 5}, ScalingState(), objective_config())
    assert outcome.wanted == {"prefill": 5, "decode": 5}
    assert "arrivals_variation" in outcome.decisions[0].reason


def test_latencies_far_from_predicted_are_not_planned_with():
    load = replace(FluidService(config_of()).load(), prefill=prefill(3000.0), is_calibrated=False)
    outcome = decide(load, {"prefill": 3, "decode": 1}, ScalingState(), objective_config())
    assert outcome.wanted["prefill"] == 3


def late_load(at: float, queued: float = 500.0, lengths=LENGTHS):
    """Ten times the objective, measured; the model expects no wait."""
    measured = distribution_of([10.0] * 40, (0.5, 1.0, 2.0, 20.0))
    slow = prefill(100.0, queued, lengths, measured_s=measured)
    return replace(FluidService(config_of()).load(), at=at, prefill=slow)


def test_missed_objective_with_a_queue_adds_one_worker():
    memory, config, there = ScalingState(), objective_config(), {"prefill": 2, "decode": 1}
    wanted = []
    for at in range(0, 95, 5):
        outcome = decide(late_load(float(at)), there, memory, config)
        memory = outcome.memory
        there = dict(outcome.wanted)
        wanted.append(there["prefill"])
    assert wanted == [2] * 6 + [3] * 12 + [4], "after 30 s, and again when that one has had time to start"


def late_run(until: int, config, serving=lambda _: None) -> list[int]:
    """Prefill workers every 5 s, of a role that stays late."""
    memory, there, wanted = ScalingState(), {"prefill": 2, "decode": 1}, []
    for at in range(0, until, 5):
        load = late_load(float(at))
        load = replace(load, prefill=replace(load.prefill, serving=serving(there["prefill"])))
        outcome = decide(load, there, memory, config)
        memory, there = outcome.memory, dict(outcome.wanted)
        wanted.append(there["prefill"])
    return wanted


def test_missed_objective_adds_a_worker_whatever_the_window_is():
    assert late_run(90, objective_config(scale_up_window_s=20.0))[-1] == 3


def test_missed_objective_adds_no_worker_during_another_start():
    assert late_run(300, objective_config(), serving=lambda _: 2.0)[-1] == 3
    assert late_run(660, objective_config(), serving=lambda _: 2.0)[-1] == 4, "the one that starts may never come"
    assert late_run(300, objective_config(), serving=float)[-1] > 4


def test_number_that_missed_its_objective_is_retried_rarely():
    """The model says one worker; fewer than three are late."""
    memory, there, changes, late_for = ScalingState(), {"prefill": 3, "decode": 1}, [], 0
    for at in range(0, 3600, 5):
        late_for = late_for + 5 if there["prefill"] < 3 else 0
        # A quantile of the last minute shows it later.
        load = late_load(float(at)) if late_for > 30 else late_load(float(at), queued=0.0)
        outcome = decide(load, there, memory, objective_config())
        if outcome.wanted["prefill"] != there["prefill"]:
            changes.append(at)
        memory, there = outcome.memory, dict(outcome.wanted)
    assert there["prefill"] == 3
    assert max(changes) < 900


@pytest.mark.parametrize("load", [late_load(0.0, queued=0.0), late_load(0.0, lengths=[5000.0] * 100)])
def test_missed_objective_adds_nothing_that_cannot_help(load):
    """No queue, or prompts too long by themselves."""
    memory, there = ScalingState(), {"prefill": 2, "decode": 1}
    for at in range(0, 100, 5):
        outcome = decide(replace(load, at=float(at)), there, memory, objective_config())
        memory = outcome.memory
        assert outcome.wanted["prefill"] <= 2
