"""Every field of a ModelGateway does something."""

from typing import Any

import msgspec
import pytest

from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_testing.kube_gateways import behind, gateway_of, plan_of
from tandem_testing.spec_fields import FULL_GATEWAY_SPEC, leaves, others, with_field

APIS = ClusterApis(http_routes=True, inference_pools=True, pod_monitors=True)
SETTINGS = OperatorSettings(apis=APIS, allow=frozenset(PRIVILEGES))
WITHOUT_EFFECT = {
    "images.engine": "of workers, which a ModelGateway has none of",
    "images.redis": "of a managed Redis; this one is external",
}


def outcome(spec: dict[str, Any]) -> tuple[Any, ...]:
    """All that comes of it with one service. Raises where it is no spec."""
    plan = plan_of(gateway_of(spec), behind(), settings=SETTINGS)
    return plan.apply, plan.secrets, plan.status.conditions


BEFORE = outcome(FULL_GATEWAY_SPEC)
NAMED = {".".join(map(str, path)): (path, value) for path, value in leaves(FULL_GATEWAY_SPEC)}
FIELDS = [(name, *field) for name, field in NAMED.items() if name not in WITHOUT_EFFECT]


@pytest.mark.parametrize(("name", "path", "value"), FIELDS, ids=[name for name, _, _ in FIELDS])
def test_another_value_of_a_gateway_has_another_outcome(name, path, value):
    for other in others(value):
        try:
            after = outcome(with_field(FULL_GATEWAY_SPEC, path, other))
        except (msgspec.ValidationError, ValueError):
            continue
        if after != BEFORE:
            return
    pytest.fail(f"{name} means nothing")
