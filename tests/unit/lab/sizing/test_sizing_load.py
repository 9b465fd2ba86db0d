"""What a trace lacks, and what no number of workers can keep."""

import math
from dataclasses import replace
from random import Random
from statistics import mean, stdev

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_lab.sizing.load import (
    Objectives,
    faster,
    halves,
    infeasible,
    load_figures,
    most_running,
    upper_rate,
    worker_load,
)
from tandem_lab.sizing.rates import WorkerRates
from tandem_lab.traces import TRACE_BLOCK, TraceRow

RATES = WorkerRates(
    gpus=1,
    prefill_rate=1000.0,
    steps=((1, 0.010), (64, 0.073)),
    token_bytes=1.0,
    transfer_rate=1e9,
    pool_tokens=100_000,
    measured=True,
)


def rows(count: int, *, gap: float = 1.0, prompt: int = 700, output: int = 10) -> list[TraceRow]:
    blocks = -(-prompt // TRACE_BLOCK)
    return [
        TraceRow(
            at=number * gap,
            prompt_tokens=prompt,
            output_tokens=output,
            blocks=tuple(range(number * blocks, (number + 1) * blocks)),
        )
        for number in range(count)
    ]


def wanted(ttft: float = 1.0, itl: float = 0.03, percentile: float = 0.9) -> Objectives:
    return Objectives(ttft_s=ttft, itl_s=itl, percentile=percentile)


@pytest.mark.parametrize(
    ("trace", "error_message"),
    [
        ([], "0 requests; at least 40"),
        (rows(1), "1 requests; at least 40"),
        (rows(60, gap=0.0), "no rate to size for"),
        ([*rows(30, gap=0.0), *rows(31)], "first half arrive at one time"),
    ],
)
def test_trace_without_a_rate_is_refused(trace, error_message):
    with pytest.raises(ConfigError, match=error_message):
        halves(trace)


def test_halves_are_apart_and_begin_at_zero():
    parts = halves(rows(101), speed=2.0)
    assert (len(parts.sized), len(parts.proof)) == (50, 51)
    assert (parts.sized[0].at, parts.proof[0].at) == (0.0, 0.0)
    assert parts.sized[-1].at == pytest.approx(24.5)


def test_repeated_prompt_is_work_once():
    repeated = [TraceRow(at=float(n), prompt_tokens=1024, output_tokens=4, blocks=(1, 2)) for n in range(40)]
    load = load_figures(halves(repeated).sized)
    assert (load.uncached[0], load.uncached[1]) == (1024, 1)
    assert load.context == 1026.0


def test_prompt_too_long_for_any_worker_names_length_and_target():
    load = load_figures(halves(rows(100, prompt=3000)).sized)
    reason = infeasible(load, RATES, wanted())
    assert "3000 uncached tokens takes 3 s" in reason
    assert "at most 1000 tokens fit" in reason
    assert "--ttft 3," in reason
    assert infeasible(load, RATES, wanted(ttft=3.0)) is None


def test_few_long_prompts_are_within_percentile():
    mixed = [*rows(90), *rows(10, prompt=5000)]
    load = load_figures(halves(sorted(mixed, key=lambda row: row.prompt_tokens % 7)).sized)
    assert infeasible(load, RATES, wanted(percentile=0.5)) is None


def test_step_of_one_sequence_bounds_the_itl():
    load = load_figures(halves(rows(100)).sized)
    reason = infeasible(load, RATES, wanted(itl=0.005))
    assert "10 ms, and --itl is 5 ms" in reason
    assert "--itl 0.01," in reason


def test_sequence_beyond_the_pool_is_named():
    load = load_figures(halves(rows(100, prompt=200_000)).sized)
    assert "200010 tokens" in infeasible(load, RATES, wanted())


@pytest.mark.parametrize(("itl", "running"), [(0.010, 1), (0.030, 21), (0.073, 64), (1.0, 64)])
def test_largest_batch_is_the_last_that_keeps_the_itl(itl, running):
    assert most_running(RATES, wanted(itl=itl)) == running


def test_even_load_is_sized_at_its_own_rate():
    sized = halves(rows(202)).sized
    assert upper_rate(sized, load_figures(sized), 0.95) == pytest.approx(1.0, abs=0.03)


def test_uncertain_rate_grows_with_variation_and_confidence():
    bursts = [row for row in rows(400) if row.at % 100 < 40]
    sized = halves(bursts).sized
    load = load_figures(sized)
    found = [upper_rate(sized, load, confidence) for confidence in (0.5, 0.8, 0.95, 0.999)]
    assert found[0] == 1.0
    assert found == sorted(set(found))
    assert found[2] > 1.2


def test_upper_rate_bounds_that_of_another_sample():
    """Of the same load: 19 of 20 times, as the confidence says; windows are few, so less often."""
    random, below = Random(3), 0
    for _ in range(200):
        at, made = 0.0, []
        for number in range(400):
            at += random.expovariate(1.0)
            made.append(replace(rows(1)[0], at=at, prompt_tokens=random.choice((600, 3000)), blocks=(number,)))
        parts = halves(made)
        load = load_figures(parts.sized)
        true_rate = 1800.0
        bound = upper_rate(parts.sized, load, 0.95) * sum(load.uncached) / load.seconds
        below += bound < true_rate
    assert below <= 0.15 * 200


@pytest.mark.parametrize(
    ("confidence", "quantile"), [(0.5, 0.0), (0.8, 0.896), (0.95, 1.895), (0.99, 2.998), (0.999, 4.785)]
)
def test_rate_margin_follows_students_distribution(confidence, quantile):
    """The error is estimated from eight windows: a normal quantile would be exceeded nine times as often at 0.999."""
    made = [replace(row, output_tokens=10 + number // 25 % 2) for number, row in enumerate(rows(400))]
    sized = halves(made).sized
    tokens = [10.0, 11.0] * 4
    error = stdev(tokens) / mean(tokens) / math.sqrt(8)
    found = upper_rate(sized, replace(load_figures(sized), uncached=(1,) * 200, seconds=200.0), confidence)
    assert (found - 1.0) / error == pytest.approx(quantile, abs=0.03)


def test_faster_requests_keep_their_order_and_work():
    sized = halves(rows(202)).sized
    assert load_figures(faster(sized, 2.0)).seconds == pytest.approx(load_figures(sized).seconds / 2)
    assert load_figures(faster(sized, 2.0)).uncached == load_figures(sized).uncached


def test_fluid_bound_counts_work_over_time():
    load = load_figures(halves(rows(202, gap=0.5)).sized)
    bound = worker_load(load, RATES, 64)
    assert bound.prefill == pytest.approx(101 * 700 / (50.0 * 1000.0))
    assert bound.decode == pytest.approx(101 * 10 * (0.073 / 64) / 50.0)
    assert (bound.least_total, bound.least_decode) == (2, 1)
