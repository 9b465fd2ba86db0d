"""A whole system in containers of unusual shapes: it starts and answers, or an error names the limit.

Two of those of `tandem_testing.limits.places`; `make limits` has all.
"""

import json

import pytest

from tandem_engine.base.environment import kernel_environment
from tandem_engine.kernels.store.layers import PATH_VARIABLE, KernelStore
from tandem_testing.limits.places import PLACES, Place, check, problem
from tandem_testing.redis_server import REDIS_SERVER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # kernels may have to be compiled
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
]
SOME = ("user without an entry or HOME", "30 threads and processes")


@pytest.mark.parametrize("place", [each for each in PLACES if each.name in SOME], ids=lambda place: place.name)
def test_system_serves_or_names_limit(place: Place, monkeypatch):
    # A user without a cache reads the kernels that other tests have compiled; `make limits` has them compiled.
    monkeypatch.setenv(PATH_VARIABLE, str(KernelStore.of(kernel_environment()).own))
    if reason := place.not_checked():
        pytest.skip(f"NOT CHECKED: {reason}")
    figures = check(place)
    assert problem(place, figures) == "", json.dumps(figures)
