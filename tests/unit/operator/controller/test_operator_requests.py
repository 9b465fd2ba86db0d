"""Requests to an API server that is busy, answers 429, or must not be written to any more."""

import pytest
from aiohttp import web
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.leader_election import NotLeading
from tandem_operator.controller.probes import OperatorMetrics, serving
from tandem_operator.controller.store import DEPLOYMENT, SERVICE

MANIFEST = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "models"}}


class Scripted:
    """Gives the next answer to each request: status, body and headers."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict, dict]] = []
        self.asked: list[web.Request] = []
        self.pauses: list[float] = []
        self.leading = True

    async def handle(self, request):
        self.asked.append(request)
        status, body, headers = self.answers.pop(0)
        return web.json_response(body, status=status, headers=headers)

    async def pause(self, seconds):
        self.pauses.append(seconds)

    def check(self):
        if not self.leading:
            raise NotLeading("another one leads")


@pytest.fixture
def script():
    return Scripted()


@pytest.fixture
async def cluster(script):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    async with serving(app, "127.0.0.1", 0) as port:
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        client = ApiClient(configuration)
        yield Cluster(client, OperatorMetrics(), script.check, pause=script.pause)
        await client.close()


async def test_request_to_a_busy_api_server_is_repeated_after_its_retry_after(cluster, script):
    script.answers = [(429, {}, {"Retry-After": "2"}), (503, {}, {}), (200, {"kind": "Service"}, {})]
    assert await cluster.apply(MANIFEST) == {"kind": "Service"}
    assert 2.0 <= script.pauses[0] <= 2.5
    assert 0 < script.pauses[1] <= 2.0
    assert {request.query_string for request in script.asked} == {"fieldManager=tandem-operator&force=true"}


async def test_api_server_that_stays_busy_fails_the_request_after_four_attempts(cluster, script):
    script.answers = [(429, {"reason": "TooManyRequests", "message": "slow down"}, {})] * 4
    with pytest.raises(ApiError, match="429 TooManyRequests: slow down"):
        await cluster.apply(MANIFEST)
    assert len(script.asked) == 4


async def test_no_write_after_leadership_loss_during_retry_pause(cluster, script):
    """Not even a write that was decided before [one-leader]."""
    script.answers = [(503, {}, {})]

    async def lost(seconds):
        script.leading = False

    cluster._pause = lost
    with pytest.raises(NotLeading):
        await cluster.apply(MANIFEST)
    with pytest.raises(NotLeading):
        await cluster.delete(SERVICE.ref("s"), "models", "u1")
    assert len(script.asked) == 1


async def test_follower_may_read(cluster, script):
    script.leading = False
    script.answers = [(404, {"reason": "NotFound"}, {})]
    assert await cluster.get(SERVICE.ref("s"), "models") is None


async def test_list_with_expired_continuation_restarts(cluster, script):
    def page(names, token="", version="7"):
        return (
            200,
            {
                "items": [{"metadata": {"name": n}} for n in names],
                "metadata": {"continue": token, "resourceVersion": version},
            },
            {},
        )

    gone = (410, {"reason": "Expired"}, {})
    script.answers = [page(["a"], "t1"), gone, page(["a"], "t2", "9"), page(["b"], version="9")]
    items, version = await cluster.list_all(DEPLOYMENT, "models", "tandem.dev/service")
    assert [one["metadata"]["name"] for one in items] == ["a", "b"]
    assert ({one["kind"] for one in items}, version) == ({"Deployment"}, 9)
    assert [request.query.get("continue") for request in script.asked] == [None, "t1", None, "t2"]
    assert script.asked[0].query["labelSelector"] == "tandem.dev/service"


async def test_deletion_checks_the_uid(cluster, script):
    script.answers = [(409, {"reason": "Conflict", "message": "the UID in the precondition does not match"}, {})]
    with pytest.raises(ApiError) as caught:
        await cluster.delete(SERVICE.ref("s"), "models", "u1")
    assert caught.value.conflict
    script.answers = [(404, {}, {})]
    await cluster.delete(SERVICE.ref("s"), "models", "u1")


async def test_response_without_json_is_reported_verbatim(cluster, script):
    script.answers = [(502, ["bad", "gateway"], {})]
    with pytest.raises(ApiError, match="502: .*bad"):
        await cluster.get(SERVICE.ref("s"), "models")


async def test_server_that_is_not_there_is_an_error_of_no_status():
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:1"
    client = ApiClient(configuration)
    with pytest.raises(ApiError, match="ClientConnectorError") as caught:
        await Cluster(client, OperatorMetrics(), lambda: None).get(SERVICE.ref("s"), "models")
    assert caught.value.status == 0
    await client.close()
