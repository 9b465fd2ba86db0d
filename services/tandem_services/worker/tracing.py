"""Traces of a worker: exports spans from the engine's reports, and counts those lost.

`open` imports OpenTelemetry's packages, so a worker without tracing never loads them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_engine.messages.stats import EndedRequests
from tandem_services.common.recording import recording
from tandem_services.common.tracing import LAST_SPANS_S, TracingConfig
from tandem_services.worker.metrics import PREFIX

if TYPE_CHECKING:
    from tandem_services.common.span_export import SpanCounts, SpanExport
    from tandem_services.worker.engine_spans import EngineSpans


SERVICE = "tandem-worker"


class WorkerTraces(Collector):
    """Opened once the engine runs, closed with the worker."""

    def __init__(self, config: TracingConfig) -> None:
        self._config = config
        self._export: SpanExport | None = None
        self._spans: EngineSpans | None = None
        self._unreported = 0

    def open(self, *, incarnation: str, model: str) -> None:
        """Needs OpenTelemetry's packages (`require_opentelemetry`)."""
        from tandem_services.common.span_export import SpanExport
        from tandem_services.worker.engine_spans import EngineSpans

        self._export = SpanExport(self._config, service=SERVICE, instance=incarnation)
        self._spans = EngineSpans(self._export.tracer, incarnation=incarnation, model=model)

    @recording
    def record(self, message: EndedRequests) -> None:
        """Make spans of a report."""
        if self._spans is None:
            return
        self._unreported = message.lost
        for ended in message.requests:
            self._spans.record(ended)

    def collect(self) -> Iterator[Metric]:
        if self._export is not None:
            yield from trace_metrics(self._export.counts, unreported=self._unreported)

    def close(self, *, within_s: float = LAST_SPANS_S) -> None:
        """Send what waits, for as long as `within_s`."""
        if self._export is not None:
            self._export.close(within_s=within_s)


def trace_metrics(counts: "SpanCounts", *, unreported: int) -> Iterator[Metric]:
    """All metrics of a worker that traces."""
    from tandem_services.common.span_export import SpanMetrics

    yield from SpanMetrics(PREFIX, counts).collect()
    yield CounterMetricFamily(
        PREFIX + "trace_requests_unreported",
        "Traced requests that the engine's reports lack",
        value=unreported,
    )
