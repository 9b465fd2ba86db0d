"""Metrics of the queues. Tenants are named by the key file, so their number is bounded by it."""

from collections.abc import Callable, Mapping

from tandem_services.common.metrics import REQUEST_SECONDS, MetricFamilies
from tandem_services.gateway.metrics import MODEL
from tandem_services.gateway.queueing.late_binding import QueueFigures


class QueueMetrics:
    """The series of one model service's queue."""

    def __init__(self, families: MetricFamilies, *, model: str) -> None:
        self._model = model
        self._waiting = families.gauge(
            "tandem_gateway_num_requests_waiting", "Requests that wait here for a worker with room", [MODEL]
        ).labels(model_name=model)
        self._by_tenant = families.gauge(
            "tandem_gateway_tenant_requests_waiting",
            "Requests that wait here for a worker with room, by tenant",
            [MODEL, "tenant"],
        )
        self.wait = families.histogram(
            "tandem_gateway_queue_wait_seconds",
            "Time in this gateway's queue, of requests that got a worker; 0 for those that found one at once",
            [MODEL],
            buckets=(0.0, *REQUEST_SECONDS),
        ).labels(model_name=model)
        self._refused = families.counter(
            "tandem_gateway_queue_refusals",
            "Requests that got no worker: full and pushed_out for want of a seat, no_worker and no_room in time",
            [MODEL, "reason"],
        )
        self._asked = families.counter(
            "tandem_gateway_asked_prompt_tokens", "Prompt tokens of requests that came for a worker", [MODEL]
        ).labels(model_name=model)
        self._predicted = families.counter(
            "tandem_gateway_predicted_cached_tokens",
            "Of prompt tokens that came for a worker, those that the worker that got them was predicted to have",
            [MODEL],
        ).labels(model_name=model)
        self._tokens = families.gauge(
            "tandem_gateway_waiting_prompt_tokens", "Prompt tokens of requests that wait here", [MODEL]
        ).labels(model_name=model)
        self._oldest = families.gauge(
            "tandem_gateway_oldest_wait_seconds", "How long the first request waits here", [MODEL]
        ).labels(model_name=model)
        self._held = families.gauge(
            "tandem_gateway_num_requests_held", "Requests that wait here because no worker can take them", [MODEL]
        ).labels(model_name=model)
        self._shown: set[str] = set()

    def watch(self, figures: Callable[[], QueueFigures]) -> None:
        """Ask for what is told at each scrape."""
        self._tokens.set_function(lambda: figures().prompt_tokens)
        self._oldest.set_function(lambda: figures().oldest_wait_s)
        self._held.set_function(lambda: figures().held)

    def asked(self, prompt_tokens: int) -> None:
        """A request has come."""
        self._asked.inc(prompt_tokens)

    def admitted(self, wait_s: float, *, matched_tokens: int) -> None:
        """It has a worker, after `wait_s`, which is predicted to have so many of its tokens cached."""
        self.wait.observe(wait_s)
        self._predicted.inc(matched_tokens)

    def refused(self, reason: str) -> None:
        self._refused.labels(model_name=self._model, reason=reason).inc()

    def waiting(self, lengths: Mapping[str, int]) -> None:
        """How many wait, by tenant."""
        self._waiting.set(sum(lengths.values()))
        for tenant in self._shown - lengths.keys():
            self._by_tenant.labels(model_name=self._model, tenant=tenant).set(0)
        for tenant, length in lengths.items():
            self._by_tenant.labels(model_name=self._model, tenant=tenant).set(length)
        self._shown |= lengths.keys()
