"""`GET /v1/adapters`: pages, in adapters and in the workers that each names."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.control import AdapterMemory, FailedAdapter, ServedAdapter
from tandem_services.common.health import Health
from tandem_services.gateway.admin import create_admin_app
from tandem_services.gateway.api.adapter_list import MAX_FAILED, MAX_LIMIT, MAX_WORKERS
from tandem_services.gateway.app import build_gateway
from tandem_services.router.decision import WorkerView
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of
from tandem_testing.router_builders import make_view
from tandem_testing.service_clock import ServiceClock

COUNT = MAX_LIMIT + 30
WORKERS = MAX_WORKERS + 5
NAMES = sorted(f"a{number}" for number in range(COUNT))


def view(name: str, number: int, **facts: Any) -> WorkerView:
    return make_view(name, number=number, model="mock", **facts)


@pytest.fixture
def chooser() -> FakeChooser:
    """Many adapters on many workers, which all fail with the first of them."""
    many = {name: ServedAdapter(name=name, digest=f"{int(name[1:]):032x}", rank=4, root="r") for name in NAMES}
    failed = (FailedAdapter(name="a0", digest=f"{0:032x}", reason="no such folder"),)
    memory = AdapterMemory(limit=256, loads=True, resident=tuple(each.digest for each in many.values()), failed=failed)
    return FakeChooser(
        [view(f"w{number:02}", 1 + number, adapters=many, adapter_memory=memory) for number in range(WORKERS)]
    )


@pytest.fixture
async def admin(tokenizer, chooser: FakeChooser) -> AsyncIterator[httpx.AsyncClient]:
    context, config = IpcContext(), config_of(admin_port=1)
    fleet = fleet_of(config, chooser, SessionShelf(), context, tokenizer)
    gateway = build_gateway(config, [fleet], clock=ServiceClock(), health=Health())
    app = create_admin_app(gateway, drain=lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
        yield client
    await gateway.close()
    context.close()


async def pages(admin: httpx.AsyncClient, **params: Any) -> list[dict[str, Any]]:
    found = [(await admin.get("/v1/adapters", params=params)).json()]
    while found[-1]["has_more"]:
        answer = await admin.get("/v1/adapters", params={**params, "after": found[-1]["last_id"]})
        found.append(answer.json())
    return found


async def test_pages_list_every_adapter_once(admin: httpx.AsyncClient) -> None:
    found = await pages(admin)
    assert [len(page["data"]) for page in found] == [MAX_LIMIT, COUNT - MAX_LIMIT]
    assert [each["name"] for page in found for each in page["data"]] == NAMES
    short = await pages(admin, limit=37)
    assert [each["name"] for page in short for each in page["data"]] == NAMES
    assert all(len(page["data"]) <= 37 for page in short)


async def test_adapter_names_some_workers_and_counts_all(admin: httpx.AsyncClient) -> None:
    first, second, *_ = (await pages(admin))[0]["data"]
    assert (len(first["workers"]), first["num_workers"]) == (MAX_WORKERS, WORKERS)
    assert (len(first["failed"]), first["num_failed"]) == (MAX_FAILED, WORKERS)
    assert (second["failed"], second["num_failed"]) == ({}, 0)
    described = "id model name digest rank root requested registered source".split()
    assert [*first] == [*described, "workers", "num_workers", "failed", "num_failed"]
    assert first["id"] == f"mock:a0@{0:032x}"


async def test_page_begins_after_an_adapter_that_is_gone(admin: httpx.AsyncClient, chooser: FakeChooser) -> None:
    page = (await admin.get("/v1/adapters", params={"limit": 3})).json()
    chooser.fleet[:] = [
        view(worker.worker_id, 1, adapters={n: a for n, a in worker.adapters.items() if n != NAMES[2]})
        for worker in chooser.fleet[:1]
    ]
    rest = (await admin.get("/v1/adapters", params={"limit": 1, "after": page["last_id"]})).json()
    assert [each["name"] for each in rest["data"]] == [NAMES[3]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("limit", value) for value in ("0", str(MAX_LIMIT + 1), "-1", "x", "٣", "9" * 5000, "")),
        *(("after", value) for value in ("a0", "mock:a0@12", "@" + "0" * 32, "")),
    ],
)
async def test_page_that_cannot_be_is_refused_by_name(admin: httpx.AsyncClient, field: str, value: str) -> None:
    answer = await admin.get("/v1/adapters", params={field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
