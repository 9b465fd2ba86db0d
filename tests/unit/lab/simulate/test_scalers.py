"""Scalers that the simulator compares: what each does with the same load."""

import pytest

from tandem_lab.simulate.autoscaling import Hpa, Law, Static
from tandem_testing.fluid_service import FluidService, config_of


def load(**figures):
    return FluidService(config_of(), **figures).load()


def test_law_is_the_operators_and_remembers():
    law = Law(config_of())
    wanted, flips = law.decide(load(arrived_tokens=3500.0), {"prefill": 1, "decode": 1})
    assert (wanted, flips) == ({"prefill": 4, "decode": 1}, 0)
    later = FluidService(config_of(), now=5.0, arrived_tokens=100.0).load()
    assert law.decide(later, {"prefill": 4, "decode": 1})[0]["prefill"] == 4, "the window to go down has begun"


@pytest.mark.parametrize(
    ("queued", "now", "wanted"),
    [(1000.0, 1, 1), (1050.0, 1, 1), (2000.0, 1, 2), (9000.0, 2, 6), (0.0, 3, 1)],
)
def test_hpa_scales_in_proportion_within_its_tolerance_and_rate(queued, now, wanted):
    replicas, _ = Hpa(config_of()).decide(load(queued_tokens=queued), {"prefill": now, "decode": 1})
    assert replicas["prefill"] == wanted


def test_hpa_scales_down_only_after_its_window():
    hpa, service = Hpa(config_of()), FluidService(config_of(), queued_tokens=4000.0)
    assert hpa.decide(service.load(), {"prefill": 4, "decode": 1})[0]["prefill"] == 4
    service.queued_tokens = 0.0
    for service.now in (100.0, 299.0):
        assert hpa.decide(service.load(), {"prefill": 4, "decode": 1})[0]["prefill"] == 4
    service.now = 301.0
    assert hpa.decide(service.load(), {"prefill": 4, "decode": 1})[0]["prefill"] == 1


def test_static_scaler_keeps_the_number_under_load():
    assert Static().decide(load(queued_tokens=1e9), {"prefill": 3, "decode": 2}) == ({"prefill": 3, "decode": 2}, 0)
