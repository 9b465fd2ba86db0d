"""OpenTelemetry spans of one request in the gateway, with explicit times. Imported only if tracing is enabled.

    chat MODEL            the HTTP request, from its arrival to the last byte          SERVER
      queue               of a choice, until the router query that placed it
      route               the decision; its reasons are attributes
      attempt             on its workers; linked to the previous attempt, if any       CLIENT
        llm_request       … the spans of the workers (`worker.engine_spans`)

The wall clock is read once per request and places all spans; durations use the monotonic clock, so a change of the wall
clock does not distort them. Spans contain no text of the client or the model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from tandem_engine.base.clock import Clock
from tandem_engine.messages.requests import TraceContext
from tandem_services.common import span_names as names
from tandem_services.common.recording import estimating, recording
from tandem_services.common.span_export import context_of, parent_of
from tandem_services.common.span_names import hit_attributes
from tandem_services.gateway.observe.explain import AttemptRecord, RequestRecord
from tandem_services.gateway.observe.metrics import route_reason
from tandem_services.gateway.observe.tracing import (
    UNTRACED,
    AttemptStart,
    AttemptTrace,
    PassedOn,
    RequestTrace,
    client_context,
    pass_on,
)

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""What is traced, and its name in the conventions for generative AI."""

MAX_TRACED_CHOICES = 32
"""Of one request; the attempts of further ones have no spans. An embedding request may have thousands of inputs."""

MOVED = "moved"
GOOD_OUTCOMES = frozenset({"finished", "stopped", MOVED, "refused"})
CLIENT_ERROR = 400

SERVER_ERROR = 500
"""From here on it is a failure of ours (OpenTelemetry's conventions for HTTP servers)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayTraces:
    """The `Traces` of a gateway that makes spans."""

    tracer: Tracer
    clock: Clock
    policies_of: Callable[[str], str]
    """Those of the router of a model."""
    unix_ns: Callable[[], int] = time.time_ns

    @estimating(lambda _, *request: pass_on(*request))
    def __call__(self, scope: Scope, request_id: str, arrived: float) -> RequestTrace:
        given, path = client_context(scope["headers"]), scope["path"]
        operation = OPERATIONS.get(path)
        if operation is None:
            return PassedOn(given)
        zero_ns = self.unix_ns() - round(self.clock.now() * 1e9)
        span = self.tracer.start_span(
            f"{scope['method']} {path}",
            context=parent_of(given),
            kind=SpanKind.SERVER,
            attributes={
                names.HTTP_METHOD: scope["method"],
                names.HTTP_ROUTE: path,
                names.OPERATION: operation,
                names.PROVIDER_NAME: names.PROVIDER,
                names.REQUEST_ID: request_id,
            },
            start_time=zero_ns + round(arrived * 1e9),
        )
        if not span.is_recording():
            return PassedOn(context_of(span))
        return RequestSpans(self, span, operation, zero_ns)


@dataclass(slots=True)
class _LastAttempt:
    """The attempt before the one under way."""

    span: Span
    note: AttemptRecord


class RequestSpans:
    """A `RequestTrace`."""

    def __init__(self, traces: GatewayTraces, span: Span, operation: str, zero_ns: int) -> None:
        self._traces = traces
        self._span = span
        self._operation = operation
        self._zero_ns = zero_ns
        self._below = set_span_in_context(span, Context())
        self._last: dict[int, _LastAttempt] = {}
        """By choice."""
        self._untraced: set[int] = set()

    @property
    @estimating(lambda _: None)
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @estimating(lambda *_: UNTRACED)
    def attempt(self, start: AttemptStart) -> AttemptTrace:
        if start.index >= MAX_TRACED_CHOICES:
            self._untraced.add(start.index)
            return PassedOn(_unsampled(self._span))
        if not self._last:
            self._span.set_attributes(_sampling(start))
        now = self._traces.clock.now()
        decided_at = now - start.decided_s
        asked_itself = start.decision.request_id == start.attempt_id
        if start.number == 0:
            self._add(names.QUEUE, start.requested_at, decided_at if asked_itself else now, {names.CHOICE: start.index})
        if asked_itself:
            # Choices of one prompt share a decision: it is one span, of the choice that made the query.
            self._add(names.ROUTE, max(decided_at, start.requested_at), now, self._decision(start))
        span = self._begin_attempt(start, now)
        self._last[start.index] = _LastAttempt(span, start.note)
        return AttemptSpan(span, start.note, self)

    @recording
    def finished(self, record: RequestRecord) -> None:
        self._span.update_name(f"{self._operation} {record.model}")
        self._span.set_attributes(_described(record))
        if self._untraced:
            self._span.set_attribute(names.UNTRACED_CHOICES, len(self._untraced))
        if record.error is not None and record.status is not None:
            # A stream that failed was answered with 200 before.
            self._note_error(record.status)

    @recording
    def answered(self, status: int) -> None:
        self._span.set_attribute(names.HTTP_STATUS, status)
        self._note_error(status)
        self._span.end(self.now_ns())

    def now_ns(self) -> int:
        """Unix nanoseconds, by this request's reading of the wall clock."""
        return self._moment(self._traces.clock.now())

    def _note_error(self, status: int) -> None:
        if status >= CLIENT_ERROR:
            self._span.set_attribute(names.ERROR_TYPE, str(status))
        if status >= SERVER_ERROR:
            self._span.set_status(Status(StatusCode.ERROR))

    def _moment(self, at: float) -> int:
        return self._zero_ns + round(at * 1e9)

    def _add(self, name: str, began: float, ended: float, attributes: dict[str, AttributeValue]) -> None:
        self._traces.tracer.start_span(
            name, context=self._below, attributes=attributes, start_time=self._moment(began)
        ).end(self._moment(max(began, ended)))

    def _begin_attempt(self, start: AttemptStart, now: float) -> Span:
        last = self._last.get(start.index)
        attributes: dict[str, AttributeValue] = {
            names.CHOICE: start.index,
            names.ATTEMPT_ID: start.attempt_id,
            names.ATTEMPT_NUMBER: start.number,
            names.DECODE_WORKER: start.note.decode,
        }
        if start.note.prefill is not None:
            attributes[names.PREFILL_WORKER] = start.note.prefill
        if start.note.resumed_tokens:
            attributes[names.RESUMED_TOKENS] = start.note.resumed_tokens
        return self._traces.tracer.start_span(
            names.ATTEMPT,
            context=self._below,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            links=() if last is None else (_link(last, start.note),),
            start_time=self._moment(now),
        )

    def _decision(self, start: AttemptStart) -> dict[str, AttributeValue]:
        note = start.note
        return {
            names.CHOICE: start.index,
            names.POLICY: self._traces.policies_of(start.model),
            names.SOURCE: note.source,
            names.REASON: route_reason(note),
            names.PLACEMENT: note.placement,
            names.MATCHED_TOKENS: note.matched_tokens,
            names.PREDICTED: round(sum(term.seconds for term in note.terms), 6),
            names.TERMS: [f"{term.name}={term.seconds:.6f}" for term in note.terms],
        }


