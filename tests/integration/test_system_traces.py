"""One trace per request, from the gateway to real workers and the KV between them, and log lines that name it."""

import asyncio
import json
import uuid
from typing import Any

import pytest

from tandem_testing.otlp_receiver import ReceivedSpan, children, only
from tandem_testing.system_client import SystemClient
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

PROMPT = " ".join(f"The river has {number} boats." for number in range(40))
CLOCK_NS = 5_000_000
"""Each process reads the wall clock for itself; on one machine they agree to well below this."""
TRIES = 20
ONE_ATTEMPT = ("queue", "route", "attempt")
PREFILL_SIDE = ("llm_request", "queue", "prefill", "kv_send")
DECODE_SIDE = ("llm_request", "queue", "kv_receive", "decode")


class Traced:
    """A request that is part of a client's sampled trace."""

    def __init__(self, fleet: SystemClient) -> None:
        self.fleet = fleet
        self.trace_id, self.span_id = uuid.uuid4().hex, uuid.uuid4().hex[:16]
        self.headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-01"}

    def body(self, **fields: object) -> dict[str, object]:
        return {"model": self.fleet.model, "prompt": f"{self.trace_id} {PROMPT}", "ignore_eos": True, **fields}


async def spans_of(collector, trace: Traced, *names: str) -> list[ReceivedSpan]:
    return await asyncio.to_thread(collector.wait_for, trace.trace_id, *names)


async def test_handed_over_request_is_one_tree_over_three_processes(fleet, collector):
    trace = Traced(fleet)
    answer = await fleet.http.post("/v1/completions", json=trace.body(max_tokens=12), headers=trace.headers)
    assert answer.status_code == 200
    spans = await spans_of(
        collector, trace, f"text_completion {fleet.model}", *ONE_ATTEMPT, *PREFILL_SIDE, *DECODE_SIDE
    )
    assert len(spans) == 12, "no span twice"
    root = only(spans, f"text_completion {fleet.model}")
    assert (root.service, root.parent_id) == ("tandem-gateway", trace.span_id)
    attempt = only(spans, "attempt")
    assert [span.name for span in children(spans, root)] == list(ONE_ATTEMPT)
    prefill, decode = sorted(children(spans, attempt), key=lambda span: span["tandem.handoff"], reverse=True)
    assert [span.name for span in children(spans, prefill)] == list(PREFILL_SIDE[1:])
    assert [span.name for span in children(spans, decode)] == list(DECODE_SIDE[1:])
    assert (prefill.service, prefill.instance) == ("tandem-worker", attempt["tandem.worker.prefill"])
    assert (decode.service, decode.instance) == ("tandem-worker", attempt["tandem.worker.decode"])
    for span in (prefill, decode):
        assert root.began - CLOCK_NS <= span.began <= span.ended
        assert span.began <= root.ended + CLOCK_NS
    sent, received = only(spans, "kv_send"), only(spans, "kv_receive")
    record = await fleet.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")
    (choice,) = record["choices"]
    assert sent["tandem.transfer.bytes"] == received["tandem.transfer.bytes"] == choice["transfer"]["bytes"] > 0
    assert received["tandem.transfer.duration_ms"] == pytest.approx(choice["transfer"]["wait_s"] * 1e3, abs=0.001)
    assert sent["tandem.transfer.exposed_ms"] == pytest.approx(choice["transfer"]["exposed_s"] * 1e3, abs=0.001)
    assert (decode["gen_ai.usage.output_tokens"], root["gen_ai.usage.output_tokens"]) == (12, 12)
    assert only(spans, "prefill")["gen_ai.usage.input_tokens"] == root["gen_ai.usage.input_tokens"] > 64
    assert record["trace_id"] == trace.trace_id


async def interrupted(fleet: SystemClient, trace: Traced) -> bool:
    """Whether an abort has ended an attempt while it decodes. The gateway resumes it after the tokens it has sent."""
    body = trace.body(max_tokens=400, stream=True)
    async with fleet.http.stream("POST", "/v1/completions", json=body, headers=trace.headers) as answer:
        request_id = answer.headers["x-request-id"]
        record: dict[str, Any] = {}

        async def decodes() -> bool:
            record.update(await fleet.get(f"/v1/requests/{request_id}/explain"))
            return record["choices"][0]["transfer"] is not None

        # The first token is of the prefill worker. An attempt that ends before its KV has come has no decode span.
        await until(decodes, 60.0, "the decode worker has the KV", lambda: record)
        decode_worker = record["choices"][0]["attempts"][0]["decode"].partition("@")[0]
        order = {"rid": f"{request_id}-0-0"}
        reported = await fleet.http.post(f"{fleet.system.workers[decode_worker]}/abort", json=order)
        assert reported.status_code == 200
        assert "data: [DONE]" in [line async for line in answer.aiter_lines()]
    return bool(reported.json()["requests"])


async def test_trace_of_resumed_request_has_both_attempts(fleet, collector):
    for _ in range(TRIES):
        trace = Traced(fleet)
        if await interrupted(fleet, trace):
            break
    else:
        raise AssertionError("every stream had ended before it was told to")
    whole = f"text_completion {fleet.model}"
    spans = await spans_of(collector, trace, whole, *("attempt",) * 2, *("llm_request",) * 4, *("decode",) * 2)
    root = only(spans, whole)
    first, second = (span for span in children(spans, root) if span.name == "attempt")
    assert (first.failed, second.failed, root.failed) == (True, False, False)
    assert second.links == ((first.span_id, {"tandem.link": "resumes"}),)
    assert second["tandem.resumed_tokens"] == first["gen_ai.usage.output_tokens"] > 0
    assert first["gen_ai.usage.output_tokens"] + second["gen_ai.usage.output_tokens"] == 400
    aborted = [span for span in children(spans, first) if span["tandem.handoff"] == "receive"]
    assert aborted[0]["gen_ai.response.finish_reasons"] == ["abort"]
    resumed = [span for span in children(spans, second) if span["tandem.handoff"] == "receive"]
    assert resumed[0]["tandem.resumed_tokens"] == second["tandem.resumed_tokens"]


async def test_unsampled_trace_sends_no_span_and_is_logged(fleet, collector):
    unsampled, trace = Traced(fleet), Traced(fleet)
    unsampled.headers["traceparent"] = unsampled.headers["traceparent"][:-2] + "00"
    for each in (unsampled, trace):
        answer = await fleet.http.post("/v1/completions", json=each.body(max_tokens=4), headers=each.headers)
        each.request_id = answer.headers["x-request-id"]
    await spans_of(collector, trace, *ONE_ATTEMPT, *PREFILL_SIDE, *DECODE_SIDE)
    assert collector.of(unsampled.trace_id) == []
    log = fleet.system.run_dir / "gateway.log"

    def finished() -> dict[str, dict]:
        lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
        return {line["request_id"]: line for line in lines if line["message"] == "request finished"}

    await until(lambda: {unsampled.request_id, trace.request_id} <= finished().keys(), 60.0, "both are in the log")
    for each in (unsampled, trace):
        assert finished()[each.request_id]["trace_id"] == each.trace_id
