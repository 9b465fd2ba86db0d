"""Metrics for external autoscalers (`spec.autoscaling.mode: external`): the workers that each role needs.

    tandem_scaling_workers_needed     not rounded: with target 1 per worker an HPA, or KEDA's, rounds it up
    tandem_scaling_queue_tokens …     its inputs, for autoscalers with a policy of their own

Prometheus scrapes them for prometheus-adapter; KEDA's metrics-api scaler reads one role as JSON. Unreliable metrics are
omitted: the series ends, and the JSON request is rejected with the reason. Both kinds of autoscalers then change
nothing [figures-or-hold].

While requests are served, neither role needs less than `LEAST`: both scale from and to zero together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.scaling.load import Load
from tandem_operator.scaling.policy import ScalingConfig, need_of
from tandem_operator.telemetry.samples import LoadReading

LEAST = 0.01
"""Of a worker: more than nothing, which is what brings a scaler from zero."""

ServiceName = tuple[str, str]
"""Namespace and name."""

_GAUGES = {
    "workers_needed": "Workers of the role that the load needs, not rounded.",
    "queue_tokens": "Prompt tokens without a cached prefix that wait, at workers and in gateways.",
    "queue_requests": "Requests that wait for a place, at workers and in gateways.",
    "oldest_wait_seconds": "How long the first of them has waited.",
    "kv_usage": "KV pages that running sequences hold, in workers: 1.5 fills one and a half.",
    "held_requests": "Requests that gateways hold because no worker can take them.",
}
PREFIX = "tandem_scaling_"

LABELS = ("service_namespace", "model_service", "role")
"""Not `namespace`: that is the operator's own, set by the scraper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFigures:
    """One role's."""

    workers_needed: float
    queue_tokens: float
    queue_requests: float
    oldest_wait_seconds: float
    kv_usage: float
    held_requests: float
    reason: str
    """Of the need, in a sentence."""

    def document(self) -> dict[str, float | str]:
        """JSON, in the names of Kubernetes."""
        return {
            "workersNeeded": self.workers_needed,
            "queueTokens": self.queue_tokens,
            "queueRequests": self.queue_requests,
            "oldestWaitSeconds": self.oldest_wait_seconds,
            "kvUsage": self.kv_usage,
            "heldRequests": self.held_requests,
            "reason": self.reason,
        }


def role_figures(load: Load, config: ScalingConfig) -> dict[RoleName, RoleFigures]:
    """Of a load that can be trusted."""
    prefill, decode = load.prefill, load.decode
    needs = {role: need_of(role, load, config) for role in ROLES}
    least = 0.0 if load.idle else LEAST
    return {
        role: RoleFigures(
            workers_needed=round(max(needs[role].workers, least), 3),
            queue_tokens=prefill.queued_tokens if role == "prefill" else 0.0,
            queue_requests=decode.waiting if role == "decode" else 0.0,
            oldest_wait_seconds=prefill.oldest_wait_s if role == "prefill" else decode.oldest_wait_s,
            kv_usage=decode.used_pages / decode.worker_pages if role == "decode" and decode.worker_pages else 0.0,
            held_requests=load.held,
            reason=needs[role].reason,
        )
        for role in ROLES
    }


@dataclass(kw_only=True, eq=False)
class ScalingMetrics(Collector):
    """Those of all services. Register it with the operator's metrics."""

    _figures: dict[ServiceName, dict[RoleName, RoleFigures]] = field(default_factory=dict)
    _errors: dict[ServiceName, str] = field(default_factory=dict)

    def put(self, service: ServiceName, seen: LoadReading, config: ScalingConfig) -> None:
        """What came of a look at `service`."""
        error = seen.reason if seen.load is None else seen.load.error()
        if seen.load is None or error:
            self._figures.pop(service, None)
            self._errors[service] = error
            return
        self._errors.pop(service, None)
        self._figures[service] = role_figures(seen.load, config)

    def forget(self, service: ServiceName) -> None:
        """It was deleted, or is not polled any more."""
        self._figures.pop(service, None)
        self._errors.pop(service, None)

    def answer(self, namespace: str, service: str, role: str) -> tuple[int, dict[str, float | str]]:
        """HTTP status and JSON for `GET /scaling/{namespace}/{service}/{role}`."""
        figures = next((one for name, one in self._figures.get((namespace, service), {}).items() if name == role), None)
        if figures is not None:
            return 200, figures.document()
        if role not in ROLES:
            return 404, {"message": f"role must be prefill or decode, got {role[:64]!r}"}
        error = self._errors.get((namespace, service))
        if error is not None:
            return 503, {"message": f"no reliable metrics: {error}"}
        return 404, {"message": "no such ModelService, or it has not been checked yet"}

    def describe(self) -> Iterator[Metric]:
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, labels=LABELS)

    def collect(self) -> Iterator[Metric]:
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            for (namespace, service), roles in sorted(self._figures.items()):
                for role, figures in roles.items():
                    family.add_metric([namespace, service, role], getattr(figures, name))
            yield family
