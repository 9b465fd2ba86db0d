"""Series of the operator's /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem_operator.telemetry.external import ScalingFigures

RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class OperatorMetrics:
    """All series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "tandem_operator_reconciles",
            "Reconciliations of a ModelService, by result: unchanged, changed, failed, stopped (leadership was lost)",
            ["result"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "tandem_operator_reconcile_seconds",
            "Duration of a reconciliation, writes included",
            buckets=RECONCILE_BUCKETS,
            registry=self.registry,
        )
        self.api_writes = Counter(
            "tandem_operator_api_writes",
            "Write requests to the API server",
            ["verb", "kind"],
            registry=self.registry,
        )
        self.errors = Counter(
            "tandem_operator_errors", "Failures, by component", ["part", "reason"], registry=self.registry
        )
        self.leader = Gauge("tandem_operator_leader", "1 while this operator is the leader", registry=self.registry)
        self.queue = Gauge(
            "tandem_operator_queue_length", "Services that wait for a reconciliation", registry=self.registry
        )
        self.services = Gauge("tandem_operator_services", "Known ModelServices", registry=self.registry)
        self.scaling = ScalingFigures()
        """Of services that others scale."""
        self.registry.register(self.scaling)
        self.watch_events = Counter(
            "tandem_operator_watch_events", "Watch events received", ["kind"], registry=self.registry
        )

    def wrote(self, verb: str, kind: str) -> None:
        """A request that changes something was sent."""
        self.api_writes.labels(verb, kind).inc()
