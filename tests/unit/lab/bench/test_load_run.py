"""The load generator against a server in this process: what it measures, checks and refuses to overlook."""

import asyncio
import json
import re
from dataclasses import replace

import httpx
import pytest

from tandem_lab.bench.load import (
    Measurement,
    RequestSpec,
    Slo,
    Target,
    at_arrival_times,
    at_concurrency,
    is_good,
    objectives_of,
    percentiles,
    reference_texts,
    summarize,
)
from tandem_lab.bench.promises import Ratios, Retries
from tandem_services.common.errors import RemoteError


def event(body: dict | str) -> str:
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n"


def chunk(text: str, finish: str | None = None, **extra) -> dict:
    return {"id": "cmpl-1", "choices": [{"text": text, "index": 0, "finish_reason": finish}], **extra}


def usage(tokens: int) -> dict:
    return {
        "id": "cmpl-1",
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 2}},
    }


SOUND = [chunk("a"), chunk("b", "length"), usage(2), "[DONE]"]


def target(answer) -> Target:
    """`answer(request) -> list of events or an httpx.Response`."""

    def handle(request: httpx.Request) -> httpx.Response:
        found = answer(request)
        if isinstance(found, httpx.Response):
            return found
        return httpx.Response(200, text="".join(event(body) for body in found))

    client = httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://test")
    return Target(client=client, model="m", temperature=0.0, seed=None, ignore_eos=True)


SPEC = RequestSpec(prompt="p", max_tokens=2)


async def test_sound_stream_is_measured() -> None:
    measurement = await target(lambda _: SOUND).send(SPEC)
    assert measurement.ok
    assert measurement.text == "ab"
    assert (measurement.prompt_tokens, measurement.cached_tokens, measurement.output_tokens) == (3, 2, 2)
    assert len(measurement.gaps) == 1
    assert measurement.began <= measurement.first <= measurement.ended


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (SOUND[:-1], r"without \[DONE\]"),
        ([SOUND[0], usage(2), "[DONE]"], "0 finish reasons"),
        ([SOUND[1], SOUND[1], usage(2), "[DONE]"], "2 finish reasons"),
        ([*SOUND[:2], "[DONE]"], "no usage"),
        ([{**chunk("a"), "id": "other"}, *SOUND[1:]], "2 response ids"),
        ([*SOUND, chunk("late")], r"after \[DONE\]"),
        ([chunk("a"), {"error": {"message": "worker lost"}}, "[DONE]"], "worker lost"),
        ([*SOUND[:2], usage(3), "[DONE]"], "more tokens than max_tokens"),
        ([*SOUND[:2], usage(1), "[DONE]"], "before max_tokens"),
    ],
)
async def test_malformed_stream_is_a_failure(events, fault) -> None:
    measurement = await target(lambda _: events).send(SPEC)
    assert not measurement.ok
    assert re.search(fault, measurement.error)


