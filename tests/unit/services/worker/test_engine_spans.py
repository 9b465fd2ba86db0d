"""Spans of an engine's reports, as a collector gets them by OTLP."""

from collections.abc import Iterator

import msgspec
import pytest

from tandem_engine.messages.outputs import CacheHits, FetchReport, FinishReason, TransferReport
from tandem_engine.messages.requests import HandoffSide, TraceContext
from tandem_engine.messages.stats import EndedRequest, EndedRequests
from tandem_services.common.metrics import new_registry, render
from tandem_services.common.tracing import TracingConfig
from tandem_services.worker.tracing import WorkerTraces
from tandem_testing.otlp_receiver import OtlpReceiver, ReceivedSpan, children, only, otlp_receiver

TRACE, ATTEMPT = "a" * 32, "b" * 16
MS = 1_000_000
START = 1_700_000_000_000 * MS
MOVED = TransferReport(pages=3, bytes=3 << 14, pages_reused=1, wait_s=0.004, exposed_s=0.001)

ALONE = EndedRequest(
    rid="r-0-0",
    context=TraceContext(traceparent=f"00-{TRACE}-{ATTEMPT}-01", tracestate="vendor=a"),
    arrived_ns=START,
    scheduled_ns=START + 5 * MS,
    first_token_ns=START + 25 * MS,
    ended_ns=START + 125 * MS,
    prompt_tokens=40,
    cached_tokens=16,
    output_tokens=6,
    max_tokens=8,
    temperature=0.5,
    top_p=0.9,
    finish=FinishReason.STOP,
)
SENT = msgspec.structs.replace(
    ALONE,
    side=HandoffSide.SEND,
    ended_ns=START + 32 * MS,
    transfer=MOVED,
    transferred_ns=START + 30 * MS,
    output_tokens=1,
    finish=None,
)
RECEIVED = msgspec.structs.replace(
    ALONE, side=HandoffSide.RECEIVE, scheduled_ns=None, transfer=MOVED, transferred_ns=START + 30 * MS
)


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


def spans_of(collector: OtlpReceiver, *ended: EndedRequest, lost: int = 0) -> list[ReceivedSpan]:
    traces = WorkerTraces(TracingConfig(endpoint=collector.url))
    traces.open(incarnation="w1@7", model="mini")
    traces.record(EndedRequests(requests=ended, lost=lost))
    traces.close(within_s=30.0)
    return collector.spans


def in_ms(span: ReceivedSpan) -> tuple[float, float]:
    return (span.began - START) / MS, (span.ended - START) / MS


