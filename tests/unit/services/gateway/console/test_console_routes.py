"""The console's routes: where they are, which users may read what, and what the page may do in a browser."""

import re
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tandem_engine.ipc.channels import IpcContext
from tandem_services.common.health import Health
from tandem_services.gateway.admin import create_admin_app
from tandem_services.gateway.app import api_app, build_gateway
from tandem_services.gateway.console.fleet_document import REFUSED_ROWS, ViewedFleet
from tandem_services.gateway.console.routes import read_assets
from tandem_services.gateway.http.monitoring_routes import VERSION
from tandem_services.gateway.observe.explain import REFUSED_RECORDS, RequestRecord
from tandem_services.gateway.serve import console_of
from tandem_testing.console_builders import ScriptedFleet, member
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.service_clock import ServiceClock

OPEN = [
    "/",
    "/docs",
    "/console",
    "/console/",
    "/console/assets/main.js",
    "/console/assets/console.css",
    "/console/assets/icon.svg",
]
DATA = [
    "/console/data/fleet",
    "/console/data/history",
    "/console/data/errors",
    "/console/data/requests",
    "/console/data/requests/r1",
]


def record(request_id: str, tenant: str) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        client_request_id=None,
        tenant=tenant,
        endpoint="/v1/chat/completions",
        model="m",
        requested_model="m",
        stream=True,
        prompt_tokens=7,
        n=1,
        created=0,
        choices=[],
    )


class Consoles:
    """A gateway's two applications, the console on either, without sockets."""

    def __init__(self, tokenizer, keys: Path | None, *, admin_port: bool) -> None:
        self.context = IpcContext()
        self.clock = ServiceClock()
        self.fleet = ScriptedFleet(members=[member("w1")])
        config = config_of(api_keys=keys)
        parts = fleet_of(config, FakeChooser([]), SessionShelf(), self.context, tokenizer)
        self.gateway = build_gateway(config, [parts], clock=self.clock, health=Health())
        self.console = console_of(self.gateway, lambda: [ViewedFleet("blue", self.fleet)])
        admin = create_admin_app(self.gateway, drain=lambda: None, console=self.console if admin_port else None)
        api = api_app(self.gateway, metrics=not admin_port, console=None if admin_port else self.console)
        self.admin, self.api = self._client(admin), self._client(api)
        self.gateway.answering.journal.open(record("r1", "ann"))

    def _client(self, app) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


@asynccontextmanager
async def consoles(tokenizer, keys: Path | None = None, *, admin_port: bool = False):
    both = Consoles(tokenizer, keys, admin_port=admin_port)
    try:
        yield both
    finally:
        await both.admin.aclose()
        await both.api.aclose()
        await both.gateway.close()
        both.context.close()


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path, ann={}, root={"admin": True})


async def test_console_routes_are_all_covered_by_access_tests(tokenizer):
    async with consoles(tokenizer) as both:
        paths = {route.path.replace("{request_id}", "r1") for route in both.console.routes()}
        assert paths == {"/", "/docs", "/console", "/console/", "/console/assets/{name}", *DATA}


async def test_without_keys_the_page_and_its_data_are_open(tokenizer):
    async with consoles(tokenizer) as both:
        for path in OPEN + DATA:
            assert (await both.api.get(path)).status_code in (200, 307, 308), path
            assert (await both.api.head(path)).status_code in (200, 307, 308), path


async def test_page_needs_no_key_and_its_data_an_administrators(tokenizer, keys):
    async with consoles(tokenizer, keys) as both:
        for path in OPEN:
            assert (await both.api.get(path)).status_code in (200, 307, 308), path
        for path in [*DATA, "/console/data/", "/console/data/nope", "/console/data/requests/"]:
            assert (await both.api.get(path)).status_code == 401, path
            assert (await both.api.get(path, headers=bearer("ann"))).status_code == 403, path
        for path in DATA:
            assert (await both.api.get(path, headers=bearer("root"))).status_code == 200, path


async def test_unknown_console_path_requires_a_key(tokenizer, keys):
    async with consoles(tokenizer, keys) as both:
        for path in ["/console/assets/nope.js", "/console/assets/", "/consoles", "/console/assets/..%2f..%2froutes.py"]:
            assert (await both.api.get(path)).status_code == 401, path
            assert (await both.api.get(path, headers=bearer("root"))).status_code == 404, path


