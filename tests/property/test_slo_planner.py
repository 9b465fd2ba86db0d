"""The planner for latency objectives: properties, and closed loops in fake time."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_operator.scaling import load as by_load
from tandem_operator.scaling.load import Load, PrefillLoad, Targets
from tandem_operator.scaling.slo_need import prefill_need
from tandem_testing.fluid_service import FluidService, config_of
from tandem_testing.latency_figures import prompts_of, steps_of
from tandem_testing.long_tests import examples

lengths = st.lists(st.floats(33.0, 100_000.0), min_size=20, max_size=60)
TARGETS = Targets(queue_seconds=1.0, kv_usage=0.85)


def load_of(tokens: list[float], arrived: float, queued: float, variation: float = 1.0) -> PrefillLoad:
    return PrefillLoad(
        queued_tokens=queued,
        oldest_wait_s=0.0,
        arrived_tokens_per_s=arrived,
        worker_tokens_per_s=1000.0,
        prompts=prompts_of(tokens, arrived, arrivals_variation=variation),
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    lengths, st.floats(0.0, 20_000.0), st.floats(0.0, 1e6), st.floats(0.01, 200.0), st.sampled_from([0.5, 0.9, 0.99])
)
def test_prompts_too_long_alone_never_add_workers(tokens, arrived, queued, ttft_s, percentile):  # [hopeless-prompts]
    load = load_of(tokens, arrived, queued)
    targets = replace(TARGETS, latency_s=ttft_s, percentile=percentile)
    need, plain = prefill_need(load, targets), by_load.prefill_need(load, targets)
    too_long = load.prompts.tokens.quantile(percentile) / 1000.0 > ttft_s * 1.1
    if too_long:
        assert need.infeasible
    if need.infeasible:
        assert need.workers == plain.workers


@settings(max_examples=examples(30), deadline=None)
@given(lengths, st.floats(1.0, 10_000.0), st.floats(1.01, 2.0), st.floats(0.5, 200.0), st.floats(0.2, 5.0))
def test_need_grows_with_the_load_and_never_with_the_objective(tokens, arrived, factor, ttft_s, variation):
    def workers(rate: float, seconds: float) -> float:
        need = prefill_need(load_of(tokens, rate, 0.0, variation), replace(TARGETS, latency_s=seconds))
        return 0.0 if need.infeasible else need.workers

    need = workers(arrived, ttft_s)
    if need:
        assert workers(arrived * factor, ttft_s) >= need - 1e-6
        assert workers(arrived, ttft_s * factor) <= need + 1e-6
        assert need >= arrived / 1000.0 - 1e-6


@dataclass
class SlowerTogether(FluidService):
    """Steps grow with the batch, and prompts have lengths: what a planner by latency sees."""

    outputs: float = 500.0
    prompt_lengths: list[float] = field(default_factory=lambda: [200.0, 400.0, 800.0, 300.0] * 50)
    blind: bool = False
    """Neither lengths nor a fit are known."""

    def step_s(self) -> float:
        return 0.01 + 0.0005 * self.running / max(1, self.ready("decode"))

    def load(self, age_s: float = 0.5) -> Load:
        self.decode_s = self.outputs * self.step_s()
        load = super().load(age_s)
        if self.blind:
            return load
        prompts = prompts_of(self.prompt_lengths, self.arrived_tokens)
        served_per_s = self.running / self.step_s()
        steps = steps_of(served_per_s=served_per_s, steps_each=self.outputs, arrived_per_s=self.arrived)
        return replace(load, prefill=replace(load.prefill, prompts=prompts), decode=replace(load.decode, steps=steps))


def with_objectives(ttft_s: float = 2.0, itl_s: float = 0.03, **changes):
    config = config_of(**changes)
    return replace(
        config,
        prefill=replace(config.prefill, targets=replace(config.prefill.targets, latency_s=ttft_s)),
        decode=replace(config.decode, targets=replace(config.decode.targets, latency_s=itl_s)),
    )


def run(service: SlowerTogether, periods: int, tokens_per_s: float, requests_per_s: float) -> list[dict[str, int]]:
    for _ in range(periods):
        service.step(tokens_per_s, requests_per_s)
    return service.history[-periods:]


@pytest.mark.parametrize("workers_load", [1.9, 2.4])
def test_load_near_two_workers_keeps_counts_stable(workers_load):  # [all-load-on-fewer]
    """Survivors would take the load of who leaves: with one less, steps are longer and sequences more. One that went
    would come back, and its next departure would be prevented by history alone.
    """
    # A worker bears 40 sequences of 15 s: 2.67 per second.
    load = (1000.0 * workers_load, workers_load * 40 / 15)
    service = SlowerTogether(with_objectives(flip_roles=False), there={"prefill": 4, "decode": 4}, places=64.0)
    falling, settled = run(service, 60, *load), run(service, 120, *load)
    assert all(counts == settled[0] for counts in settled)
    assert all(counts[role] >= settled[0][role] for counts in falling for role in counts)
    assert settled[0]["decode"] >= 2
    assert service.step_s() <= 0.03


@settings(max_examples=examples(15), deadline=None)
@given(st.floats(0.0, 8000.0), st.floats(0.0, 25.0), st.integers(1, 16), st.integers(0, 8), st.booleans())
def test_worker_counts_settle_under_steady_load(tokens_per_s, requests_per_s, workers, start_periods, flip):
    config = with_objectives(flip_roles=flip)
    there = {"prefill": workers, "decode": workers}
    service = SlowerTogether(config, there=there, start_periods=start_periods, places=64.0)
    run(service, 200, tokens_per_s, requests_per_s)
    settled = run(service, 60, tokens_per_s, requests_per_s)
    assert all(counts == settled[0] for counts in settled)


@settings(max_examples=examples(10), deadline=None)
@given(st.floats(0.0, 1500.0), st.floats(0.1, 3.0))
def test_unknown_figures_remove_no_worker_and_keep_the_least(tokens_per_s, requests_per_s):
    config = with_objectives(flip_roles=False)
    least = replace(config, prefill=replace(config.prefill, least=2), decode=replace(config.decode, least=2))
    service = SlowerTogether(least, there={"prefill": 5, "decode": 5}, blind=True)
    history = run(service, 100, tokens_per_s + 1.0, requests_per_s)
    for before, counts in pairwise(history):
        assert all(counts[role] >= before[role] for role in counts)
    assert min(history[-1].values()) >= 2


@dataclass
class Admitting(SlowerTogether):
    """Gateways reject all that would wait: latencies are good, whatever the number of workers."""

    asked: float = 0.0

    def step(self, tokens_per_s: float, requests_per_s: float):
        self.asked = tokens_per_s
        admitted = min(tokens_per_s, 0.7 * self.ready("prefill") * self.worker_tokens_per_s)
        return super().step(admitted, requests_per_s)

    def load(self, age_s: float = 0.5) -> Load:
        # Gateways count rejected requests as asked for.
        admitted, self.arrived_tokens = self.arrived_tokens, self.asked
        load = super().load(age_s)
        self.arrived_tokens = admitted
        return load


def test_rejected_requests_are_demand_and_keep_their_workers():  # [rejected-is-demand]
    """Admission by objectives makes latencies good: a planner that looked at these alone would remove workers."""
    service = Admitting(with_objectives(flip_roles=False), there={"prefill": 5, "decode": 3}, places=64.0)
    settled = run(service, 200, 3900.0, 3.0)[-60:]
    assert service.queued_tokens == 0.0
    assert all(counts == settled[0] for counts in settled)
    assert settled[0]["prefill"] >= 5
