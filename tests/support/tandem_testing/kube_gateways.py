"""ModelGateways and the services behind them, as the planner gets them."""

import base64
from typing import Any

import msgspec

from tandem_operator.api.model_gateway import ModelGatewaySpec, ModelGatewayStatus
from tandem_operator.builders.models_file import fleet_files
from tandem_operator.builders.served import Served, served_gateway
from tandem_operator.planning.model_gateway import Former, GatewayPlan, Referring, make_gateway_plan, shared_models
from tandem_operator.planning.observed import Observed
from tandem_operator.settings import OperatorSettings
from tandem_testing.kube_cluster import service_of

KEYS = b'{"public": "p", "secret": "s"}'
NOW = "2026-01-01T00:00:00Z"


def gateway_of(spec: dict[str, Any] | None = None, *, name: str = "front") -> Served:
    """With the operator's defaults."""
    return served_gateway(name, "models", msgspec.convert(spec or {}, ModelGatewaySpec), OperatorSettings())


def behind(name: str = "chat", *, keys: bytes = KEYS, created: str = NOW, reason: str = "", **spec: Any) -> Referring:
    """A service that refers to `front`. `reason`: why its spec is invalid."""
    service = service_of({"gatewayRef": {"name": "front"}, "model": {"path": "/models/mini"}, **spec}, name=name)
    files = tuple(fleet_files(service, keys))
    contents = {file.name: base64.b64encode(f"{file.source.name}".encode()).decode() for file in files}
    return Referring(name=name, created=created, service=service, reason=reason, files=files, contents=contents)


def plan_of(
    gateway: Served,
    *services: Referring,
    observed: Observed | None = None,
    former: Former | None = None,
    before: ModelGatewayStatus | None = None,
    settings: OperatorSettings | None = None,
) -> GatewayPlan:
    """Of a gateway with these services."""
    return make_gateway_plan(
        gateway,
        observed or Observed(now=NOW),
        shared_models(gateway, services, former or Former()),
        before or ModelGatewayStatus(),
        1,
        settings or OperatorSettings(),
    )
