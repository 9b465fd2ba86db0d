"""Calls that a request and a streamed token cost the gateway stay within bounds, on machines of any speed.

One client at a time: nothing comes together by chance, so that each request and each token has wake-ups of its own, the
most there can be. On a machine that is too busy some still come together, which only lowers the count.
"""

import importlib
from dataclasses import replace

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable

MARGIN = 1.05
"""Timers of the gateway run more often per request on a slow machine, and patch releases of Python differ."""

MOST = {"request": 945 * MARGIN, "token": 90 * MARGIN}
"""Counted with Python 3.11.7, all wake-ups apart; a `token` has its share of a request with 128 of them."""

REQUESTS = {"request": 128, "token": 4}


@pytest.mark.parametrize("name", sorted(MOST))
def test_calls_of_the_gateway_stay_within_their_bound(name):
    with benchmarks_importable():
        gateway_calls = importlib.import_module("gateway_calls")
    alone = replace(gateway_calls.CASES[name], requests=REQUESTS[name], clients=1)
    counted = gateway_calls.count(alone, None, 10)
    assert MOST[name] / 10 < counted["calls"] <= MOST[name], counted


def _routed(request: float, token: float, peer: tuple[float, float] | None = None):
    systems = {"tandem": {"whole": {"us_per_request": request + 100, "us_per_request_in_redis": 100.0}}}
    systems["tandem"]["streamed"] = {"us_per_token": token + 5, "us_per_token_in_redis": 5.0}
    if peer is not None:
        systems["sglang-cache_aware"] = {"whole": {"us_per_request": peer[0]}, "streamed": {"us_per_token": peer[1]}}
    return {"systems": systems, "absent": {} if peer else {"sglang-cache_aware": "it is not there"}}


@pytest.mark.parametrize("peer", [None, (40.0, 12.0)])
def test_targets_of_the_gateway_are_of_both_benchmarks(peer):
    with benchmarks_importable():
        mock = importlib.import_module("gateway_mock")
    timings = {"first_p50_ms": 550.0, "first_p99_ms": 1_200.0, "whole_p50_ms": 0.9}

    def side(cpu_s: float):
        measured = mock.Measured(requests=1, tokens=1, seconds=1.0, cpu_seconds=cpu_s, timings=timings)
        return {case: [measured] for case in mock.CASES}

    with benchmarks_importable():
        rows = mock.targets(
            {"here": side(1.0), "old": side(2.5)},
            {"here": [_routed(500.0, 20.0, peer)], "old": [_routed(1_000.0, 40.0)]},
            "old",
        )
    ratios = [0.4, 0.5, 0.4, *((0.08, 0.6) if peer else (None, None)), 0.55, 1.2, 0.9]
    assert [row.ratio for row in rows] == pytest.approx(ratios) if peer else [row.ratio for row in rows] == ratios
    assert [row.met for row in rows] == [True, True, True, bool(peer), bool(peer), True, False, True]
