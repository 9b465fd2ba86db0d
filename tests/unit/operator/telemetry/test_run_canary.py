"""Canaries as the operator asks for them, and what becomes of what a gateway says."""

import json

import httpx
import pytest

from tandem_operator.planning.observed import Canary
from tandem_operator.telemetry.worker_control import pair_of, run_canary
from tandem_testing.pod_builders import pod

GATEWAY = pod("g0", "gateway", revision="")
PAIR = (pod("p0", "prefill"), pod("d0"))


async def asked(answer: httpx.Response, **arguments) -> tuple[Canary, list[tuple[str, dict]]]:
    seen: list[tuple[str, dict]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), json.loads(request.content)))
        return answer

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
        return await run_canary(client, GATEWAY, "t", **arguments), seen


async def test_through_a_pair():
    answer = httpx.Response(200, json={"passed": True, "message": "8 tokens and 3 pages from p0 to d0"})
    canary, seen = await asked(answer, pair=PAIR, within_s=9.0)
    assert canary == Canary(passed=True, message="8 tokens and 3 pages from p0 to d0")
    assert seen == [("http://10.0.0.1:8001/canary", {"within_s": 9.0, "prefill": "p0", "decode": "d0"})]


async def test_through_the_router():
    _, seen = await asked(httpx.Response(200, json={"passed": True}))
    assert seen == [("http://10.0.0.1:8001/canary", {"within_s": 20.0})]


@pytest.mark.parametrize(
    ("answer", "error_message"),
    [
        (httpx.Response(200, json={"passed": False, "message": "worker d0 is not registered"}), "not registered"),
        (httpx.Response(200, json={"passed": "yes"}), ""),
        (httpx.Response(200, json={}), ""),
        (httpx.Response(403, json={"error": {}}), "answered /canary with 403"),
        (httpx.Response(200, text="<html>"), "<html>"),
        (httpx.Response(500, text="x" * 10_000), "500"),
    ],
)
async def test_canary_answer_that_is_not_a_success_fails_the_canary(answer, error_message):
    canary, _ = await asked(answer)
    assert not canary.passed
    assert error_message in canary.message
    assert len(canary.message) <= 512


def test_pair_is_of_one_revision_and_ready():
    pods = [
        pod("p1", "prefill"),
        pod("p0", "prefill", ready=False),
        pod("d1", revision="r2"),
        pod("d2", terminating=True),
        GATEWAY,
    ]
    assert pair_of("r1", pods) is None
    pods.append(pod("d3"))
    found = pair_of("r1", pods)
    assert found is not None
    assert [one.name for one in found] == ["p1", "d3"]
