"""Latencies are what a request waits, and nothing that others pay; and what is learned of them is bounded."""

from dataclasses import replace
from math import exp
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.config import Role
from tandem_engine.messages.stats import StepFit
from tandem_services.router import calibration, cost
from tandem_services.router.calibration import (
    HANDLING,
    MAX_FACTOR,
    MAX_KINDS,
    MIN_FACTOR,
    MIN_SAMPLES,
    WINDOW,
    Calibration,
    Measured,
    Sketch,
    kept_share,
)
from tandem_services.router.cost import Candidate, Demand, Load
from tandem_services.router.decision import Latency, Placement, ScoreTerm
from tandem_services.router.latency import (
    GATEWAY_WAIT,
    SHARED_TERMS,
    first_token_terms,
    inter_token_s,
    reserved_sequences,
)
from tandem_services.router.scoring import Option, options
from tandem_testing.router_builders import make_load, make_view

seconds = st.floats(0.0, 10.0)
loads = st.builds(
    make_load,
    queue_tokens=st.floats(0, 20_000),
    prefill_rate=st.floats(100, 50_000),
    sequences=st.integers(0, 200),
    step_s=st.floats(0, 0.1),
    room_tokens=st.integers(0, 10_000),
    max_sequences=st.integers(1, 64),
    host_token_s=st.floats(0, 1e-3),
    step_base_s=st.floats(0, 0.05),
    kv_tokens=st.floats(0, 1e6),
)
fits = st.builds(
    StepFit,
    base_s=st.floats(0, 0.1),
    sequence_s=st.floats(0, 0.01),
    kv_token_s=st.floats(0, 1e-5),
    chunk_token_s=st.floats(0, 1e-3),
)
demands = st.builds(
    Demand, prompt_tokens=st.integers(1, 4000), output_tokens=st.integers(0, 512), local_prefill_tokens=st.just(10_000)
)


def chosen(role: Role, load: Load, demand: Demand, *, matched: int, in_host: int) -> Option:
    """The one worker that serves alone, or as the prefill end of a pair."""
    worker = Candidate(view=make_view("w", role), load=load, matched=matched, in_host=in_host)
    peer = Candidate(view=make_view("d", Role.DECODE), load=make_load(), matched=0)
    found = options([worker] if role is Role.BOTH else [worker, peer], demand, Random(0))
    return next(option for option in found if option.computing.view.worker_id == "w")


def latency_of(option: Option) -> tuple[ScoreTerm, ...]:
    computing = option.computing
    decodes_too = computing.view.role is not Role.PREFILL
    return first_token_terms(option.terms, computing.load, decodes_too=decodes_too)


@given(st.sampled_from([Role.BOTH, Role.PREFILL]), loads, demands, st.data())
def test_latency_is_no_price(role, load, demand, data):  # [latency-is-no-price]
    """What computing costs others, now or later, delays the request itself by nothing."""
    matched = data.draw(st.integers(0, demand.prompt_tokens))
    in_host = data.draw(st.integers(0, matched))
    option = chosen(role, load, demand, matched=matched, in_host=in_host)
    others = {"FOLLOWERS": 1000, "COPY_FOLLOWERS": 1000, "COMING": 1000, "NO_ROOM_S": 1e6, "HANDOFF_S": 1e6}
    with patch.multiple(cost, **others):
        dearer = chosen(role, load, demand, matched=matched, in_host=in_host)
    assert dearer.cost > option.cost
    assert latency_of(dearer) == latency_of(option)


@given(loads, demands)
def test_first_token_latency_is_queue_compute_and_step(load, demand):
    terms = {term.name: term.seconds for term in latency_of(chosen(Role.BOTH, load, demand, matched=0, in_host=0))}
    assert terms.keys() == SHARED_TERMS | {"adapter_load", "step_base", "decode_step"}
    assert terms["prefill_queue"] == load.queue_tokens / load.prefill_rate
    assert terms["prefill_compute"] == demand.prompt_tokens / load.prefill_rate
    assert terms["step_base"] == load.step_base_s
    assert terms["decode_step"] == (load.step_s if load.sequences else 0.0)


@given(loads, seconds)
def test_adapter_load_counts_beyond_the_queue_without_evictions(load, load_s):
    terms = first_token_terms(
        (ScoreTerm("adapter_load", 1e6),), replace(load, sequences=0), adapter_load_s=load_s, decodes_too=False
    )
    waited = next(term.seconds for term in terms if term.name == "adapter_load")
    assert waited == max(0.0, load_s - load.queue_tokens / load.prefill_rate)


