"""PodSampler at pods, one after the other, with a clock of the test's own."""

from dataclasses import replace
from math import inf

import pytest

from tandem_operator.scaling.distribution import Distribution
from tandem_operator.telemetry.exposition import Exposition, UnusableFiguresError
from tandem_operator.telemetry.latency_metrics import LatencyTotals
from tandem_operator.telemetry.pod_metrics import GatewayTotals, WorkerFigures
from tandem_operator.telemetry.samples import PodSampler
from tandem_testing.pod_builders import gateway, pod, worker

P, D, G = pod("p0", "prefill"), pod("d0", "decode"), pod("g0", "gateway", revision="")
IDLE = {"p0": worker("prefill"), "d0": worker(), "g0": gateway()}


def looked(*answers, pods=(P, D, G), sampler=None, every=5.0):
    """The outcome of the last of several sampler, one each period."""
    sampler = sampler or PodSampler()
    seen = None
    for number, each in enumerate(answers):
        seen = sampler.take(100.0 + number * every, pods, each)
    assert seen is not None
    return seen


def test_rates_need_a_second_sample():
    seen = looked(IDLE)
    assert seen.load is None
    assert "second sample" in seen.reason
    assert set(seen.workers) == {"p0", "d0"}


def test_idle_samples_make_an_idle_load():
    load = looked(IDLE, IDLE).load
    assert load is not None
    assert load.idle
    assert load.error() == ""
    assert load.age_s == 0.5
    assert (load.decode.worker_places, load.decode.worker_pages, load.prefill.worker_tokens_per_s) == (10, 100, 1000)


def test_counters_become_rates():
    first = {**IDLE, "g0": gateway(choices=5, requested_tokens=1000)}
    second = {**IDLE, "g0": gateway(choices=15, requested_tokens=6000)}
    load = looked(first, second).load
    assert load.decode.arrived_per_s == 2.0
    assert load.prefill.arrived_tokens_per_s == 1000.0


def test_cached_prefixes_are_no_work_but_only_bit_by_bit():
    sampler, answers = PodSampler(), []
    for n in range(1, 40):
        answers.append({**IDLE, "g0": gateway(requested_tokens=1000.0 * n, predicted_tokens=750.0 * n, tokens=0)})
    load = looked(*answers, sampler=sampler).load
    assert load.prefill.arrived_tokens_per_s == pytest.approx(200 * 0.25, rel=0.01)


def test_queued_requests_leave_the_cached_share_unchanged():
    first = {**IDLE, "g0": gateway()}
    second = {**IDLE, "g0": gateway(requested_tokens=10_000, tokens=10_000, waiting=5)}
    load = looked(first, second).load
    assert load.prefill.arrived_tokens_per_s == 2000.0
    assert load.prefill.queued_tokens == 10_000


def test_arrivals_at_processes_of_a_gateway_do_not_vary_more():
    """Four, each with one arrival per second: their metrics are sums."""

    def four(seconds: float):
        prompts = Distribution.of((128.0, inf), (4 * seconds, 0.0), 400 * seconds)
        latency = LatencyTotals(gap_square_s=4 * seconds, uncached=prompts)
        return replace(gateway(choices=4 * seconds), processes=4, latency=latency)

    load = looked({**IDLE, "g0": four(5.0)}, {**IDLE, "g0": four(10.0)}).load
    assert load.prefill.prompts.arrivals_variation == 1.0


def test_restarted_gateway_gains_its_whole_counters():
    first = {**IDLE, "g0": gateway(choices=100, requested_tokens=9000)}
    second = {**IDLE, "g0": gateway(choices=10, requested_tokens=500)}
    load = looked(first, second).load
    assert (load.decode.arrived_per_s, load.prefill.arrived_tokens_per_s) == (2.0, 100.0)


def test_gateway_totals_subtract_and_restart_from_zero():
    assert GatewayTotals(choices=5.0).since(GatewayTotals(choices=3.0)).choices == 2.0
    assert GatewayTotals(choices=5.0, finished=1.0).since(GatewayTotals(finished=9.0)).choices == 5.0


def test_queues_of_workers_and_gateways_are_one():
    answers = {
        "p0": worker("prefill", waiting_tokens=300, oldest_wait_s=2.0, leaving=1),
        "d0": worker(running=4, waiting=1, transferring=2, used_pages=40),
        "g0": gateway(waiting=6, held=0, tokens=200, oldest=3.0),
    }
    load = looked(answers, answers).load
    assert (load.prefill.queued_tokens, load.prefill.oldest_wait_s) == (500, 3.0)
    assert (load.decode.running, load.decode.waiting, load.decode.used_pages) == (7, 7, 40)