async def test_http_error_and_a_dead_server_are_failures() -> None:
    refused = await target(lambda _: httpx.Response(503, text="busy")).send(SPEC)
    assert refused.error == "HTTP 503: busy"

    def die(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    assert "ConnectError" in (await target(die).send(SPEC)).error


async def test_concurrency_is_never_exceeded_and_everything_is_sent() -> None:
    active = peak = 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal active, peak
        active += 1
        peak = max(peak, active)
        await asyncio.sleep(0)
        active -= 1
        return httpx.Response(200, text="".join(event(body) for body in SOUND))

    client = httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://test")
    busy = Target(client=client, model="m", temperature=0.0, seed=None, ignore_eos=True)
    seen: list[Measurement] = []
    result = await at_concurrency(busy, [SPEC] * 20, 4, seen.append)
    assert len(result.measurements) == len(seen) == 20
    assert 1 < peak <= 4


async def test_open_loop_sends_every_request() -> None:
    specs = [RequestSpec(prompt=str(i), max_tokens=2, at=i * 1e-3) for i in range(5)]
    result = await at_arrival_times(target(lambda _: SOUND), specs, lambda _: None)
    assert sorted(m.spec.prompt for m in result.measurements) == ["0", "1", "2", "3", "4"]


async def test_text_that_differs_from_its_reference_is_counted() -> None:
    texts = iter(["ab", "ab", "xy"])

    def answer(_: httpx.Request) -> list:
        text = next(texts)
        return [chunk(text[0]), chunk(text[1], "length"), usage(2), "[DONE]"]

    server = target(answer)
    references = await reference_texts(server, [SPEC, SPEC], lambda _: None)
    assert references == {"p": "ab"}
    result = await at_concurrency(server, [SPEC, SPEC], 1, lambda _: None)
    summary = summarize(result.measurements, result.seconds, slo=None, references=references)
    assert (summary.checked, summary.mismatched, summary.failed) == (2, 1, 0)


async def test_failed_reference_ends_the_benchmark() -> None:
    with pytest.raises(RemoteError, match="HTTP 500"):
        await reference_texts(target(lambda _: httpx.Response(500, text="no")), [SPEC], lambda _: None)


def measured(ttft: float, gaps: list[float], error: str | None = None) -> Measurement:
    m = Measurement(spec=SPEC, began=0.0, first=ttft, ended=ttft + sum(gaps), gaps=gaps, error=error)
    m.output_tokens = len(gaps) + 1
    return m


def test_percentiles_are_samples_by_nearest_rank() -> None:
    found = percentiles([i / 1000 for i in range(1, 101)])
    assert (found.p50, found.p90, found.p99, found.max) == (50.0, 90.0, 99.0, 100.0)
    assert percentiles([0.007]).p99 == 7.0
    assert percentiles([]) is None


def test_goodput_counts_requests_within_every_bound() -> None:
    slo = Slo(ttft_ms=100, itl_ms=20)
    good, slow_start, slow_tokens = measured(0.05, [0.01, 0.02]), measured(0.2, [0.01]), measured(0.05, [0.05])
    failed = measured(0.05, [0.01], error="no")
    assert [is_good(m, slo) for m in (good, slow_start, slow_tokens, failed)] == [True, False, False, False]
    summary = summarize([good, slow_start, slow_tokens, failed], 2.0, slo=slo, references={})
    assert summary.goodput_requests_per_s == 0.5
    assert summary.failed == 1
    assert summary.output_tokens_per_s == (3 + 2 + 2) / 2


async def test_predicted_ttft_is_compared_with_the_measured_one() -> None:
    heads = iter([{"x-tandem-predicted-ttft-ms": "40"}, {"x-tandem-predicted-ttft-ms": "soon"}, {}])
    server = target(lambda _: httpx.Response(200, headers=next(heads), text="".join(map(event, SOUND))))
    found = [await server.send(SPEC) for _ in range(3)]
    assert [m.predicted_s for m in found] == [0.04, None, None]
    found[0].began, found[0].first = 0.0, 0.05
    summary = summarize(found, 1.0, slo=None, references={})
    assert summary.ttft_over_predicted == Ratios(requests=1, p10=1.25, p50=1.25, p90=1.25)
    assert summarize(found[1:], 1.0, slo=None, references={}).ttft_over_predicted is None


@pytest.mark.parametrize(("wait", "answered"), [("0", True), ("9", False), ("Wed, 21 Oct 2026 07:28:00 GMT", False)])
async def test_rejected_request_is_sent_again_when_the_server_says(wait: str, answered: bool) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> list | httpx.Response:
        seen.append(request.headers.get("x-slo-ttft-ms"))
        return httpx.Response(429, headers={"retry-after": wait}, text="later") if len(seen) == 1 else SOUND

    server = replace(target(answer), objectives=objectives_of(Slo(ttft_ms=250, e2e_ms=9)), retry_within_s=5.0)
    found = await server.send(SPEC)
    assert (found.ok, found.is_retry) == (answered, answered)
    assert seen == ["250"] * (2 if answered else 1)
    summary = summarize([found], 1.0, slo=Slo(ttft_ms=60_000), references={})
    assert summary.retries == (Retries(sent=1, good=1) if answered else None)


async def test_rejected_request_is_not_sent_again_by_default() -> None:
    found = await target(lambda _: httpx.Response(429, headers={"retry-after": "0"})).send(SPEC)
    assert (found.is_retry, found.retry_after_s) == (False, 0.0)


async def test_request_that_is_rejected_twice_is_given_up() -> None:
    server = replace(target(lambda _: httpx.Response(429, headers={"retry-after": "0"})), retry_within_s=1.0)
    found = await server.send(SPEC)
    assert summarize([found], 1.0, slo=None, references={}).retries == Retries(sent=1, good=0)
