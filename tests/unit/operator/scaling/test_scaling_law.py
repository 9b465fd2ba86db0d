"""What the autoscaler decides, one situation at a time."""

import math
from dataclasses import replace

import pytest

from tandem_operator.scaling.load import Targets, decode_need, prefill_need
from tandem_operator.scaling.policy import ScalingState, Window, decide, rounded, within_budget
from tandem_testing.fluid_service import FluidService, config_of

TARGETS = Targets(queue_seconds=1.0, kv_usage=0.85)


def busy(service: FluidService) -> None:
    """Twenty periods of a load that one prefill and one decode worker can just sustain."""
    for _ in range(20):
        service.step(800.0, 2.0)


def test_prefill_need_is_arrivals_plus_clearing_of_backlog():
    load = FluidService(config_of(), queued_tokens=61_000.0, arrived_tokens=1000.0).load().prefill
    assert prefill_need(load, TARGETS).workers == 3.0
    assert prefill_need(load, replace(TARGETS, clear_seconds=60.0)).workers == 2.0
    assert prefill_need(load, replace(TARGETS, queue_seconds=61.0)).workers == 1.0
    assert "61000 are queued" in prefill_need(load, TARGETS).reason


def test_need_of_decode_is_the_scarcer_of_places_and_pages():
    load = FluidService(config_of(), running=64.0, waiting=96.0, decode_s=10.0).load().decode
    assert decode_need(load, TARGETS).workers == (64 + 96 / 3) / 32
    assert decode_need(replace(load, arrived_per_s=9.6), TARGETS).workers > 3.0
    full = replace(load, used_pages=load.worker_pages * 4, waiting=0.0)
    assert decode_need(full, TARGETS).workers == pytest.approx(4 / 0.85)


def test_unmeasured_prefill_rate_needs_one_worker():
    load = replace(FluidService(config_of(), queued_tokens=9e9).load().prefill, worker_tokens_per_s=0.0)
    assert prefill_need(load, TARGETS).workers == 1.0


@pytest.mark.parametrize(("workers", "whole"), [(0.0, 0), (0.05, 1), (1.05, 1), (1.2, 2), (3.0, 3)])
def test_small_part_of_one_more_is_not_worth_it(workers, whole):
    assert rounded(workers, 0.1) == whole


def test_jump_of_the_load_is_answered_within_two_periods():
    service = FluidService(config_of())
    busy(service)
    before = dict(service.there)
    service.step(4000.0, 8.0)
    service.step(4000.0, 8.0)
    assert service.there["prefill"] > before["prefill"]
    assert service.there["decode"] > before["decode"]


def test_one_decision_adds_at_most_max_step_up_workers():
    service = FluidService(config_of(max_step_up=2))
    busy(service)
    service.step(50_000.0, 2.0)
    assert service.there["prefill"] == 3


def test_backlog_during_pod_start_is_counted_once():
    service = FluidService(config_of(flip_roles=False), start_periods=8)
    busy(service)
    for _ in range(100):
        service.step(3000.0, 2.0)
    assert max(counts["prefill"] for counts in service.history) <= 3 + 3
    assert service.there["prefill"] <= 4


def test_workers_are_removed_one_at_a_time_after_the_window():
    service = FluidService(config_of(), there={"prefill": 8, "decode": 1})
    while service.there["prefill"] == 8:
        service.step(800.0, 2.0)
    assert service.now >= service.config.scale_down_window_s
    assert service.there["prefill"] == 7


def test_scale_down_without_reserve_is_rejected():
    """1.95 workers' worth of load on three: two would do, but not with one bad moment."""
    service = FluidService(config_of(flip_roles=False), there={"prefill": 3, "decode": 1})
    for _ in range(60):
        service.step(1950.0, 2.0)
    assert service.there["prefill"] == 3


@pytest.mark.parametrize(
    ("change", "error_message"),
    [
        ({"age_s": 60.0}, "60 s old"),
        ({"prefill": {"queued_tokens": math.nan}}, "prefill queued_tokens is nan"),
        ({"decode": {"used_pages": math.inf}}, "decode used_pages is inf"),
        ({"decode": {"running": -1.0}}, "decode running is -1"),
    ],
)
def test_unreliable_metrics_change_nothing(change, error_message):  # [figures-or-hold]
    load = FluidService(config_of(), queued_tokens=1e6).load()
    for name, value in change.items():
        load = replace(load, **{name: replace(getattr(load, name), **value) if isinstance(value, dict) else value})
    outcome = decide(load, {"prefill": 3, "decode": 5}, ScalingState(), config_of(idle_s_to_zero=1.0))
    assert outcome.wanted == {"prefill": 3, "decode": 5}
    (decision,) = outcome.decisions
    assert decision.action == "hold"
    assert error_message in decision.reason


def test_live_worker_changes_its_role_before_a_pod_comes():
    service = FluidService(config_of(), there={"prefill": 1, "decode": 4})
    for _ in range(6):
        service.step(500.0, 2.0)
    outcome = service.step(3000.0, 2.0)
    assert outcome.flips > 0
    assert outcome.decisions[0].action == "flip"
    assert service.ready("prefill") == 1 + outcome.flips
    assert sum(service.there.values()) >= 5


def test_roles_of_unequal_pods_are_not_flipped():
    config = config_of()
    service = FluidService(replace(config, decode=replace(config.decode, gpus=2)), there={"prefill": 1, "decode": 4})
    for _ in range(6):
        service.step(500.0, 2.0)
    assert service.step(3000.0, 2.0).flips == 0


def test_scale_to_zero_and_back_in_pairs():
    config = config_of(idle_s_to_zero=60.0)
    none = replace(config.prefill, least=0)
    service = FluidService(replace(config, prefill=none, decode=none))
    busy(service)
    service.running = 0.0
    for _ in range(40):
        service.step(0.0, 0.0)
    assert service.there == {"prefill": 0, "decode": 0}
    service.step(0.0, 0.2)
    assert service.there == {"prefill": 1, "decode": 1}


def test_occasional_requests_prevent_scale_to_zero():
    config = config_of(idle_s_to_zero=60.0)
    none = replace(config.prefill, least=0)
    service = FluidService(replace(config, prefill=none, decode=none))
    for period in range(100):
        service.step(0.0, 1.0 if period % 8 == 0 else 0.0)
        assert min(service.there.values()) >= 1


@pytest.mark.parametrize(
    ("wanted", "budget", "given"),
    [
        ({"prefill": 4, "decode": 4}, None, {"prefill": 4, "decode": 4}),
        ({"prefill": 4, "decode": 4}, 8, {"prefill": 4, "decode": 4}),
        ({"prefill": 4, "decode": 4}, 4, {"prefill": 2, "decode": 2}),
        ({"prefill": 2, "decode": 8}, 5, {"prefill": 1, "decode": 4}),
        ({"prefill": 4, "decode": 4}, 1, {"prefill": 1, "decode": 1}),
    ],
)
def test_gpu_budget_is_shared_in_proportion(wanted, budget, given):
    assert within_budget(wanted, {"prefill": 1, "decode": 1}, {"prefill": 1, "decode": 1}, budget) == given


def test_window_drops_old_samples():
    window = Window()
    for at in range(100):
        window = window.add(float(at), at, 10.0)
    assert [one.workers for one in window.samples] == list(range(89, 100))
    assert (window.lasting(99.0, 5.0), window.most(99.0, 5.0)) == (94, 99)