def test_canaries_without_clients_keep_no_service_busy():
    """A canary of the operator's is in workers' last reports, and comes again and again."""
    answers = {
        "p0": worker("prefill", waiting_tokens=48),
        "d0": worker(running=1, used_pages=4),
        "g0": gateway(answering=0),
    }
    assert looked(answers, answers).load.idle
    answers["g0"] = gateway(answering=1)
    assert not looked(answers, answers).load.idle


def test_flipped_worker_counts_where_it_serves():
    both = (P, D, pod("d1"), G)
    answers = {**IDLE, "d0": worker(running=3), "d1": worker("prefill", waiting_tokens=70)}
    seen = looked(answers, answers, pods=both)
    assert (seen.load.prefill.queued_tokens, seen.load.decode.running) == (70, 3)
    assert seen.serves(both[2]) == "prefill"


def test_ready_pod_without_metrics_makes_the_load_old():  # [figures-or-hold]
    sampler = PodSampler()
    sampler.take(100.0, (P, D, G), IDLE)
    for at in (105.0, 110.0, 115.0):
        seen = sampler.take(at, (P, D, G), {**IDLE, "d0": "it cannot be reached: gone"})
        assert seen.load is not None
    assert seen.load.age_s == 15.5
    assert "16 s old" in seen.load.error()


def test_ready_pod_that_never_replied_is_named():  # [figures-or-hold]
    answers = {**IDLE, "d0": "it has no metric tandem_worker_kv_pages"}
    seen = looked(answers, answers)
    assert seen.load is None
    assert seen.reason == "pod d0 is ready, and it has no metric tandem_worker_kv_pages"


def test_pods_that_start_or_go_do_not_hold_anything_up():
    starting, going = pod("d1", ready=False, ip=""), pod("d2", terminating=True)
    answers = {**IDLE, "d1": "it cannot be reached", "d2": "it cannot be reached"}
    assert looked(answers, answers, pods=(P, D, starting, going, G)).load is not None


def test_stalled_engine_counts_until_its_pod_is_unready():
    stalled = {**IDLE, "d0": worker(age_s=60.0, running=9)}
    assert "60 s old" in looked(stalled, stalled).load.error()
    not_ready = (P, pod("d0", ready=False), G)
    load = looked(stalled, stalled, pods=not_ready).load
    assert load.error() == ""
    assert load.decode.running == 0


def test_deleted_pods_are_forgotten_by_uid_not_by_name():
    sampler = PodSampler()
    sampler.take(100.0, (P, D, G), {**IDLE, "g0": gateway(choices=50)})
    sampler.take(105.0, (P, D), {uid: IDLE[uid] for uid in ("p0", "d0")})
    seen = sampler.take(110.0, (P, D, G), {**IDLE, "g0": gateway(choices=60)})
    assert seen.load is None, "it has been looked at once"


def test_load_without_gateways_is_unknown():
    seen = looked(IDLE, IDLE, pods=(P, D))
    assert (seen.load, seen.reason) == (None, "no gateway reports its queue")


def test_sizes_are_remembered_while_there_is_no_worker():
    sampler = PodSampler()
    sampler.take(100.0, (P, D, G), IDLE)
    sampler.take(105.0, (G,), {"g0": gateway()})
    seen = sampler.take(110.0, (G,), {"g0": gateway(waiting=2, held=2, tokens=99)})
    assert seen.load.held == 2
    assert (seen.load.decode.worker_places, seen.load.prefill.worker_tokens_per_s) == (10, 1000)


def test_decode_time_per_choice_excludes_first_token_time():
    sampler = PodSampler()
    for n in range(60):
        answers = {**IDLE, "g0": gateway(finished=n, finished_s=5.0 * n, first_tokens=n, first_token_s=1.0 * n)}
        seen = sampler.take(100.0 + 5 * n, (P, D, G), answers)
    assert seen.load.decode.seconds_each == pytest.approx(4.0, abs=0.01)


def test_slow_links_are_reported_by_both_ends():
    answers = {**IDLE, "d0": worker(slow_links={"p0": "tcp"})}
    assert looked(answers).slow_links() == {"d0 to p0": "tcp"}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1"])
def test_figure_that_is_no_number_is_named(value):  # [figures-or-hold]
    with pytest.raises(UnusableFiguresError, match="tandem_worker_kv_pages is"):
        WorkerFigures.of(Exposition.parse(f"tandem_worker_kv_pages {value}\n"))


@pytest.mark.parametrize("text", ["tandem_worker_kv_pages\n", "{{{{ 1\n", "a{b=\n"])
def test_malformed_exposition_is_rejected(text):
    with pytest.raises(UnusableFiguresError):
        WorkerFigures.of(Exposition.parse(text))
