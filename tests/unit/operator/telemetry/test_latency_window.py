"""Latencies of the last minutes, from increases of counters."""

from math import inf

import pytest

from tandem_operator.scaling.distribution import Distribution
from tandem_operator.telemetry.exposition import Exposition, UnusableFiguresError
from tandem_operator.telemetry.latency_metrics import LatencyFactors, LatencyTotals, StepFit
from tandem_operator.telemetry.latency_window import ARRIVALS_S, LENGTHS_S, Decoding, LatencyWindow, Traffic

FIT = StepFit(0.01, 0.001, 0.0)


def prompts(count: float, tokens: float = 100.0) -> Distribution:
    return Distribution.of((128.0, 512.0, inf), (count, 0.0, 0.0), count * tokens)


def traffic(
    choices: float = 10.0, seconds: float = 5.0, gap_square_s: float = 2.5, gateway: str = "g", **latency
) -> Traffic:
    totals = LatencyTotals(uncached=prompts(choices), gap_square_s=gap_square_s, ttft_s=prompts(choices), **latency)
    return Traffic(
        gateway=gateway,
        seconds=seconds,
        choices=choices,
        requested_tokens=choices * 200.0,
        predicted_tokens=choices * 100.0,
        latency=totals,
    )


def test_rates_lengths_and_variation_follow_the_traffic():
    window = LatencyWindow()
    window.take([traffic()], [], Decoding())
    found = window.prompts(0.002)
    assert found.arrived_tokens_per_s == 10 * 200 / 5 / 2, "half of it is cached"
    assert (found.tokens.count, found.step_base_s) == (10, 0.002)
    assert found.arrivals_variation == pytest.approx(2.5 * 10 / 25 - 1), "even arrivals would have 0"


def test_variation_does_not_depend_on_the_number_of_gateways():
    one, two = LatencyWindow(), LatencyWindow()
    one.take([traffic(choices=10, gap_square_s=5.0)], [], Decoding())
    two.take([traffic(choices=5, gap_square_s=10.0, gateway=name) for name in "ab"], [], Decoding())
    assert one.prompts(0.0).arrivals_variation == pytest.approx(two.prompts(0.0).arrivals_variation)
    assert two.prompts(0.0).arrived_tokens_per_s == one.prompts(0.0).arrived_tokens_per_s


def test_old_traffic_counts_half_after_a_half_life():
    window = LatencyWindow()
    window.take([traffic(choices=16)], [], Decoding())
    window.take([traffic(choices=0, seconds=LENGTHS_S)], [], Decoding())
    assert window.prompts(0.0).tokens.count == 8


def test_steps_of_sequences_are_a_mean_over_time():
    """20 on each of two workers take 0.03 s for a step, 5 take 0.015 s."""
    window = LatencyWindow()
    window.take([traffic(seconds=ARRIVALS_S)], [], Decoding(40.0, 2, FIT))
    steps = window.steps(FIT)
    assert steps.served_per_s == pytest.approx(40 / 0.03)
    assert steps.steps_each == 0.0, "not known yet"
    window.take([traffic(seconds=ARRIVALS_S)], [], Decoding(10.0, 2, FIT))
    steps = window.steps(FIT)
    assert steps.served_per_s == pytest.approx((40 / 0.03 + 2 * 10 / 0.015) / 3), "the older half counts half"


def test_steps_of_one_sequence_do_not_depend_on_the_batch():
    """Of workers with other batches within the last minutes: 10 outputs end in each second and have 100 steps."""
    window = LatencyWindow()
    for batch in (5.0, 20.0) * 40:
        running = 2 * batch
        ended = running / (0.01 + 0.001 * batch) / 100
        window.take([traffic(choices=5 * ended)], [], Decoding(running, 2, FIT))
    assert window.steps(FIT).steps_each == pytest.approx(100.0)


def test_slo_attainment_and_goodput_count_judged_requests():
    window = LatencyWindow()
    assert window.attainment == 1.0
    window.take([traffic(good=8.0, judged=10.0), traffic(good=10.0, judged=10.0)], [], Decoding())
    assert (window.judged, window.attainment, window.goodput_per_s) == (20, 0.9, 18 / 5)


def test_nothing_is_known_before_traffic_and_without_a_fit():
    window = LatencyWindow()
    assert window.prompts(0.0) is None
    assert window.steps(FIT) is None
    window.take([traffic()], [], Decoding())
    assert window.steps(None) is None
    assert window.steps(FIT).context_tokens == 200.0


def test_factors_are_medians_within_bounds():
    text = "".join(
        f'tandem_gateway_latency_factor{{kind="{kind}",placement="pair",factor="{factor}"}} {value}\n'
        for kind, factor, value in (
            ("a", "compute", 1.2),
            ("b", "compute", 1.4),
            ("c", "compute", 1e9),
            ("a", "itl", 0.5),
        )
    )
    found = LatencyFactors.of(Exposition.parse(text + 'tandem_gateway_latency_calibrated{kind="c"} 0\n'))
    assert (found.compute, found.itl, found.queue, found.is_calibrated) == (pytest.approx(1.3), 0.5, 1.0, False)
    assert found.worst == 0.5
    assert LatencyFactors(queue=0.34, compute=1.1).worst == 1.1, "reports are older than short queues"
    assert LatencyFactors(queue=2.5, compute=1.1).worst == 2.5
    assert LatencyFactors.of(Exposition.parse("")) is None
    assert LatencyFactors.together([]) == LatencyFactors()


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf"])
def test_step_fit_with_impossible_numbers_is_ignored(value):
    def fit(base: str, sequence: str = "0.01") -> StepFit | None:
        lines = (("base", base), ("sequence", sequence), ("kv_token", "0"))
        text = "".join(f'tandem_worker_step_fit_seconds{{part="{part}"}} {number}\n' for part, number in lines)
        return StepFit.of(Exposition.parse(text))

    assert fit("0.1") == (0.1, 0.01, 0.0)
    assert fit(value) is None
    assert fit("0", "0") is None, "no step takes no time"


@pytest.mark.parametrize("line", ['{le="1.0"} NaN', '{le="x"} 1', '{le="2.0"} 1'])
def test_histogram_that_cannot_be_makes_metrics_unusable(line):
    rest = '{le="1.0"} 3\ntandem_gateway_uncached_prompt_tokens_bucket{le="+Inf"} 2\n' if "2.0" in line else ""
    text = f"tandem_gateway_uncached_prompt_tokens_bucket{line}\n"
    text += f"tandem_gateway_uncached_prompt_tokens_bucket{rest}" if rest else ""
    with pytest.raises(UnusableFiguresError):
        LatencyTotals.of(Exposition.parse(text + "tandem_gateway_uncached_prompt_tokens_sum 3\n"))


def test_restarted_gateway_counts_from_zero():
    before = LatencyTotals(gap_square_s=9.0, good=5.0, judged=6.0, uncached=prompts(7))
    after = LatencyTotals(gap_square_s=1.0, good=2.0, judged=2.0, uncached=prompts(3))
    assert after.since(before) == after


def test_kind_of_a_former_revision_leaves_the_model_calibrated():
    factor = 'tandem_gateway_latency_factor{kind="a",factor="itl"} 1.1\n'
    kinds = (("a", 1), ("b", 1), ("c", 0))
    text = factor + "".join(f'tandem_gateway_latency_calibrated{{kind="{kind}"}} {value}\n' for kind, value in kinds)
    assert LatencyFactors.of(Exposition.parse(text)).is_calibrated
    assert not LatencyFactors.together([LatencyFactors(), *2 * [LatencyFactors(is_calibrated=False)]]).is_calibrated