def test_request_that_one_worker_serves(collector):
    spans = spans_of(collector, ALONE)
    request = only(spans, "llm_request")
    assert (request.trace_id, request.parent_id, request.state) == (TRACE, ATTEMPT, "vendor=a")
    assert (request.kind, request.service, request.instance) == ("SERVER", "tandem-worker", "w1@7")
    assert {span.name: in_ms(span) for span in children(spans, request)} == {
        "queue": (0, 5),
        "prefill": (5, 25),
        "decode": (25, 125),
    }
    assert (in_ms(request), len(spans)) == ((0, 125), 4)
    assert request.events == {"first_token": START + 25 * MS}
    assert request["gen_ai.request.id"] == "r-0-0"
    assert request["gen_ai.latency.time_in_queue"] == 0.005
    assert request["gen_ai.latency.time_to_first_token"] == 0.025
    assert request["gen_ai.latency.time_in_model_prefill"] == 0.02
    assert request["gen_ai.latency.time_in_model_decode"] == 0.1
    assert request["gen_ai.latency.e2e"] == 0.125
    assert (request["gen_ai.usage.input_tokens"], request["gen_ai.usage.cache_read.input_tokens"]) == (40, 16)
    assert request["gen_ai.response.finish_reasons"] == ["stop"]
    assert (request["gen_ai.request.temperature"], request["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert only(spans, "decode")["gen_ai.usage.output_tokens"] == 5


def test_both_ends_of_a_handoff_have_spans_that_name_their_side(collector):
    spans = spans_of(collector, SENT, RECEIVED)
    sender, receiver = (span for span in spans if span.name == "llm_request")
    assert (sender["tandem.handoff"], receiver["tandem.handoff"]) == ("send", "receive")
    assert "gen_ai.latency.time_in_model_decode" not in sender.attributes
    assert receiver["gen_ai.latency.time_in_model_decode"] > 0
    assert [(span.name, in_ms(span)) for span in children(spans, sender)] == [
        ("queue", (0, 5)),
        ("prefill", (5, 25)),
        ("kv_send", (26, 30)),
    ]
    assert [(span.name, in_ms(span)) for span in children(spans, receiver)] == [
        ("queue", (0, 26)),
        ("kv_receive", (26, 30)),
        ("decode", (30, 125)),
    ]
    for name in ("kv_send", "kv_receive"):
        moved = only(spans, name)
        assert (moved["tandem.transfer.bytes"], moved["tandem.transfer.pages"]) == (3 << 14, 3)
        assert (moved["tandem.transfer.duration_ms"], moved["tandem.transfer.exposed_ms"]) == (4.0, 1.0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"first_token_ns": None, "finish": FinishReason.ABORT, "output_tokens": 0}, ["queue", "prefill"]),
        ({"scheduled_ns": None, "first_token_ns": None, "output_tokens": 0}, ["queue"]),
        ({"output_tokens": 1}, ["queue", "prefill"]),
        ({"side": HandoffSide.SEND}, ["queue", "prefill", "decode"]),
        ({"side": HandoffSide.RECEIVE, "scheduled_ns": None, "first_token_ns": None}, ["queue"]),
    ],
    ids=["aborted", "never scheduled", "one token", "handed to nobody", "never transferred"],
)
def test_phase_not_reached_has_no_span(collector, change, names):
    spans = spans_of(collector, msgspec.structs.replace(ALONE, **change))
    request = only(spans, "llm_request")
    assert [span.name for span in children(spans, request)] == names
    assert children(spans, request)[-1].ended <= request.ended


def test_spans_have_cached_tokens_by_tier(collector):
    spans = spans_of(collector, msgspec.structs.replace(ALONE, cache_hits=CacheHits(host=8, disk=4)))
    for name in ("llm_request", "prefill"):
        span = only(spans, name)
        assert (span["tandem.cache.host_tokens"], span["tandem.cache.disk_tokens"]) == (8, 4)
        assert "tandem.cache.fetched_tokens" not in span.attributes


def test_failed_request_span_has_error_retractions_and_fetch(collector):
    fetch = FetchReport(peer="w2@5", pages=4, bytes=64, wait_s=0.002)
    failed = msgspec.structs.replace(
        ALONE, finish=FinishReason.ERROR, error="engine_error", retractions=2, resumed_tokens=7, fetch=fetch
    )
    spans = spans_of(collector, failed)
    request = only(spans, "llm_request")
    assert (request.failed, request["error.type"]) == (True, "engine_error")
    assert (request["tandem.retractions"], request["tandem.resumed_tokens"]) == (2, 7)
    queue = only(spans, "queue")
    assert (queue["tandem.fetch.peer"], queue["tandem.fetch.pages"], queue["tandem.fetch.duration_ms"]) == (
        "w2@5",
        4,
        2.0,
    )


async def test_exported_and_lost_spans_are_counted(collector):
    traces = WorkerTraces(TracingConfig(endpoint=collector.url))
    registry = new_registry()
    registry.register(traces)
    assert b"trace" not in await render(registry), "it is not open"
    traces.record(EndedRequests(requests=(ALONE,), lost=0))
    traces.open(incarnation="w1@7", model="mini")
    traces.record(EndedRequests(requests=(ALONE,), lost=3))
    traces.close(within_s=30.0)
    text = (await render(registry)).decode()
    assert 'tandem_worker_trace_spans_total{outcome="exported"} 4.0' in text
    assert "tandem_worker_trace_requests_unreported_total 3.0" in text
