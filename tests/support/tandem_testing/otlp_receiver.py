"""A collector: takes OTLP over HTTP on a free port and decodes what it gets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    """One span, ids in hexadecimal, times in Unix nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: dict[str, int]
    links: tuple[tuple[str, dict[str, Any]], ...]
    failed: bool
    service: str
    state: str
    instance: str

    def __getitem__(self, attribute: str) -> Any:
        return self.attributes[attribute]


@dataclass
class OtlpReceiver:
    """`spans` may be read from any thread."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    requests: int = 0
    status: int = 200
    """Answered to every batch."""
    hold: threading.Event | None = None
    """Batches are answered once it is set."""

    def __post_init__(self) -> None:
        self.changed = threading.Condition()

    def wait_for(self, trace_id: str, *names: str) -> list[ReceivedSpan]:
        """All spans of a trace, once there is one for each of `names`."""

        def there() -> bool:
            have = [span.name for span in self.of(trace_id)]
            return all(have.count(name) >= names.count(name) for name in names)

        with self.changed:
            assert self.changed.wait_for(there, WAIT_S), f"got {[s.name for s in self.of(trace_id)]}, wanted {names}"
            return self.of(trace_id)

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        """What has come of a trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, path: str, body: bytes) -> int:
        assert path == "/v1/traces", path
        decoded = list(_spans(ExportTraceServiceRequest.FromString(body)))
        with self.changed:
            self.requests += 1
            if self.status == 200:
                self.spans += decoded
            self.changed.notify_all()
        if self.hold is not None:
            self.hold.wait(WAIT_S)
        return self.status


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Serve until the block ends."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(receiver.take(self.path, body))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="collector")
    thread.start()
    try:
        yield receiver
    finally:
        if receiver.hold is not None:
            receiver.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


def children(spans: list[ReceivedSpan], parent: ReceivedSpan) -> list[ReceivedSpan]:
    """In order of their beginning."""
    below = [span for span in spans if span.parent_id == parent.span_id and span.trace_id == parent.trace_id]
    return sorted(below, key=lambda span: span.began)


def only(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (span,) = [span for span in spans if span.name == name]
    return span


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        about = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    events={event.name: event.time_unix_nano for event in span.events},
                    links=tuple((link.span_id.hex(), _attributes(link.attributes)) for link in span.links),
                    failed=span.status.code == 2,
                    service=about["service.name"],
                    state=span.trace_state,
                    instance=about["service.instance.id"],
                )


def _attributes(pairs: "list[KeyValue]") -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
