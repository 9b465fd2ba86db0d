"""The administrators' port: what is there, which users may use it, and what is no longer on the API's."""

from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tandem_engine.ipc.channels import IpcContext
from tandem_services.common.health import Health
from tandem_services.gateway.admin import create_admin_app
from tandem_services.gateway.api.adapters import ADAPTER_PATHS
from tandem_services.gateway.app import api_app, build_gateway
from tandem_services.gateway.observe.explain import RequestRecord
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.service_clock import ServiceClock

ROUTES = {
    "probe": {("GET", "/live"), ("GET", "/ready"), ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")},
    "metrics": {("GET", "/metrics"), ("GET", "/version")},
    "admin": {("GET", "/requests/{request_id}/explain"), ("GET", "/v1/adapters"), ("POST", "/drain")},
    "adapters": {("POST", path) for path in ADAPTER_PATHS},
    "operator": {
        *(("POST", "/canary"), ("GET", "/operator/adapters")),
        *(("POST", f"/operator/adapters/{name}") for name in ("announce", "load", "unload")),
    },
}


def record(request_id: str, tenant: str) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        client_request_id="mine",
        tenant=tenant,
        endpoint="/v1/completions",
        model="m",
        requested_model="m",
        stream=False,
        prompt_tokens=1,
        n=1,
        created=0,
        choices=[],
    )


class Ports:
    """Both applications of one gateway, without sockets."""

    def __init__(self, tokenizer, keys: Path | None) -> None:
        self.context = IpcContext()
        config = config_of(api_keys=keys, admin_port=1)
        fleet = fleet_of(config, FakeChooser([]), SessionShelf(), self.context, tokenizer)
        self.gateway = build_gateway(config, [fleet], clock=ServiceClock(), health=Health())
        self.drained = 0
        self.admin_app = create_admin_app(self.gateway, drain=self._drain)
        self.admin = self._client(self.admin_app)
        self.api = self._client(api_app(self.gateway, metrics=False))

    def _drain(self) -> None:
        self.drained += 1

    def _client(self, app) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


@asynccontextmanager
async def ports_of(tokenizer, keys: Path | None):
    ports = Ports(tokenizer, keys)
    try:
        yield ports
    finally:
        await ports.admin.aclose()
        await ports.api.aclose()
        await ports.gateway.close()
        ports.context.close()


@pytest.fixture
async def ports(tokenizer, tmp_path):
    async with ports_of(tokenizer, write_keys(tmp_path, ann={}, root={"admin": True})) as both:
        yield both


@pytest.fixture
async def open_ports(tokenizer):
    async with ports_of(tokenizer, None) as both:
        yield both


def test_every_route_is_listed_with_its_class(ports):
    found = {(method, route.path) for route in ports.admin_app.routes for method in route.methods - {"HEAD"}}
    assert found == set().union(*ROUTES.values())


async def test_admin_port_requires_admin_key_except_probes_metrics(ports):
    for method, path in ROUTES["probe"] | ROUTES["metrics"]:
        assert (await ports.admin.request(method, path)).status_code in (200, 503), path
    for method, path in ROUTES["admin"] | ROUTES["adapters"] | {("GET", "/nope"), ("GET", "/v1/models")}:
        statuses = [(await ports.admin.request(method, path)).status_code]
        statuses += [(await ports.admin.request(method, path, headers=bearer("ann"))).status_code]
        assert statuses == [401, 403], path
    assert ports.drained == 0


async def test_metrics_and_adapters_are_not_on_the_apis_port(ports):
    assert (await ports.api.get("/metrics", headers=bearer("root"))).status_code == 404
    for path in ADAPTER_PATHS:
        assert (await ports.api.post(path, json={}, headers=bearer("root"))).status_code == 404
    assert (await ports.api.get("/live")).status_code == 200
    assert "tandem_gateway_requests_total" in (await ports.admin.get("/metrics")).text


async def test_administrator_sees_requests_of_all_tenants(ports):
    journal = ports.gateway.answering.journal
    journal.open(record("r1", "ann"))
    for known in ("r1", "chatcmpl-r1", "mine"):
        answer = await ports.admin.get(f"/requests/{known}/explain", headers=bearer("root"))
        assert (answer.status_code, answer.json()["tenant"]) == (200, "ann")
    assert (await ports.admin.get("/requests/none/explain", headers=bearer("root"))).status_code == 404
    assert (await ports.api.get("/v1/requests/r1/explain", headers=bearer("root"))).status_code == 404


async def test_drain_is_ordered(ports):
    answer = await ports.admin.post("/drain", json={}, headers=bearer("root"))
    assert (answer.status_code, answer.json(), ports.drained) == (202, {"status": "draining"}, 1)


async def test_without_keys_a_drain_needs_the_order_token(open_ports):
    token = {"authorization": f"Bearer {open_ports.gateway.order_access.token}"}
    assert (await open_ports.admin.post("/drain", json={})).status_code == 401
    assert (await open_ports.admin.post("/drain", headers=token)).status_code == 415
    for foreign in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
        assert (await open_ports.admin.post("/drain", json={}, headers=token | foreign)).status_code == 403
    assert open_ports.drained == 0
    assert (await open_ports.admin.post("/drain", json={}, headers=token)).status_code == 202
    assert (await open_ports.admin.get("/requests/none/explain")).status_code == 404


@pytest.mark.parametrize("port", ["api", "admin"])
async def test_requests_for_another_host_are_refused(open_ports, port):
    client = getattr(open_ports, port)
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "gateway.evil.example",
        "x.svc.evil.example",
    ):
        refused = await client.get("/v1/models", headers={"host": host})
        assert refused.status_code == 403, host
        assert "--allowed-hosts" in refused.json()["error"]["message"]
        for probe in ("/live", "/ready", "/health"):
            assert (await client.get(probe, headers={"host": host})).status_code in (200, 503)
    for host in ("gateway", "10.0.0.7:8000", "[::1]:8000", "localhost:1", "chat-gateway.models.svc:80"):
        assert (await client.get("/nothing", headers={"host": host})).status_code == 404, host


async def test_post_without_a_json_content_type_is_a_415(open_ports):
    body = b'{"model": "m", "prompt": "x"}'
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": ""}):
        refused = await open_ports.api.post("/v1/completions", content=body, headers=headers)
        assert refused.status_code == 415, headers
