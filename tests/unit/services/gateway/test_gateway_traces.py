"""The spans of a gateway, as a collector gets them by OTLP."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.outputs import CacheHits, Finish, FinishReason
from tandem_engine.messages.requests import HandoffSide
from tandem_services.common.span_export import SpanExport
from tandem_services.common.tracing import TracingConfig
from tandem_services.gateway.observe import spans as request_spans
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.otlp_receiver import OtlpReceiver, ReceivedSpan, children, only, otlp_receiver
from tandem_testing.tokenizer_builders import EOS

CLIENT_TRACE, CLIENT_SPAN = "c" * 32, "d" * 16
PARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture
def spans(collector) -> Iterator[SpanExport]:
    export = SpanExport(TracingConfig(endpoint=collector.url), service="tandem-gateway", instance="g1")
    yield export
    export.close()


def solo(rack, **behavior) -> None:
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS, **behavior))


async def received(collector: OtlpReceiver, spans: SpanExport) -> list[ReceivedSpan]:
    await asyncio.to_thread(spans.flush)
    return list(collector.spans)


def assert_within(inner: ReceivedSpan, outer: ReceivedSpan) -> None:
    assert outer.began <= inner.began <= inner.ended <= outer.ended


async def test_trace_tells_where_cached_tokens_were(rack, tokenizer, collector, spans):
    solo(rack, cached_tokens=40, cache_hits=CacheHits(host=16, fetched=8))
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        await gateway.complete([1, 2], max_tokens=1)
    root = only(await received(collector, spans), "text_completion mock")
    places = {name: root.attributes.get(f"tandem.cache.{name}_tokens") for name in ("host", "disk", "fetched")}
    assert (root["gen_ai.usage.cache_read.input_tokens"], places) == (40, {"host": 16, "disk": None, "fetched": 8})


async def test_plain_request_is_one_tree(rack, tokenizer, collector, spans):
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        answer = await gateway.chat("tell nobody", max_tokens=5, temperature=0.5, ignore_eos=True)
        request_id = answer.headers["x-request-id"]
    got = await received(collector, spans)
    root = only(got, "chat mock")
    assert [span.name for span in children(got, root)] == ["queue", "route", "attempt"]
    assert len(got) == 4, "no span twice"
    assert {span.trace_id for span in got} == {root.trace_id}
    assert (root.kind, root.parent_id, root.failed, root.service, root.instance) == (
        "SERVER",
        "",
        False,
        "tandem-gateway",
        "g1",
    )
    for span in children(got, root):
        assert_within(span, root)
    assert root["gen_ai.operation.name"] == "chat"
    assert root["gen_ai.request.model"] == root["gen_ai.response.model"] == "mock"
    assert root["gen_ai.request.id"] == request_id
    assert (root["gen_ai.request.max_tokens"], root["gen_ai.request.temperature"]) == (5, 0.5)
    assert root["gen_ai.usage.output_tokens"] == 5
    assert root["gen_ai.usage.input_tokens"] > 0
    assert root["gen_ai.response.finish_reasons"] == ["length"]
    assert root["gen_ai.latency.time_to_first_token"] <= root["gen_ai.latency.e2e"]
    assert (root["http.response.status_code"], root["http.route"]) == (200, "/v1/chat/completions")
    route = only(got, "route")
    assert route["tandem.route.policy"] == "prefill=locality,decode=locality"
    assert (route["tandem.route.source"], route["tandem.route.reason"]) == ("local", "prefix")
    assert route["tandem.route.matched_tokens"] == 4
    assert route["tandem.route.terms"] == ["queue=0.001000", "prefill=0.002000"]
    assert route["tandem.route.predicted_seconds"] == 0.003
    attempt = only(got, "attempt")
    assert (attempt.kind, attempt["tandem.attempt.outcome"]) == ("CLIENT", "finished")
    assert attempt["tandem.worker.decode"] == "solo@1"
    assert attempt.began <= attempt.events["first_token"] <= attempt.ended
    assert (attempt["gen_ai.usage.output_tokens"], attempt.links) == (5, ())


async def test_client_trace_context_is_continued_to_the_engine(rack, tokenizer, collector, spans):
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        gateway.http.headers.update({"traceparent": PARENT, "tracestate": "vendor=a:1,other=b"})
        answer = await gateway.complete(max_tokens=2)
        explained = await gateway.http.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")
    got = await received(collector, spans)
    root, attempt = only(got, "text_completion mock"), only(got, "attempt")
    assert (root.trace_id, root.parent_id, root.state) == (CLIENT_TRACE, CLIENT_SPAN, "vendor=a:1,other=b")
    (request,) = rack.engines[0].received
    assert request.trace.traceparent == f"00-{CLIENT_TRACE}-{attempt.span_id}-01"
    assert request.trace.tracestate == "vendor=a:1,other=b"
    assert explained.json()["trace_id"] == CLIENT_TRACE


async def test_both_workers_of_a_handoff_get_the_attempt_span(rack, tokenizer, collector, spans):
    rack.add("p", MockBehavior(token=hash_tokens(3, 250)), Role.PREFILL)
    rack.add("d", MockBehavior(token=hash_tokens(3, 250)), Role.DECODE)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        await gateway.complete(max_tokens=4, ignore_eos=True)
    got = await received(collector, spans)
    attempt = only(got, "attempt")
    assert (attempt["tandem.worker.prefill"], attempt["tandem.worker.decode"]) == ("p@1", "d@1")
    sides = {engine.received[0].handoff.side: engine.received[0].trace for engine in rack.engines}
    assert sides[HandoffSide.SEND] == sides[HandoffSide.RECEIVE]
    assert sides[HandoffSide.SEND].span_id == attempt.span_id


async def test_resumed_request_is_two_attempts_and_a_link(rack, tokenizer, collector, spans):
    fault = Finish(reason=FinishReason.ERROR, error="step raised", code="engine_error", retryable=True)
    rack.add("first", MockBehavior(token=hash_tokens(3, 250), fail_after=(3, fault), tokens_per_output=1))
    rack.add("second", MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        answer = await gateway.complete(max_tokens=8, ignore_eos=True)
        assert answer.status_code == 200
    got = await received(collector, spans)
    root = only(got, "text_completion mock")
    lost, resumed = (span for span in children(got, root) if span.name == "attempt")
    assert (lost["tandem.attempt.outcome"], lost["error.type"], lost.failed) == ("worker_error", "worker_error", True)
    assert (resumed["tandem.attempt.outcome"], resumed.failed) == ("finished", False)
    assert resumed["tandem.resumed_tokens"] == lost["gen_ai.usage.output_tokens"] == 3
    assert resumed.links == ((lost.span_id, {"tandem.link": "resumes"}),)
    names = [span.name for span in got]
    assert (names.count("route"), names.count("queue"), len(names)) == (2, 1, 6)
    assert (root.failed, root["gen_ai.usage.output_tokens"]) == (False, 8)


async def test_move_is_linked_as_one(rack, tokenizer, collector, spans):
    rack.add("left", MockBehavior(token=hash_tokens(3, 250), leave_after=2, step_s=0.02), Role.DECODE)
    rack.add("taker", MockBehavior(token=hash_tokens(3, 250)), Role.DECODE)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        await gateway.complete(max_tokens=300, ignore_eos=True)
    got = await received(collector, spans)
    left, taken = sorted((span for span in got if span.name == "attempt"), key=lambda span: span.began)
    assert (left["tandem.attempt.outcome"], left.failed) == ("moved", False)
    assert taken.links == ((left.span_id, {"tandem.link": "moves"}),)


async def test_retry_before_any_token_is_linked_as_one(rack, tokenizer, collector, spans):
    full = Finish(reason=FinishReason.ERROR, error="full", code="queue_full", retryable=True)
    rack.add("first", MockBehavior(token=hash_tokens(3, 250), refuse=full))
    rack.add("second", MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        await gateway.complete(max_tokens=2, ignore_eos=True)
    attempts = [span for span in await received(collector, spans) if span.name == "attempt"]
    refused, retried = sorted(attempts, key=lambda span: span.began)
    assert (refused["tandem.attempt.outcome"], refused.failed) == ("overloaded", True)
    assert retried.links == ((refused.span_id, {"tandem.link": "retries"}),)


async def test_each_choice_has_own_attempt_queue_and_route_spans(rack, tokenizer, collector, spans):
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        await gateway.complete(max_tokens=2, n=3, ignore_eos=True)
    got = await received(collector, spans)
    names = [span.name for span in got]
    assert (names.count("attempt"), names.count("queue"), names.count("route")) == (3, 3, 3)
    assert sorted(span["tandem.choice"] for span in got if span.name == "attempt") == [0, 1, 2]
    assert only(got, "text_completion mock")["gen_ai.request.choice.count"] == 3


async def test_spans_of_one_request_are_bounded(rack, tokenizer, collector, spans, monkeypatch):
    monkeypatch.setattr(request_spans, "MAX_TRACED_CHOICES", 2)
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        answer = await gateway.http.post("/v1/embeddings", json={"model": "mock", "input": ["a", "b", "c", "d"]})
        assert answer.status_code == 200
    got = await received(collector, spans)
    root = only(got, "embeddings mock")
    assert [span.name for span in got].count("attempt") == 2
    assert root["tandem.choices_without_spans"] == 2
    contexts = [request.trace for request in rack.engines[0].received]
    assert {context.trace_id for context in contexts} == {root.trace_id}
    assert sorted(context.sampled for context in contexts) == [False, False, True, True]


async def test_unsampled_trace_is_passed_on_and_sends_no_span(rack, tokenizer, collector):
    solo(rack)
    none = SpanExport(TracingConfig(endpoint=collector.url, sample_ratio=0.0), service="g", instance="g1")
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=none) as gateway:
        await gateway.complete(max_tokens=2)
        await gateway.http.post(
            "/v1/completions", json={"model": "mock", "prompt": "hi"}, headers={"traceparent": PARENT[:-2] + "00"}
        )
        wanted = {"traceparent": PARENT}
        await gateway.http.post("/v1/completions", json={"model": "mock", "prompt": "hi"}, headers=wanted)
    ours, unwanted, theirs = (request.trace for request in rack.engines[0].received)
    assert (ours.sampled, unwanted.sampled, theirs.sampled) == (False, False, True)
    assert unwanted.trace_id == theirs.trace_id == CLIENT_TRACE
    got = await received(collector, none)
    assert {span.trace_id for span in got} == {CLIENT_TRACE}
    assert [span.name for span in got].count("text_completion mock") == 1, "a client's own trace is sampled as it says"
    none.close()


HOSTILE = [
    "",
    "garbage",
    PARENT.upper(),
    f"00-{'0' * 32}-{CLIENT_SPAN}-01",
    f"00-{CLIENT_TRACE}-{'0' * 16}-01",
    f"ff-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
    f"{PARENT}-more",
    PARENT + "0" * 6000,
    PARENT.replace("c", "\N{FULLWIDTH LATIN SMALL LETTER C}").encode(),
    f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01, {PARENT}",
]


async def test_hostile_traceparent_begins_a_trace_of_its_own(rack, tokenizer, collector, spans):
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        for value in HOSTILE:
            headers = [("traceparent", value), ("tracestate", "a=b")]
            answer = await gateway.http.post("/v1/completions", json={"model": "mock", "prompt": "hi"}, headers=headers)
            assert answer.status_code == 200, value
        twice = [("traceparent", PARENT), ("traceparent", PARENT)]
        await gateway.http.post("/v1/completions", json={"model": "mock", "prompt": "hi"}, headers=twice)
    roots = [span for span in await received(collector, spans) if span.name == "text_completion mock"]
    assert len(roots) == len(HOSTILE) + 1
    assert not [root for root in roots if root.trace_id == CLIENT_TRACE or root.parent_id or root.state]
    assert len({root.trace_id for root in roots}) == len(roots)


async def test_each_generating_endpoint_has_root_span_with_operation(rack, tokenizer, collector, spans):
    solo(rack)
    messages = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": messages, "max_tokens": 4},
        "/v1/completions": {"prompt": "hi"},
        "/v1/embeddings": {"input": "hi"},
    }
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        for path, body in bodies.items():
            assert (await gateway.http.post(path, json={"model": "mock", **body})).status_code == 200, path
    roots = {span["http.route"]: span for span in await received(collector, spans) if span.kind == "SERVER"}
    operations = {path: root["gen_ai.operation.name"] for path, root in roots.items()}
    assert operations == request_spans.OPERATIONS
    assert [roots[path].name for path in bodies] == [f"{operations[path]} mock" for path in bodies]


async def test_requests_that_are_refused_are_spans_without_attempts(rack, tokenizer, collector, spans):
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        assert (await gateway.complete(max_tokens=-1)).status_code == 400
    (root,) = await received(collector, spans)
    assert (root.name, root["http.response.status_code"], root["error.type"], root.failed) == (
        "POST /v1/completions",
        400,
        "400",
        False,
    )


async def test_answer_that_fails_marks_its_span(rack, tokenizer, collector, spans):
    async with live_gateway(rack.context, tokenizer, [], spans=spans, queue_s=0.05) as gateway:
        assert (await gateway.complete()).status_code == 503
    (root,) = await received(collector, spans)
    assert (root["http.response.status_code"], root["error.type"], root.failed) == (503, "503", True)


async def test_probes_models_and_metrics_are_not_traced(rack, tokenizer, collector, spans):
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        for path in ("/live", "/ready", "/metrics", "/v1/models", "/nowhere"):
            await gateway.http.get(path, headers={"traceparent": PARENT})
    assert await received(collector, spans) == []


async def test_no_text_of_a_request_is_in_its_spans(rack, tokenizer, collector, spans):
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        answer = await gateway.chat("zanzibar", user="quagga", max_tokens=8, stop=["xylophone"])
        text = answer.json()["choices"][0]["message"]["content"]
    output = str(await received(collector, spans))
    assert text
    assert not [word for word in ("zanzibar", "quagga", "xylophone", text) if word in output]


async def test_hanging_collector_drops_and_counts_spans(rack, tokenizer, collector):
    solo(rack)
    collector.hold = threading.Event()
    few = SpanExport(TracingConfig(endpoint=collector.url, max_waiting_spans=4), service="g", instance="g1")
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=few) as gateway:
        for _ in range(5):
            assert (await gateway.complete(max_tokens=2)).status_code == 200
        metrics = (await gateway.http.get("/metrics")).text
    # Four are with the collector, four wait.
    assert few.counts.dropped >= 20 - 8
    shown = re.search(r'tandem_gateway_trace_spans_total\{outcome="dropped"\} (\d+)', metrics)
    assert int(shown[1]) > 0
    few.close(within_s=0.0)


async def test_collector_that_refuses_costs_no_request_and_is_counted(rack, tokenizer, collector, spans):
    solo(rack)
    collector.status = 400
    async with live_gateway(rack.context, tokenizer, rack.engines, spans=spans) as gateway:
        assert (await gateway.complete(max_tokens=2)).status_code == 200
    assert await received(collector, spans) == []
    assert (spans.counts.failed, spans.counts.exported, spans.counts.dropped) == (4, 0, 0)


async def test_without_tracing_a_clients_trace_is_handed_on_as_it_came(rack, tokenizer):
    solo(rack)
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        await gateway.complete(max_tokens=2)
        gateway.http.headers.update({"traceparent": PARENT, "tracestate": "vendor=a"})
        answer = await gateway.complete(max_tokens=2)
        explained = await gateway.http.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")
        assert "trace_spans" not in (await gateway.http.get("/metrics")).text
    silent, reported = (request.trace for request in rack.engines[0].received)
    assert silent is None
    assert (reported.traceparent, reported.tracestate) == (PARENT, "vendor=a")
    assert explained.json()["trace_id"] == CLIENT_TRACE


def test_no_tracing_imports_if_tracing_is_disabled():
    program = (
        "import sys, tandem_services.gateway.serve, tandem_services.worker.main, tandem_services.cli.main\n"
        # FastAPI imports OpenTelemetry's interfaces by itself, and the Redis client its metrics.
        "parts = ('opentelemetry.sdk.trace', 'opentelemetry.exporter', 'google.protobuf', "
        "'tandem_services.common.span_export', 'tandem_services.gateway.observe.spans')\n"
        "ours = {name for name in sys.modules if name.startswith(parts)}\n"
        "sys.exit(f'imported: {ours}' if ours else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
