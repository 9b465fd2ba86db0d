"""Exports spans to the OpenTelemetry collector. Imported only if tracing is enabled.

    1. ended     on an event loop: a bounded queue takes the span, or it is dropped and counted
    2. sent      in batches, by a thread of OpenTelemetry's `BatchSpanProcessor`, which retries for some seconds
    3. counted   exported; failed if the collector rejected its batch; dropped if the queue was full

No request waits for the collector, and the exit of the process waits at most `LAST_SPANS_S`.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags, TraceState, set_span_in_context
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_engine.base.release import product_version
from tandem_engine.messages.requests import MAX_TRACESTATE_CHARACTERS, TraceContext
from tandem_services.common.tracing import LAST_SPANS_S, TracingConfig

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SpanCounts:
    """Since start. Each number is written by one thread."""

    queued: int = 0
    dropped: int = 0
    taken: int = 0
    """Left the queue."""
    exported: int = 0
    failed: int = 0

    @property
    def waiting(self) -> int:
        return self.queued - self.taken


class CountedExporter(SpanExporter):
    """Counts the results of batches. Never raises: the thread that calls it cannot report errors."""

    def __init__(self, exporter: SpanExporter, counts: SpanCounts) -> None:
        self._exporter = exporter
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._counts.taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:
            logger.exception("exporting spans failed")
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._counts.exported += len(spans)
        else:
            self._counts.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class BoundedProcessor(SpanProcessor):
    """Hands ended spans on as long as fewer than `limit` wait; drops the newest beyond that, without a word."""

    def __init__(self, processor: SpanProcessor, counts: SpanCounts, limit: int) -> None:
        self._processor = processor
        self._counts = counts
        self._limit = limit

    def on_end(self, span: ReadableSpan) -> None:
        if self._counts.waiting >= self._limit:
            self._counts.dropped += 1
            return
        self._counts.queued += 1
        self._processor.on_end(span)

    def shutdown(self) -> None:
        self._processor.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._processor.force_flush(timeout_millis)


class SpanExport:
    """Exports the spans of `tracer`. One instance per process; it starts a thread, so make it after the last fork.

    Call `tracing.require_opentelemetry` before this module is imported, which reports a missing package.
    """

    def __init__(self, config: TracingConfig, *, service: str, instance: str) -> None:
        """`service` names this kind of process, unless OTEL_SERVICE_NAME gives a name."""
        self.counts = SpanCounts()
        batches = BatchSpanProcessor(
            CountedExporter(OTLPSpanExporter(endpoint=config.url), self.counts),
            max_queue_size=config.max_waiting_spans,
            max_export_batch_size=min(512, config.max_waiting_spans),
        )
        self._provider = TracerProvider(
            sampler=None if config.sample_ratio is None else ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=_resource(service, instance),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BoundedProcessor(batches, self.counts, config.max_waiting_spans))
        self.tracer = self._provider.get_tracer("tandem", product_version())

    def flush(self) -> None:
        """Send what waits; returns when the collector has answered."""
        self._provider.force_flush()

    def close(self, *, within_s: float = LAST_SPANS_S) -> None:
        """Send what waits, for as long as `within_s`; what is left then is lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(within_s)


class SpanMetrics(Collector):
    """`PREFIXtrace_spans_total` by outcome."""

    def __init__(self, prefix: str, counts: SpanCounts) -> None:
        self._name = f"{prefix}trace_spans"
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        metric = CounterMetricFamily(
            self._name,
            "Spans by outcome: exported, failed (the collector rejected them), dropped (the queue was full)",
            labels=["outcome"],
        )
        for outcome in ("exported", "failed", "dropped"):
            metric.add_metric([outcome], getattr(self._counts, outcome))
        yield metric


def parent_of(context: TraceContext | None) -> Context:
    """The parent that a span gets from another process; without one it begins a trace."""
    if context is None:
        return Context()
    span = SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(context.traceparent[53:], 16) & TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([context.tracestate]) if context.tracestate else TraceState(),
    )
    return set_span_in_context(NonRecordingSpan(span), Context())


def context_of(span: Span) -> TraceContext:
    """What another process needs to know to add spans below `span`."""
    context = span.get_span_context()
    state = context.trace_state.to_header()
    return TraceContext(
        traceparent=f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}",
        tracestate=state if len(state) <= MAX_TRACESTATE_CHARACTERS else "",
    )


def _resource(service: str, instance: str) -> Resource:
    """Of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, and of us where they are silent."""
    ours = {"service.name": service, "service.version": product_version(), "service.instance.id": instance}
    return Resource.create(ours).merge(OTELResourceDetector().detect())
