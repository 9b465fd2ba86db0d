"""Latency objectives in the status: figures, conditions, and when they change."""

from dataclasses import replace

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.controller.events import events_for_conditions
from tandem_operator.planning.plan import make_plan
from tandem_operator.planning.slo import SloSeen, slo_conditions
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.autoscaler import scaling_config
from tandem_operator.telemetry.samples import LoadReading, SloFigures
from tandem_operator.telemetry.slo_watch import slo_seen
from tandem_testing.fluid_service import FluidService, config_of
from tandem_testing.kube_cluster import KubeCluster, service_of
from tandem_testing.latency_figures import prompts_of

SERVICE = service_of(slo={"ttftSeconds": 2, "itlSeconds": 0.05})
SLO = SERVICE.spec.slo
CONFIG = scaling_config(SERVICE)
LOAD = FluidService(config_of()).load()


def reading(attainment: float = 0.99, judged: float = 400.0, load=LOAD, goodput: float = 4.0) -> LoadReading:
    figures = SloFigures(attainment=attainment, judged=judged, goodput_per_s=goodput, calibration=1.1)
    return LoadReading(load=load, latency=figures)


def watched(*readings: LoadReading) -> SloSeen | None:
    seen = None
    for one in readings:
        seen = slo_seen(one, CONFIG, SLO, seen)
    return seen


def test_objectives_of_a_spec_reach_the_law():
    assert (CONFIG.prefill.targets.latency_s, CONFIG.decode.targets.latency_s) == (2.0, 0.05)
    assert CONFIG.decode.targets.percentile == 0.95
    assert scaling_config(service_of()).prefill.targets.latency_s is None


def test_noise_around_the_percentile_changes_nothing():
    assert watched(reading(0.95), reading(0.945)).is_met is True
    assert watched(reading(0.95), reading(0.93)).is_met is False
    assert watched(reading(0.93), reading(0.945)).is_met is False
    assert watched(reading(0.93), reading(0.95)).is_met is True
    assert watched(reading(0.5, judged=5)).is_met is None


def test_share_of_few_requests_varies_without_an_event():
    assert watched(reading(0.96, judged=25), reading(0.92, judged=25)).is_met is True
    assert watched(reading(0.96, judged=25), reading(0.88, judged=25)).is_met is False


def test_figures_of_an_idle_service_are_written_until_zero():
    seen, written, goodput = None, 0, 4.0
    for _ in range(5000):
        goodput *= 0.977
        found = slo_seen(reading(goodput=goodput), CONFIG, SLO, seen)
        written += found is not seen
        seen = found
    assert seen.goodput_per_s == 0.0
    assert written < 70


def test_small_changes_of_figures_are_not_written():
    first = watched(reading(0.99))
    assert slo_seen(reading(0.985, goodput=4.2), CONFIG, SLO, first) is first
    assert slo_seen(reading(0.97), CONFIG, SLO, first).attainment == 0.97
    assert slo_seen(reading(0.99, goodput=9.0), CONFIG, SLO, first).goodput_per_s == 9.0


def test_unreadable_metrics_leave_the_last_figures():
    first = watched(reading(0.99))
    assert slo_seen(LoadReading(load=None, reason="silent"), CONFIG, SLO, first) is first
    assert slo_seen(reading(0.1, load=replace(LOAD, age_s=99.0)), CONFIG, SLO, first) is first
    assert slo_seen(reading(), CONFIG, None, first) is None


def test_prompts_that_are_too_long_are_named():
    prompts = prompts_of([9000.0] * 50, 100.0)
    long = replace(LOAD, prefill=replace(LOAD.prefill, prompts=prompts, arrived_tokens_per_s=100.0))
    [_, feasible, calibrated] = slo_conditions(SLO, watched(reading(load=long)))
    assert (feasible.type, feasible.status, feasible.reason) == ("SloFeasible", "False", "Infeasible")
    assert "within 2 s it computes 2000" in feasible.message
    assert calibrated.status == "True"


def test_model_out_of_bounds_is_reported():
    [_, feasible, calibrated] = slo_conditions(SLO, watched(reading(load=replace(LOAD, is_calibrated=False))))
    assert (feasible.type, feasible.status) == ("SloFeasible", "Unknown"), "without a model nobody knows"
    assert (calibrated.type, calibrated.status) == ("LatencyModelCalibrated", "False")


@pytest.mark.parametrize(
    ("first", "second", "kind", "reason"), [(0.99, 0.8, "Warning", "SloMissed"), (0.8, 0.99, "Normal", "SloMet")]
)
def test_crossing_is_an_event_with_figures(first, second, kind, reason):
    before = [*slo_conditions(SLO, watched(reading(first)))]
    after = [*slo_conditions(SLO, watched(reading(first), reading(second)))]
    [event] = events_for_conditions(before, after)
    assert (event.kind, event.reason) == (kind, reason)
    assert f"{second} of the recent requests met the objectives" in event.note
    assert "0.95 are to" in event.note


def test_status_has_the_figures_while_there_are_objectives():
    cluster = KubeCluster()
    observed = replace(cluster.observed(), slo=watched(reading(0.99)))
    plan = make_plan(SERVICE, observed, ModelServiceStatus(), 1, OperatorSettings())
    assert plan.status.slo.attainment == 0.99
    assert plan.status.slo.summary == "0.99/0.95"
    kept = make_plan(SERVICE, cluster.observed(), plan.status, 1, OperatorSettings())
    assert kept.status.slo == plan.status.slo
    without = make_plan(service_of(), cluster.observed(), plan.status, 1, OperatorSettings())
    assert without.status.slo is None
    assert not any(one.type == "SloMet" for one in without.status.conditions)
