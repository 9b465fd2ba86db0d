"""The fit by which routers predict the time between tokens."""

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.messages.stats import EngineStats, StepFit
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.schedule_batch import ScheduleBatch
from tandem_engine.scheduler.step_times import COLD_S, GAP_S, MIN_SAMPLES, SAMPLED, UNDISTURBED, StepTimes
from tandem_testing.mock_engine_process import idle_stats
from tandem_testing.scheduler_builders import make_engine, make_message
from tandem_testing.service_clock import ServiceClock

TRUE = StepFit(base_s=0.004, sequence_s=2e-4, kv_token_s=1e-7, chunk_token_s=5e-5)


def batch_of(sequences: int, kv_tokens: int, chunk_tokens: int) -> ScheduleBatch:
    decodes = [SimpleNamespace(seq_len=kv_tokens // sequences) for _ in range(sequences)]
    extends = [SimpleNamespace(start=0, stop=chunk_tokens)] if chunk_tokens else []
    return ScheduleBatch(step=1, decodes=cast(Any, decodes), extends=cast(Any, extends))


def seconds_of(fit: StepFit, batch: ScheduleBatch) -> float:
    context = sum(req.seq_len for req in batch.decodes)
    return (
        fit.base_s
        + fit.sequence_s * len(batch.decodes)
        + fit.kv_token_s * context
        + fit.chunk_token_s * batch.extend_tokens
    )


class Serving:
    """A worker that computes random batches, each as long as `fit` says."""

    def __init__(self) -> None:
        self.clock = ServiceClock()
        self.tally = Tally()
        self.times = StepTimes(stopwatch=self.clock, tally=self.tally)
        self.random = Random(1)

    def serve(self, steps: int, *, fit: StepFit = TRUE, factor: float = 1.0, noise: float = 0.0) -> None:
        for _ in range(steps):
            chunk = self.random.choice([0, 0, 0, 256, 512])
            batch = batch_of(self.random.randint(1, 32), self.random.randint(64, 60_000), chunk)
            seconds = factor * seconds_of(fit, batch) * (1.0 + noise * self.random.uniform(-1.0, 1.0))
            self.clock.advance(seconds)
            self.times.note(batch, seconds, 1.0)

    def serve_for(self, seconds: float, **how: float) -> None:
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.serve(1, **cast(Any, how))

    def report(self) -> StepFit:
        fit = self.times.report()
        assert fit is not None
        return fit


def served() -> Serving:
    """A worker whose next steps are fitted."""
    serving = Serving()
    serving.serve(1)
    serving.clock.advance(COLD_S)
    serving.serve(UNDISTURBED)
    return serving


def values(fit: StepFit) -> list[float]:
    return list(msgspec.structs.astuple(fit))


def test_step_fit_of_linear_steps_finds_the_coefficients():
    serving = served()
    serving.serve(400, noise=0.02)
    assert values(serving.report()) == pytest.approx(values(TRUE), rel=0.1)


def test_step_fit_of_a_cold_worker_leaves_the_first_steps_out():  # [cold-steps-left-out]
    cold, warm = Serving(), Serving()
    cold.serve_for(COLD_S, factor=5.0)
    warm.serve_for(COLD_S)
    assert cold.times.report() is warm.times.report() is None
    for serving in (cold, warm):
        serving.random.seed(7)
        serving.serve(400, noise=0.05)
    assert values(cold.report()) == pytest.approx(values(warm.report()), rel=0.02)


@pytest.mark.parametrize("disturbance", ["swapped_in", "swapped_out", "pause"])
def test_steps_after_a_disturbance_are_left_out(disturbance):
    serving = served()
    serving.serve(400)
    before = values(serving.report())
    for _ in range(50):
        if disturbance == "pause":
            serving.clock.advance(GAP_S + 0.1)
        else:
            setattr(serving.tally, disturbance, getattr(serving.tally, disturbance) + 1)
        serving.serve(UNDISTURBED, factor=5.0)
    assert values(serving.report()) == before


def test_step_fit_of_a_changed_worker_follows_it(monkeypatch):
    monkeypatch.setattr("tandem_engine.scheduler.step_times.HALF_LIFE", 100)
    serving = served()
    serving.serve(400)
    serving.serve(800, factor=2.0)
    assert values(serving.report()) == pytest.approx([2 * value for value in values(TRUE)], rel=0.1)


def test_step_time_fit_of_equal_batches_stays_finite(monkeypatch):
    """They determine one sum, and no coefficient."""
    monkeypatch.setattr("tandem_engine.scheduler.step_times.HALF_LIFE", 20)
    serving = served()
    batch = batch_of(4, 4000, 0)
    expected = seconds_of(TRUE, batch)
    for _ in range(4000):
        serving.times.note(batch, expected, 1.0)
    assert seconds_of(serving.report(), batch) == pytest.approx(expected, rel=0.01)
    serving.serve(400)
    assert values(serving.report()) == pytest.approx(values(TRUE), rel=0.1)


def test_step_time_fit_divides_step_by_accepted_run_length():
    serving = served()
    batch = batch_of(4, 4000, 0)
    for _ in range(SAMPLED * MIN_SAMPLES):
        serving.times.note(batch, 0.03, 3.0)
    assert seconds_of(serving.report(), batch) == pytest.approx(0.01, rel=0.01)


def test_step_fit_includes_scheduling_that_no_forward_hides():
    serving = served()
    batch = batch_of(4, 4000, 0)
    for _ in range(SAMPLED * MIN_SAMPLES):
        serving.tally.schedule_s += 0.003
        serving.tally.overlap_hidden_s += 0.001
        serving.times.note(batch, 0.01, 1.0)
    assert seconds_of(serving.report(), batch) == pytest.approx(0.012, rel=0.01)


@given(st.lists(st.sampled_from([0.0, 1e-9, 0.01, 1e6, float("nan"), float("inf"), -1.0]), min_size=1, max_size=60))
def test_step_fit_of_any_durations_never_raises_and_is_bounded(durations):
    serving = served()
    serving.serve(200)
    for seconds in durations:
        serving.times.note(batch_of(2, 64, 0), seconds, 1.0)
    fit = serving.report()
    assert all(0.0 <= value < 1e9 for value in values(fit))


def test_step_fit_error_is_counted_and_no_step_ends(caplog):
    serving = served()
    serving.serve(200)
    before = values(serving.report())
    for _ in range(3 * SAMPLED):
        serving.times.note(batch_of(2, 64, 0), float("nan"), 1.0)
    assert serving.times.errors == 3
    assert values(serving.report()) == before
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_scheduler_reports_the_fit_of_its_steps(monkeypatch):
    monkeypatch.setattr("tandem_engine.scheduler.step_times.COLD_S", 0.0)
    monkeypatch.setattr("tandem_engine.scheduler.step_times.GAP_S", float("inf"))
    engine = make_engine()
    engine.add(make_message("r", [1, 2, 3], max_tokens=SAMPLED * (MIN_SAMPLES + 2) + UNDISTURBED))
    assert engine.scheduler.stats().step_fit is None
    while engine.scheduler.stats().step_fit is None:
        engine.step()
    assert engine.scheduler.stats().step_fit_errors_total == 0


def test_statistics_of_an_older_engine_have_no_fit():
    fields = {field.name for field in msgspec.structs.fields(EngineStats)}
    old = msgspec.to_builtins(idle_stats())
    for name in ("step_base_s", "step_fit", "step_fit_errors_total"):
        assert name in fields
        del old[name]
    stats = msgspec.convert(old, EngineStats)
    assert (stats.step_base_s, stats.step_fit, stats.step_fit_errors_total) == (0.0, None, 0)
