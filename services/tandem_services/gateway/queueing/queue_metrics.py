"""Metrics of the queue. Tenants are named by the key file, so their number is bounded by it."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem_services.common.metrics import REQUEST_SECONDS


class QueueMetrics:
    """All series of one gateway's queue, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waiting = Gauge(
            "tandem_gateway_num_requests_waiting", "Requests that wait here for a worker with room", registry=registry
        )
        self._by_tenant = Gauge(
            "tandem_gateway_tenant_requests_waiting",
            "Requests that wait here for a worker with room, by tenant",
            ["tenant"],
            registry=registry,
        )
        self.wait = Histogram(
            "tandem_gateway_queue_wait_seconds",
            "Time in this gateway's queue, of requests that got a worker; 0 for those that found one at once",
            buckets=(0.0, *REQUEST_SECONDS),
            registry=registry,
        )
        self._refused = Counter(
            "tandem_gateway_queue_refusals_total",
            "Requests that got no worker: full and pushed_out for want of a seat, no_worker and no_room in time",
            ["reason"],
            registry=registry,
        )
        self._shown: set[str] = set()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason=reason).inc()

    def waiting(self, lengths: Mapping[str, int]) -> None:
        """How many wait, by tenant."""
        self._waiting.set(sum(lengths.values()))
        for tenant in self._shown - lengths.keys():
            self._by_tenant.labels(tenant=tenant).set(0)
        for tenant, length in lengths.items():
            self._by_tenant.labels(tenant=tenant).set(length)
        self._shown |= lengths.keys()
