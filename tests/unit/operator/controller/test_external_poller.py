"""Externally scaled services: polled by every replica, served on a port of the operator."""

import httpx
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem_operator.builders.naming import labels_of
from tandem_operator.controller.pod_poller import ExternalPoller
from tandem_operator.controller.probes import OperatorMetrics, probe_app
from tandem_operator.controller.store import POD, Seen, Store
from tandem_operator.settings import OperatorSettings
from tandem_testing.exported_metrics import exposition_of, gateway_metrics, worker_metrics
from tandem_testing.kube_objects import a_service, an_object


def listening_pod(name: str, component: str, port: str, number: int, **labels: str) -> Seen:
    return an_object(
        POD,
        name,
        owner="uid-replicaset",
        metadata={"labels": labels_of("chat", component, **labels)},
        spec={"containers": [{"ports": [{"name": port, "containerPort": number}]}]},
        status={"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    )


def external_service(mode: str = "external") -> Seen:
    return a_service(spec={"model": {"path": "/models/tandem-mini"}, "autoscaling": {"mode": mode}})


def answer(request: httpx.Request) -> httpx.Response:
    metrics = gateway_metrics() if request.url.port == 8001 else worker_metrics()
    return httpx.Response(200, content=exposition_of(metrics))


@pytest.fixture
def store() -> Store:
    store = Store()
    for one in (
        external_service(),
        listening_pod("chat-decode-r1-a", "worker", "health", 9090, role="decode", revision="r1"),
        listening_pod("chat-gateway-a", "gateway", "admin", 8001),
    ):
        assert store.put(one)
    return store


@pytest.fixture
def metrics() -> OperatorMetrics:
    return OperatorMetrics()


@pytest.fixture
async def poller(store, metrics):
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        yield ExternalPoller(store, OperatorSettings(), client, metrics.scaling)


async def test_two_polls_serve_metrics_on_the_operator_port(poller, metrics):
    app = probe_app(metrics.registry, lambda: "", lambda: "", metrics.scaling.answer)
    async with TestClient(TestServer(app)) as operator:
        await poller.poll()
        early = await operator.get("/scaling/models/chat/decode")
        assert early.status == 503
        assert "second sample" in (await early.json())["message"]
        await poller.poll()
        answered = await operator.get("/scaling/models/chat/decode")
        assert answered.status == 200
        assert (await answered.json())["queueRequests"] == 2
        text = await (await operator.get("/metrics")).text()
        assert (
            'tandem_scaling_queue_requests{model_service="chat",role="decode",service_namespace="models"} 2.0' in text
        )
        assert (await operator.get("/scaling/models/other/decode")).status == 404


@pytest.mark.parametrize("mode", ["internal", "none"])
async def test_internally_scaled_service_has_no_external_metrics(store, poller, metrics, mode):
    await poller.poll()
    await poller.poll()
    assert metrics.scaling.answer("models", "chat", "decode")[0] == 200
    store.put(external_service(mode))
    await poller.poll()
    assert metrics.scaling.answer("models", "chat", "decode")[0] == 404


async def test_service_that_is_gone_or_cannot_be_read_is_forgotten(store, poller, metrics):
    await poller.poll()
    await poller.poll()
    store.put(a_service(spec={"model": 5}))
    await poller.poll()
    assert metrics.scaling.answer("models", "chat", "decode")[0] == 404