@given(loads, demands, fits, st.floats(0, 500), st.floats(0, 500))
def test_time_between_tokens_grows_with_sequences_and_context(load, demand, fit, some, more):
    load = replace(load, step_fit=fit)
    alone = inter_token_s(load, demand, sequences=some)
    assert alone >= fit.base_s + fit.sequence_s
    assert inter_token_s(load, demand, sequences=some + more) >= alone
    assert inter_token_s(replace(load, kv_tokens=load.kv_tokens + 1000), demand, sequences=some) >= alone
    assert inter_token_s(replace(load, step_fit=None), demand, sequences=some) == load.step_s


@given(loads, demands)
def test_sequences_of_a_price_include_reserved_ones(load, demand):
    reserved = replace(load, sequences=load.sequences + 3)
    option = chosen(Role.BOTH, reserved, demand, matched=0, in_host=0)
    expected = reserved.sequences if load.step_s > 0.0 and reserved.sequences * load.step_s > 0.0 else load.sequences
    assert reserved_sequences(option.terms, load) == pytest.approx(expected)
    assert reserved_sequences((), load) == load.sequences


def latency(queue_s: float = 0.1, compute_s: float = 0.2, itl_s: float = 0.01, kind: str = "k") -> Latency:
    terms = (ScoreTerm("prefill_queue", queue_s), ScoreTerm("prefill_compute", compute_s))
    return Latency(terms=terms, itl_s=itl_s, kind=kind, decode_kind=kind)


def learn(
    known: Calibration,
    requests: int,
    *,
    queue: float = 1.0,
    compute: float = 1.0,
    rest_s: float = 0.0,
    itl: float = 1.0,
) -> None:
    """Requests whose queue, compute and time between tokens are so many times the model's, and `rest_s` besides."""
    for _ in range(requests):
        predicted = known.predict(latency(), Placement.PAIR, gateway_wait_s=0.0)
        queue_s, prefill_s = 0.1 * queue, 0.2 * compute
        measured = Measured(ttft_s=queue_s + prefill_s + rest_s, queue_s=queue_s, prefill_s=prefill_s, itl_s=0.01 * itl)
        known.learn(predicted, measured)


factors = st.floats(0.4, 2.5)


@given(factors, factors, factors, st.floats(0.0, 0.3))
def test_calibration_finds_each_factor_by_itself(queue, compute, itl, rest_s):
    known = Calibration()
    learn(known, 2 * MIN_SAMPLES, queue=queue, compute=compute, itl=itl, rest_s=rest_s)
    predicted = known.predict(latency(), Placement.PAIR, gateway_wait_s=0.0)
    assert (predicted.queue, predicted.compute, predicted.itl) == pytest.approx((queue, compute, itl))
    assert predicted.ttft_s == pytest.approx(0.1 * queue + 0.2 * compute + rest_s)
    assert predicted.itl_s == pytest.approx(0.01 * itl)
    [term] = [each for each in predicted.terms if each.name == HANDLING]
    assert term.seconds == pytest.approx(rest_s, abs=1e-9)


@given(st.floats(0.0, 1e5), st.floats(0.0, 1e5), st.floats(0.0, 1e5))
def test_calibration_factors_and_predictions_are_bounded(queue, compute, itl):
    known = Calibration()
    learn(known, 2 * MIN_SAMPLES, queue=queue, compute=compute, itl=itl)
    predicted = known.predict(latency(), Placement.PAIR, gateway_wait_s=0.0)
    [row] = known.factors()
    for factor in (predicted.queue, predicted.compute, predicted.itl, predicted.margin, predicted.itl_margin):
        assert MIN_FACTOR <= factor <= MAX_FACTOR
    assert 0.0 <= predicted.ttft_s <= calibration.MAX_S
    if max(queue, compute, itl) > 4.0:
        assert not row.calibrated


@pytest.mark.parametrize(("queue", "is_calibrated"), [(0.0, True), (0.1, True), (2.9, True), (3.1, False)])
def test_queue_over_before_its_report_leaves_the_model_calibrated(queue, is_calibrated):
    """At low load most are: the report that predicts them is up to half a second old."""
    known = Calibration()
    learn(known, 2 * MIN_SAMPLES, queue=queue)
    [row] = known.factors()
    assert row.calibrated == is_calibrated
    assert MIN_FACTOR <= row.queue <= MAX_FACTOR