async def test_with_an_administrators_port_everything_of_it_is_there(tokenizer, keys):
    async with consoles(tokenizer, keys, admin_port=True) as both:
        for path in OPEN + DATA:
            assert (await both.api.get(path, headers=bearer("root"))).status_code == 404, path
            assert (await both.admin.get(path, headers=bearer("root"))).status_code in (200, 307, 308), path
        for path in DATA:
            assert (await both.admin.get(path)).status_code == 401, path
            assert (await both.admin.get(path, headers=bearer("ann"))).status_code == 403, path


async def test_playground_on_admin_port_requires_admin_key(tokenizer, keys):
    async with consoles(tokenizer, keys, admin_port=True) as both:
        for method, path in [("GET", "/v1/models"), ("POST", "/v1/chat/completions")]:
            assert (await both.admin.request(method, path)).status_code == 401
            assert (await both.admin.request(method, path, headers=bearer("ann"))).status_code == 403
        models = await both.admin.get("/v1/models", headers=bearer("root"))
        assert [each["id"] for each in models.json()["data"]] == ["mock"]


async def test_docs_lead_to_the_description_of_the_api(tokenizer, keys):
    async with consoles(tokenizer, keys, admin_port=True) as both:
        assert (await both.admin.get("/docs")).headers["location"] == "console#api"
        assert (await both.admin.get("/openapi.json")).status_code == 401
        of_users = (await both.api.get("/openapi.json", headers=bearer("ann"))).json()
        assert (await both.admin.get("/openapi.json", headers=bearer("root"))).json() == of_users


async def test_gateway_without_the_console_has_nothing_of_it(tokenizer):
    async with consoles(tokenizer, admin_port=True) as both:
        for path in OPEN + DATA:
            assert (await both.api.get(path)).status_code == 404, path


async def test_administrator_sees_requests_of_all_tenants(tokenizer, keys):
    async with consoles(tokenizer, keys) as both:
        answer = await both.api.get("/console/data/requests/chatcmpl-r1", headers=bearer("root"))
        assert (answer.status_code, answer.json()["tenant"]) == (200, "ann")
        missing = await both.api.get("/console/data/requests/none", headers=bearer("root"))
        assert missing.status_code == 404
        rows = (await both.api.get("/console/data/requests", headers=bearer("root"))).json()
        assert [(row["request_id"], row["status"]) for row in rows] == [("r1", None)]


async def test_page_may_do_nothing_but_talk_to_its_own_origin(tokenizer):
    async with consoles(tokenizer) as both:
        for path in ["/console", "/console/assets/main.js"]:
            headers = (await both.api.get(path)).headers
            policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
            assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
            assert policy["require-trusted-types-for"] == "'script'"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "no-referrer"
        for path in DATA:
            headers = (await both.api.get(path)).headers
            assert headers["cache-control"] == "no-store"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert "access-control-allow-origin" not in headers


