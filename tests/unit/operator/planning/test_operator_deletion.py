"""How a service goes: gateways drain first, within a bound, and then everything goes at once."""

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.planning.conditions import condition
from tandem_operator.planning.deletion import Farewell, drain_bound_s, leaving, next_farewell
from tandem_operator.planning.observed import DeploymentSeen, Observed

BOUND = drain_bound_s(60)


def observed(replicas=None):
    gateways = () if replicas is None else (DeploymentSeen(name="chat-gateway", replicas=replicas),)
    return Observed(now="2026-01-01T00:00:00Z", deployments=gateways)


@pytest.mark.parametrize(
    ("replicas", "pods", "elapsed", "expected"),
    [
        (2, 2, 0.0, Farewell(stop_gateways=True)),
        (0, 2, 1.0, Farewell()),
        (0, 0, 5.0, Farewell(finished=True)),
        (None, 0, 0.0, Farewell(finished=True)),
        (None, 1, 0.0, Farewell()),
        (0, 1, BOUND, Farewell(finished=True, late=True)),
        (2, 2, BOUND, Farewell(finished=True, late=True)),
        (0, 0, BOUND, Farewell(finished=True)),
    ],
)
def test_steps(replicas, pods, elapsed, expected):
    assert next_farewell("chat", observed(replicas), pods, elapsed, BOUND) == expected


def test_the_status_says_that_it_goes_and_keeps_the_rest():
    before = ModelServiceStatus(
        conditions=[condition("Ready", True, "CanaryPassed"), condition("RedisReady", True, "Available")]
    )
    after = leaving(before, 3, "2026-01-01T00:00:00Z")
    assert {one.type: (one.status, one.reason) for one in after.conditions} == {
        "Ready": ("False", "Deleting"),
        "Progressing": ("True", "Deleting"),
        "RedisReady": ("True", "Available"),
    }
    assert leaving(after, 3, "2026-01-01T00:01:00Z") == after
