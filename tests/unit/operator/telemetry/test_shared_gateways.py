"""Metrics and canaries of one model at gateways that have several."""

import json

import httpx
import pytest

from tandem_engine.base.release import RELEASE
from tandem_operator.telemetry.exposition import Exposition, Sample, UnusableFiguresError
from tandem_operator.telemetry.pod_metrics import MAX_PROCESSES, GatewayFigures
from tandem_operator.telemetry.worker_control import ModelAt, run_canary
from tandem_services.common.metrics import MetricFamilies, new_registry, render
from tandem_services.gateway.models.file import ModelsFileMetrics
from tandem_services.gateway.observe.metrics import GatewayMetrics, HttpMetrics
from tandem_services.gateway.queueing.admission import QueueMetrics
from tandem_testing.pod_builders import pod


@pytest.fixture
async def exposition() -> Exposition:
    """Of a gateway with the models a and b, with two choices of a and one of b."""
    registry = new_registry()
    families = MetricFamilies(registry)
    ModelsFileMetrics(families, served=2)
    HttpMetrics(families)
    for model, choices in (("a", 2), ("b", 1)):
        metrics = GatewayMetrics(families, model=model)
        metrics.choices.inc(choices)
        metrics.running.value = choices
        metrics.ttft.observe(float(choices))
        metrics.e2e.observe(float(choices))
        QueueMetrics(families, model=model)
    return Exposition.parse((await render(registry)).decode())


def test_only_one_model_counts(exposition):
    a, b = GatewayFigures.of(exposition, "a"), GatewayFigures.of(exposition, "b")
    assert (a.answering, a.totals.choices, a.totals.first_token_s) == (2, 2, 2.0)
    assert (b.answering, b.totals.choices, b.totals.first_token_s) == (1, 1, 1.0)
    assert GatewayFigures.of(exposition).totals.choices == 3


@pytest.mark.parametrize(("summed", "processes"), [(0.0, 1), (4.0, 4), (1e12, MAX_PROCESSES)])
def test_processes_of_a_gateway_count_for_each_model(exposition, summed, processes):
    exposition.samples["tandem_gateway_processes"][:] = [Sample({}, summed)]
    assert GatewayFigures.of(exposition, "a").processes == processes


def test_gateway_without_the_model_answers_nothing(exposition):
    assert GatewayFigures.of(exposition, "other") == GatewayFigures.none(RELEASE)


def test_gateway_that_reports_nothing_is_not_idle():
    with pytest.raises(UnusableFiguresError, match="tandem_gateway_models"):
        GatewayFigures.of(Exposition.parse(""), "a")


async def canary(answer: dict[str, object], **arguments: ModelAt) -> tuple[object, bytes]:
    asked = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request.content)
        return httpx.Response(200, json=answer)

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
        found = await run_canary(client, pod("g", "gateway", revision=""), "t", **arguments)
    return found, asked[0]


async def test_canary_names_the_model_only_at_shared_gateways():
    _, own = await canary({"passed": True})
    assert json.loads(own).keys() == {"within_s"}
    found, shared = await canary({"passed": False, "unserved": True, "message": "not yet"}, model=ModelAt("a", "ns.a"))
    body = json.loads(shared)
    assert (body["model"], body["cluster"]) == ("a", "ns.a")
    assert (found.passed, found.unserved) == (False, True)