@dataclass(slots=True)
class AttemptSpan:
    """An `AttemptTrace`."""

    span: Span
    note: AttemptRecord
    request: RequestSpans
    context: TraceContext = field(init=False)
    _tokens: int = 0

    def __post_init__(self) -> None:
        self.context = context_of(self.span)

    @recording
    def received(self, tokens: int) -> None:
        if not self._tokens and tokens:
            self.span.add_event(names.FIRST_TOKEN, timestamp=self.request.now_ns())
        self._tokens += tokens

    @recording
    def ended(self) -> None:
        self.span.set_attributes({names.OUTCOME: self.note.outcome, names.OUTPUT_TOKENS: self._tokens})
        if self.note.outcome not in GOOD_OUTCOMES:
            self.span.set_attribute(names.ERROR_TYPE, self.note.outcome)
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.end(self.request.now_ns())


def _link(last: _LastAttempt, note: AttemptRecord) -> Link:
    """Why there is another attempt."""
    again = "resumes" if note.resumed_tokens else "retries"
    reason = "moves" if last.note.outcome == MOVED else again
    return Link(last.span.get_span_context(), {names.LINK: reason})


def _unsampled(span: Span) -> TraceContext:
    """The same trace, in which engines shall add nothing."""
    context = context_of(span)
    return TraceContext(traceparent=f"{context.traceparent[:-2]}00", tracestate=context.tracestate)


def _sampling(start: AttemptStart) -> dict[str, AttributeValue]:
    sampling = start.sampling
    return {
        names.MAX_TOKENS: sampling.max_tokens,
        names.TEMPERATURE: sampling.temperature,
        names.TOP_P: sampling.top_p,
    }


def _described(record: RequestRecord) -> dict[str, AttributeValue]:
    first = record.choices[0] if record.choices else None
    known: dict[str, AttributeValue | None] = {
        names.REQUEST_MODEL: record.model,
        names.RESPONSE_MODEL: record.model,
        names.CHOICE_COUNT: record.n if record.n != 1 else None,
        names.STREAM: record.stream,
        names.TENANT: record.tenant or None,
        names.INPUT_TOKENS: record.prompt_tokens,
        names.CACHED_TOKENS: record.cached_tokens,
        **hit_attributes(record.cache_hits),
        names.OUTPUT_TOKENS: record.output_tokens,
        names.REASONING_TOKENS: record.reasoning_tokens or None,
        names.FINISH_REASONS: [choice.finish_reason for choice in record.choices if choice.finish_reason is not None],
        names.TIME_IN_QUEUE: None if first is None else first.admission_s,
        names.TIME_TO_FIRST_TOKEN: None if first is None else first.ttft_s,
        names.E2E: record.e2e_s,
    }
    return {name: value for name, value in known.items() if value is not None}
