"""Calls that a request and a streamed token cost the gateway stay within bounds, on machines of any speed."""

import importlib
from dataclasses import replace

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable

MARGIN = 1.05
"""Wake-ups come together or apart by chance, and cost calls."""

MOST = {"request": 1060 * MARGIN, "token": 43 * MARGIN}
"""Counted with Python 3.11; a `token` has its share of a request with 128 of them."""


@pytest.mark.parametrize("name", sorted(MOST))
def test_calls_of_the_gateway_stay_within_their_bound(name):
    with benchmarks_importable():
        gateway_calls = importlib.import_module("gateway_calls")
    case = gateway_calls.CASES[name]
    fewer = replace(case, requests=256) if name == "request" else replace(case, requests=32)
    counted = gateway_calls.count(fewer, None, 10)
    assert MOST[name] / 4 < counted["calls"] <= MOST[name], counted
