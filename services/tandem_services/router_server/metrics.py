"""Metrics of a stand-alone router. Label values are bounded."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CHOICE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Buckets from one round trip to Redis to a long prompt that is tokenised."""


class RouterMetrics:
    """All series of one router, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "tandem_router_http_requests_total",
            "HTTP requests answered, by status code; 499 is a client that left",
            ["endpoint", "code"],
            registry=registry,
        )
        self._disconnects = Counter(
            "tandem_router_client_disconnects_total",
            "HTTP requests whose client left before the end",
            registry=registry,
        )
        self._choices = Counter(
            "tandem_router_choices_total",
            "Route decisions by interface (http, grpc, ext_proc), source (redis, local) and placement",
            ["interface", "source", "placement"],
            registry=registry,
        )
        self._refusals = Counter(
            "tandem_router_refusals_total",
            "Requests without a route decision, by interface and status: 400 bad input, 429 no capacity or too many, "
            "503 no worker",
            ["interface", "code"],
            registry=registry,
        )
        self.choice_seconds = Histogram(
            "tandem_router_choice_seconds",
            "From a request to its route decision, tokenization included",
            buckets=CHOICE_SECONDS,
            registry=registry,
        )
        self.held = Gauge("tandem_router_held_choices", "Choices that are not released yet", registry=registry)
        self.exchanges = Gauge(
            "tandem_router_ext_proc_exchanges", "Requests of an Inference Gateway that are followed", registry=registry
        )
        self.unplaced = Counter(
            "tandem_router_ext_proc_unplaced_total",
            "Requests that were sent to a gateway without a choice: it finds a place for them",
            registry=registry,
        )
        self.elsewhere = Counter(
            "tandem_router_ext_proc_served_elsewhere_total",
            "Requests that another endpoint served than the first that was named",
            registry=registry,
        )
        self.ready_gateways = Gauge(
            "tandem_router_ready_gateways", "Gateways of --gateway that are ready", registry=registry
        )

    def answered(self, endpoint: str, status: int, *, model: str) -> None:  # noqa: ARG002  # no model answers here
        self._requests.labels(endpoint=endpoint, code=str(status)).inc()

    def disconnected(self, *, model: str) -> None:  # noqa: ARG002
        self._disconnects.inc()

    def chose(self, interface: str, source: str, placement: str) -> None:
        self._choices.labels(interface=interface, source=source, placement=placement).inc()

    def refused(self, interface: str, status: int) -> None:
        self._refusals.labels(interface=interface, code=str(status)).inc()