def test_margin_is_the_percentile_over_the_correction():
    known = Calibration(percentile=0.9)
    random = Random(3)
    for _ in range(WINDOW):
        learn(known, 1, compute=random.choice([1.0] * 17 + [2.0] * 3))
    predicted = known.predict(latency(), Placement.PAIR, gateway_wait_s=0.0)
    assert predicted.compute == pytest.approx(1.0)
    assert predicted.margin == pytest.approx((0.1 + 0.4) / 0.3)


@pytest.mark.parametrize("seed", range(4))
def test_margins_are_kept_while_the_load_changes(seed):
    """Latencies of successive requests are alike, so the window knows little of the next ones."""
    known, random = Calibration(percentile=0.95), Random(seed)
    drift, kept = 0.0, []
    for _ in range(1000):
        drift = 0.95 * drift + random.gauss(0.0, 0.1)
        predicted = known.predict(latency(), Placement.PAIR, gateway_wait_s=0.0)
        factor = exp(drift)
        measured = Measured(ttft_s=0.3 * factor, queue_s=0.1 * factor, prefill_s=0.2 * factor, itl_s=0.01 * factor)
        assert predicted.itl_s is not None
        kept.append(
            (
                measured.ttft_s <= predicted.ttft_s * predicted.margin,
                0.01 * factor <= predicted.itl_s * predicted.itl_margin,
            )
        )
        known.learn(predicted, measured)
    for each in zip(*kept[100:], strict=True):
        assert 0.95 <= sum(each) / len(each) <= 0.99
    [row] = known.factors()
    assert predicted.margin >= row.margin


@given(st.floats(0.5, 1.0), st.floats(0.5, 0.999), st.booleans())
def test_share_of_a_margin_is_at_least_the_percentile(share, percentile, is_kept):
    found = kept_share(share, percentile=percentile, is_kept=is_kept)
    assert percentile <= found <= 1.0
    before = max(share, percentile)
    assert found <= before if is_kept else found > before or found == 1.0


def test_few_requests_correct_nothing():
    known = Calibration()
    learn(known, MIN_SAMPLES - 1, compute=2.5)
    assert known.predict(latency(), Placement.PAIR, gateway_wait_s=0.0).compute == 1.0


def test_short_queues_do_not_change_the_factor_of_queues():
    known = Calibration()
    for _ in range(2 * MIN_SAMPLES):
        predicted = known.predict(latency(queue_s=0.0001), Placement.PAIR, gateway_wait_s=0.0)
        known.learn(predicted, Measured(ttft_s=0.5, queue_s=0.3, prefill_s=0.2, itl_s=None))
    assert known.predict(latency(), Placement.PAIR, gateway_wait_s=0.0).queue == 1.0


def test_wait_in_the_gateway_is_part_of_the_queue():
    known = Calibration()
    predicted = known.predict(latency(queue_s=0.1, compute_s=0.2), Placement.PAIR, gateway_wait_s=1.0)
    assert predicted.ttft_s == pytest.approx(1.3)
    assert predicted.terms[0] == ScoreTerm(GATEWAY_WAIT, 1.0)


def test_kinds_and_placements_are_calibrated_apart():
    known = Calibration()
    learn(known, MIN_SAMPLES, compute=2.0)
    assert known.predict(latency(), Placement.LOCAL, gateway_wait_s=0.0).compute == 1.0
    assert known.predict(latency(kind="other"), Placement.PAIR, gateway_wait_s=0.0).compute == 1.0


def test_kinds_that_were_not_used_for_long_are_forgotten():
    known = Calibration()
    learn(known, MIN_SAMPLES, compute=2.0)
    for number in range(MAX_KINDS):
        known.predict(latency(kind=f"k{number}"), Placement.PAIR, gateway_wait_s=0.0)
    assert len(known.factors()) == MAX_KINDS
    assert known.factors_of("k", Placement.PAIR) is None


@given(st.lists(st.floats(-5, 5), min_size=MIN_SAMPLES, max_size=40), st.floats(0, 1))
def test_sketch_has_the_quantiles_of_its_newest_values(values, share):
    with patch.object(calibration, "WINDOW", 16):
        sketch = Sketch()
        for value in values:
            sketch.add(value)
    kept = sorted(values[-16:])
    assert len(sketch) == len(kept)
    assert sketch.quantile(share) == kept[min(len(kept) - 1, int(share * len(kept)))]
