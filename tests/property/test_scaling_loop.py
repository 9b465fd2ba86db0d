"""The autoscaler in closed loop with a fluid service: it settles, does not flap, and keeps every bound."""

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem_operator.api.types import ROLES
from tandem_testing.fluid_service import FluidService, config_of
from tandem_testing.long_tests import examples

loads = st.tuples(st.floats(0.0, 12_000.0), st.floats(0.0, 40.0))


# A load 0.2 % above what eight workers do: the backlog needs minutes until it is worth the ninth.
@example((0.0, 25.640625), {"decode": 2, "prefill": 1}, 0, False)
@settings(max_examples=examples(20), deadline=None)
@given(loads, st.fixed_dictionaries({role: st.integers(1, 16) for role in ROLES}), st.integers(0, 8), st.booleans())
def test_worker_counts_settle_and_stay_under_steady_load(load, there, start_periods, flip):
    service = FluidService(config_of(flip_roles=flip), there=dict(there), start_periods=start_periods)
    for _ in range(150):
        service.step(*load)
    resting = settled = service.history[-1]
    for _ in range(40):
        service.step(*load)
        if service.there != settled:
            assert settled == resting, "it grows once at most"
            assert all(service.there[role] >= settled[role] for role in ROLES)
            settled = dict(service.there)
    resting = settled
    # And it is enough: what waits is no backlog, or not worth a tenth of a worker, unless the bound is in the way.
    if resting["prefill"] < 16:
        ignored = service.config.tolerance * service.worker_tokens_per_s * 30.0
        assert service.queued_tokens <= load[0] * 1.0 + ignored + 1e-6
    if resting["decode"] < 16:
        assert service.waiting <= 1e-6 + load[1] * 5.0


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(loads, min_size=10, max_size=40),
    st.integers(2, 24),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_autoscaler_keeps_bounds_for_any_load(happened, budget, prefill_gpus, decode_gpus):
    config = config_of(gpu_budget=budget)
    config = replace(
        config,
        prefill=replace(config.prefill, gpus=prefill_gpus, most=9),
        decode=replace(config.decode, gpus=decode_gpus, most=7),
    )
    service = FluidService(config)
    for load in happened:
        before = dict(service.there)
        outcome = service.step(*load)
        gpus = service.there["prefill"] * prefill_gpus + service.there["decode"] * decode_gpus
        assert gpus <= max(budget, prefill_gpus + decode_gpus)
        assert 1 <= service.there["prefill"] <= 9
        assert 1 <= service.there["decode"] <= 7
        for role in ROLES:
            grown = service.there[role] - before[role] - abs(outcome.flips)
            assert grown <= config.max_step_up


@settings(max_examples=examples(20), deadline=None)
@given(st.floats(500.0, 6000.0), st.floats(0.0, 0.05), st.randoms(use_true_random=False))
def test_noise_within_the_tolerance_changes_nothing(tokens_per_s, noise, random):
    service = FluidService(config_of(), there={"prefill": 8, "decode": 2})
    for _ in range(60):
        service.step(tokens_per_s, 2.0)
    before = len(changes(service))
    for _ in range(60):
        service.step(tokens_per_s * (1 + random.uniform(-noise, noise)), 2.0)
    assert len(changes(service)) - before <= 2


def changes(service: FluidService) -> list[int]:
    """Periods in which the number of workers of some role changed."""
    pairs = zip(service.history, service.history[1:], strict=False)
    return [period for period, (first, second) in enumerate(pairs) if first != second]