async def test_unchanged_file_is_not_sent_again(tokenizer):
    async with consoles(tokenizer) as both:
        first = await both.api.get("/console/assets/console.css")
        again = await both.api.get("/console/assets/console.css", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        other = await both.api.get("/console/assets/console.css", headers={"if-none-match": '"other"'})
        assert other.status_code == 200


async def test_however_many_look_the_fleet_is_described_once_a_second(tokenizer):
    async with consoles(tokenizer) as both:
        answers = {(await both.api.get("/console/data/fleet")).content for _ in range(50)}
        assert (len(answers), both.console.fleet.builds) == (1, 1)
        both.clock.advance(1.0)
        await both.api.get("/console/data/fleet")
        assert both.console.fleet.builds == 2
        # And once for the first point of the curves.
        assert both.fleet.asked == 3


async def test_root_leads_browsers_to_the_page_and_programs_to_links(tokenizer, keys):
    async with consoles(tokenizer, keys) as both:
        browser = await both.api.get("/", headers={"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"})
        assert (browser.status_code, browser.headers["location"]) == (307, "console")
        program = await both.api.get("/")
        links = {"console": "console", "docs": "docs", "openapi": "openapi.json", "models": "v1/models"}
        assert program.json() == {"name": "Tandem", "version": VERSION, "links": links}
        for link in program.json()["links"].values():
            assert (await both.api.get(f"/{link}", headers=bearer("root"))).status_code in (200, 307), link


async def test_redirect_holds_behind_a_prefix(tokenizer):
    async with consoles(tokenizer) as both:
        assert (await both.api.get("/console/")).headers["location"] == "../console"


def test_console_page_has_no_inline_code_and_links_its_assets():
    files = {asset.name: asset.body.decode() for asset in read_assets()}
    page = files["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", page)
    links = re.findall(r'(?:src|href)="([^"#]+)"', page)
    links += [f"console/assets/{name}" for text in files.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {link.removeprefix("console/assets/") for link in links} == files.keys() - {"index.html"}


@pytest.mark.parametrize("name", [asset.name for asset in read_assets() if asset.name.endswith(".js")])
def test_no_script_makes_markup_of_text_or_asks_elsewhere(name):
    text = next(asset.body.decode() for asset in read_assets() if asset.name == name)
    code = text.replace("http://www.w3.org/2000/svg", "")
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|https?://|localStorage"
    )
    assert re.findall(banned, code) == []
    assert text.startswith("// @ts-check\n")


async def refused(both: Consoles, body: dict, **headers: str) -> httpx.Response:
    answer = await both.api.post("/v1/chat/completions", json=body, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text
    return answer


async def listed(both: Consoles, **headers: str) -> list[dict]:
    both.clock.advance(1.5)
    rows = (await both.api.get("/console/data/requests", headers=headers)).json()
    return [row for row in rows if row["request_id"] != "r1"]


async def test_refused_requests_are_listed_without_their_words(tokenizer):
    secret = "what the user wrote"
    async with consoles(tokenizer) as both:
        await refused(both, {"messages": [{"role": "user", "content": secret}], "temperature": "hot"})
        await refused(both, {"messages": [{"role": secret, "content": ""}]})
        await refused(both, {"model": secret, "messages": [{"role": "user", "content": secret}]})
        await both.api.post("/v1/nowhere", json={})
        await both.api.get("/v1/chat/completions")
        rows = await listed(both)
        assert [(row["status"], row["error"]) for row in rows] == [
            (404, "NotFoundError: model_not_found: model"),
            (400, "BadRequestError: messages[0].role"),
            (400, "BadRequestError: temperature"),
        ]
        for row in rows:
            page = await both.api.get(f"/console/data/requests/{row['request_id']}")
            assert page.json()["choices"] == []
            assert secret not in page.text + str(row)


async def test_refused_requests_have_their_readers(tokenizer, keys):
    bad = {"messages": "x"}
    async with consoles(tokenizer, keys) as both:
        foreign = await refused(both, bad)
        anns = await refused(both, bad, **bearer("ann"), **{"x-request-id": "anns-own"})
        assert (foreign.status_code, anns.status_code) == (401, 400)
        assert (await both.api.get("/console/data/requests", headers=bearer("ann"))).status_code == 403
        rows = await listed(both, **bearer("root"))
        assert [(row["status"], row["tenant"]) for row in rows] == [(400, "ann"), (401, "")]
        for name, key, found in (
            ("anns-own", "ann", 200),
            ("anns-own", "root", 404),
            (rows[1]["request_id"], "ann", 404),
        ):
            own = await both.api.get(f"/v1/requests/{name}/explain", headers=bearer(key))
            assert own.status_code == found, (name, key)
        page = await both.api.get("/console/data/requests/anns-own", headers=bearer("root"))
        assert page.json()["status"] == 400


async def test_refused_requests_leave_room_for_others(tokenizer):
    async with consoles(tokenizer) as both:
        for _ in range(REFUSED_RECORDS + 5):
            await refused(both, {})
        both.clock.advance(1.5)
        rows = (await both.api.get("/console/data/requests")).json()
        assert [row["request_id"] for row in rows].count("r1") == 1
        assert len(rows) == REFUSED_ROWS + 1
        assert len(both.gateway.answering.journal.latest_refused(10_000)) == REFUSED_RECORDS
