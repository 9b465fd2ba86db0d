"""Metrics of a gateway. Names follow vLLM's, with the prefix of Tandem; label values are bounded.

`model_name` is the first name of a model service, known at start. Aliases and names that clients invent never become
labels: it is "" if a request names no served model.
"""

from collections.abc import Callable
from itertools import pairwise

from tandem_services.common.metric_values import CounterSeries, HistogramSeries
from tandem_services.common.metrics import REQUEST_SECONDS, TOKEN_SECONDS, TRANSFER_SECONDS, MetricFamilies
from tandem_services.common.recording import recording
from tandem_services.gateway.observe.explain import AttemptRecord, ChoiceRecord, RequestRecord
from tandem_services.router.decision import Source

PREFIX = "tandem_gateway_"
MODEL = "model_name"


class HttpMetrics:
    """Properties of every HTTP request."""

    def __init__(self, families: MetricFamilies) -> None:
        self._requests = families.counter(
            "tandem_gateway_requests",
            "HTTP requests answered, by status code; 499: the client disconnected",
            [MODEL, "endpoint", "code"],
        )
        self._disconnects = families.counter(
            "tandem_gateway_client_disconnects", "Requests whose client disconnected before the end", [MODEL]
        )

        self._bodies = families.gauge("tandem_gateway_request_body_bytes", "Bytes of request bodies in flight")
        families.gauge("tandem_gateway_processes", "Processes of this gateway, whose metrics are added up").set(1)

    def watch_bodies(self, held: Callable[[], int]) -> None:
        """Ask for the bytes at each scrape."""
        self._bodies.set_function(held)

    @recording
    def answered(self, endpoint: str, status: int, *, model: str) -> None:
        self._requests.series(model, endpoint, str(status)).inc()

    @recording
    def disconnected(self, *, model: str) -> None:
        self._disconnects.series(model).inc()


class GatewayMetrics:
    """The series of one model service."""

    def __init__(self, families: MetricFamilies, *, model: str) -> None:
        def seconds(name: str, text: str, buckets: tuple[float, ...] = REQUEST_SECONDS) -> HistogramSeries:
            family = families.histogram(f"tandem_gateway_{name}_seconds", text, [MODEL], buckets=buckets)
            return family.series(model)

        def total(name: str, text: str) -> CounterSeries:
            return families.counter(f"tandem_gateway_{name}", text, [MODEL]).series(model)

        self._model = model
        self._attempts = families.counter(
            "tandem_gateway_attempts",
            "Attempts at choices, by outcome; all outcomes but finished, stopped and moved delay the response",
            [MODEL, "outcome"],
        )
        self._placements = families.counter(
            "tandem_gateway_placements",
            "Attempts of finished requests by the workers that computed the prompt: pair, alone, local because it was "
            "predicted to be faster, degraded because no prefill worker could",
            [MODEL, "placement"],
        )
        self._routes = families.counter(
            "tandem_gateway_route_decisions",
            "Attempts of finished requests by the source of the route decision (redis, local: without Redis, session, "
            "router: a stand-alone one) and main reason: session, a prefix to fetch, a cached prefix, or only the load",
            [MODEL, "source", "reason"],
        )
        self._cells = families.counter(
            "tandem_gateway_cell_decisions",
            "Attempts of finished requests at workers of another cell, and why: full, no_worker and no_redis are about "
            "the gateway's own cell, kept about a request that was there before",
            [MODEL, "cell", "reason"],
        )
        self._resumptions = families.counter(
            "tandem_gateway_resumptions",
            "Attempts of finished requests that continued after tokens of an earlier one, by the outcome of that one",
            [MODEL, "cause"],
        )
        self.choices = total("choices", "Choices of requests that started")
        self.running = families.level(
            "tandem_gateway_num_requests_running", "Generation requests in progress", [MODEL]
        ).series(model)
        self.ttft = seconds("time_to_first_token", "From a request's arrival to its first token")
        self.itl = seconds("inter_token_latency", "Time between two tokens of a choice", TOKEN_SECONDS)
        self.e2e = seconds("e2e_request_latency", "From a request's arrival to its last byte")
        self.queue = seconds("request_queue_time", "On the worker, from receipt to the first scheduled step")
        self.prefill = seconds("request_prefill_time", "On the worker, from the first step to the first token")
        self.decision = seconds("route_decision", "From the request to the router until its decision", TRANSFER_SECONDS)
        self.transfer = seconds(
            "kv_transfer", "On the decode worker, from granting KV pages to committing them", TRANSFER_SECONDS
        )
        self.exposed = seconds(
            "kv_transfer_exposed", "Part of a KV transfer after the prompt was computed", TRANSFER_SECONDS
        )
        self.prompt_tokens = total("prompt_tokens", "Prompt tokens of finished requests")
        self.cached_tokens = total("cached_prompt_tokens", "Prompt tokens found in a prefix cache")
        self.output_tokens = total("generation_tokens", "Tokens generated and accepted")
        self.quarantined = families.gauge(
            "tandem_gateway_quarantined_requests", "Digests of requests in quarantine", [MODEL]
        ).labels(model_name=model)
        self.convictions = total(
            "requests_quarantined",
            "Requests that this gateway quarantined because workers died when they computed them",
        )
        self.quarantine_refusals = total("quarantine_refusals", "Requests rejected because they are in quarantine")
        self.workers_answering_again = total(
            "workers_answering_again",
            "Workers that answered a ping after their connection was lost: the network had failed",
        )
        self.retries_refused = total("retries_refused", "Choices that failed because the retry budget was spent")
        self.moved_pages = total("transferred_pages", "KV pages moved from prefill to decode workers")
        self.moved_bytes = total("transferred_bytes", "KV bytes moved from prefill to decode workers")

    @recording
    def attempt_ended(self, outcome: str) -> None:
        self._attempts.series(self._model, outcome).inc()

    @recording
    def finished(self, record: RequestRecord) -> None:
        """Count what a finished request has used."""
        self.prompt_tokens.inc(record.prompt_tokens)
        self.cached_tokens.inc(record.cached_tokens)
        self.output_tokens.inc(record.output_tokens)
        if record.e2e_s is not None:
            self.e2e.observe(record.e2e_s)
        for choice in record.choices:
            self._count_choice(choice)

    def _count_choice(self, choice: ChoiceRecord) -> None:
        for attempt in choice.attempts:
            self._placements.series(self._model, attempt.placement).inc()
            self._routes.series(self._model, attempt.source, route_reason(attempt)).inc()
            if attempt.cell is not None:
                self._cells.series(self._model, attempt.cell.name, attempt.cell.reason).inc()
        for before, attempt in pairwise(choice.attempts):
            if attempt.resumed_tokens:
                self._resumptions.series(self._model, before.outcome).inc()
        if choice.ttft_s is not None:
            self.ttft.observe(choice.ttft_s)
        if choice.queue_s is not None:
            self.queue.observe(choice.queue_s)
        if choice.prefill_s is not None:
            self.prefill.observe(choice.prefill_s)
        if choice.transfer is not None:
            self.moved_pages.inc(choice.transfer.pages)
            self.moved_bytes.inc(choice.transfer.bytes)
            self.transfer.observe(choice.transfer.wait_s)
            self.exposed.observe(choice.transfer.exposed_s)


def route_reason(attempt: AttemptRecord) -> str:
    """What spoke for the chosen workers, the strongest of it."""
    if attempt.source == Source.SESSION.value:
        return "session"
    if attempt.fetch is not None:
        return "fetch"
    return "prefix" if attempt.matched_tokens else "load"
