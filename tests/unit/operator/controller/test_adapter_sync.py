"""Commands about adapters that the poll of a service's pods sends to a gateway, one at a time."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from tandem_operator.api.adapters import AdapterStatus
from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.types import condition
from tandem_operator.controller.adapter_sync import FIRST_PAUSE_S, AdapterSync
from tandem_operator.controller.observations import Parts, Subject
from tandem_operator.controller.store import MODEL_ADAPTER
from tandem_operator.planning.status import VALID
from tandem_operator.telemetry.worker_control import ModelAt, OrderFailedError
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_objects import a_pod, an_object
from tandem_testing.kube_subjects import OWNER, subject

SQL = {"name": "sql", "source": {"claim": {"claimName": "adapters", "path": "sql"}}}
SPEC = {"adapters": [SQL]}
DONE = {"done": True, "message": "Success"}
FAILED = {"done": False, "message": "d: r 128", "failed": {"d": "r 128"}}


class Gateway:
    """Answers as one; `answer` is of all commands."""

    def __init__(self) -> None:
        self.registered: dict[str, dict[str, Any]] = {}
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.answer = DONE
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.status = 200
        self.announced: list[str] | None = None
        """None: a gateway of a former release."""

    def has(self, name: str, folder: str, workers: tuple[str, ...] = ("p",)) -> None:
        self.registered[name] = {"name": name, "digest": "a" * 32, "folder": folder, "workers": list(workers)}

    async def respond(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer token"
        if request.method == "GET":
            announced = {} if self.announced is None else {"announced": self.announced}
            return httpx.Response(self.status, json={"adapters": list(self.registered.values()), **announced})
        if request.url.path.endswith("/announce"):
            self.announced = json.loads(request.content)["lora_names"]
            return httpx.Response(200, json=DONE)
        self.commands.append((request.url.path.rpartition("/")[2], json.loads(request.content)))
        await self.may_answer.wait()
        return httpx.Response(200, json=self.answer)


class Now:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def gateway():
    return Gateway()


@pytest.fixture
def now():
    return Now()


@pytest.fixture
async def sync(gateway, now):
    async def token(_):
        return "token"

    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway.respond)) as client:
        one = AdapterSync(client, token, now)
        yield one
        one.close()


def seen(spec: dict[str, Any], *names: str, valid: bool = True, objects: Any = ()) -> Subject:
    """A service with this spec whose status lists `names`."""
    status = ModelServiceStatus(
        adapters=[AdapterStatus(name=name) for name in names],
        conditions=[condition(VALID, valid, "AsTheTestSays")],
    )
    found = subject(service_of(**spec))
    parts = Parts.of(OWNER, [a_pod("p"), a_pod("d", role="decode"), *objects])
    return replace(found, status=status, parts=parts)


async def settled(sync: AdapterSync) -> None:
    assert sync._sent is not None, "no command was sent"
    await asyncio.wait([sync._sent.task])


async def test_service_without_adapters_is_not_asked(sync, gateway):
    gateway.status = 500
    reading = await sync.step(seen({}))
    assert (reading.held, reading.problem, sync.expecting) == (None, "", False)


async def test_name_is_loaded_once_the_status_lists_it(sync, gateway):
    await sync.step(seen(SPEC))
    assert (gateway.commands, sync.expecting) == ([], True)
    await sync.step(seen(SPEC, "sql"))
    await settled(sync)
    body = {"lora_name": "sql", "lora_path": "claims/adapters/sql", "digest": "", "pinned": False}
    assert gateway.commands == [("load", body)]
    gateway.has("sql", "claims/adapters/sql")
    reading = await sync.step(seen(SPEC, "sql"))
    assert reading.held["sql"].workers == {"p"}
    assert (len(gateway.commands), sync.expecting) == (1, False)


@pytest.mark.parametrize("failures", [-1, 10**30], ids=["negative", "huge"])
async def test_impossible_number_of_failed_workers_is_refused(sync, gateway, failures):
    """A status with it is no status for the API server."""
    gateway.has("sql", "claims/adapters/sql")
    gateway.registered["sql"]["failures"] = failures
    reading = await sync.step(seen(SPEC, "sql"))
    assert reading.held is None
    assert "failures" in reading.problem


async def test_command_in_flight_is_not_waited_for(sync, gateway):
    gateway.may_answer.clear()
    two = {"adapters": [SQL, {**SQL, "name": "law"}]}
    await sync.step(seen(two, "sql", "law"))
    reading = await sync.step(seen(two, "sql", "law"))
    assert (reading.failures, sync.expecting) == ({}, True)
    assert sync._sent is not None
    gateway.may_answer.set()
    await settled(sync)
    assert len(gateway.commands) == 1


async def test_failure_is_reported_and_repeated_later(sync, gateway, now):
    gateway.answer = FAILED
    await sync.step(seen(SPEC, "sql"))
    await settled(sync)
    reading = await sync.step(seen(SPEC, "sql"))
    assert (reading.failures["sql"].message, reading.failures["sql"].workers) == ("d: r 128", {"d": "r 128"})
    for pause, commands in ((FIRST_PAUSE_S, 2), (2 * FIRST_PAUSE_S, 3)):
        now.at += pause - 1.0
        await sync.step(seen(SPEC, "sql"))
        assert len(gateway.commands) == commands - 1
        now.at += 1.0
        await sync.step(seen(SPEC, "sql"))
        await settled(sync)
        await sync.step(seen(SPEC, "sql"))
        assert len(gateway.commands) == commands
    gateway.answer = DONE
    now.at += 4 * FIRST_PAUSE_S
    await sync.step(seen(SPEC, "sql"))
    await settled(sync)
    gateway.has("sql", "claims/adapters/sql")
    assert (await sync.step(seen(SPEC, "sql"))).failures == {}


async def test_another_source_is_tried_at_once(sync, gateway):
    gateway.answer = FAILED
    await sync.step(seen(SPEC, "sql"))
    await settled(sync)
    other = {"adapters": [{**SQL, "source": {"claim": {"claimName": "adapters", "path": "sql-2"}}}]}
    await sync.step(seen(other, "sql"))
    await settled(sync)
    assert [body["lora_path"] for _, body in gateway.commands] == ["claims/adapters/sql", "claims/adapters/sql-2"]


async def test_removed_adapter_is_unloaded(sync, gateway):
    gateway.has("sql", "claims/adapters/sql")
    gateway.has("by-hand", "claims/adapters/other")
    await sync.step(seen({}, "sql"))
    await settled(sync)
    assert gateway.commands == [("unload", {"lora_name": "sql"})]


async def test_model_adapter_is_loaded(sync, gateway):
    one = an_object(
        MODEL_ADAPTER,
        "law",
        spec={"serviceName": "chat", "source": {"claim": {"claimName": "adapters", "path": "law"}}, "pinned": True},
    )
    await sync.step(seen({"adapterClaims": ["adapters"]}, "law", objects=[one]))
    await settled(sync)
    assert [(body["lora_path"], body["pinned"]) for _, body in gateway.commands] == [("claims/adapters/law", True)]


async def test_pin_is_sent_once_to_all_ready_workers(sync, gateway):
    pinned = {"adapters": [{**SQL, "pinned": True}]}
    gateway.has("sql", "claims/adapters/sql", workers=("p", "d", "d2"))
    await sync.step(seen(pinned, "sql"))
    await settled(sync)
    reading = await sync.step(seen(pinned, "sql"))
    assert reading.pinned_on == {"sql": {"p", "d"}}
    await sync.step(seen(pinned, "sql"))
    assert len(gateway.commands) == 1
    # It has loaded the adapter for a request, and not pinned it.
    more = seen(pinned, "sql", objects=[a_pod("d2", role="decode")])
    await sync.step(more)
    await settled(sync)
    assert [(body["digest"], body["pinned"]) for _, body in gateway.commands] == [("a" * 32, True)] * 2
    await sync.step(seen(SPEC, "sql"))
    await settled(sync)
    assert gateway.commands[-1][1]["pinned"] is False
    assert (await sync.step(seen(SPEC, "sql"))).pinned_on == {"sql": frozenset()}


async def test_refused_spec_sends_no_command(sync, gateway):
    await sync.step(seen(SPEC, "sql", valid=False))
    newer = replace(seen(SPEC, "sql"), status=msgspec.structs.replace(seen(SPEC, "sql").status, observed_generation=7))
    await sync.step(newer)
    assert gateway.commands == []


async def test_without_a_gateway_the_last_list_stays(sync, gateway):
    gateway.has("sql", "claims/adapters/sql")
    first = await sync.step(seen(SPEC, "sql"))
    alone = await sync.step(replace(seen(SPEC, "sql"), pods=()))
    assert (alone.problem, alone.held) == ("no gateway pod is ready", first.held)
    gateway.status = 404
    older = await sync.step(seen(SPEC, "sql"))
    assert "answered /operator/adapters?workers=table with 404" in older.problem
    assert older.held == first.held


async def test_shared_gateway_gets_its_own_token_and_the_model(gateway):
    tokens = []

    async def token(served):
        tokens.append(served.name)
        return "token"

    shared = replace(seen({**SPEC, "gatewayRef": {"name": "shared"}}, "sql"), gateway=service_of(name="shared"))
    shared = replace(shared, model=ModelAt("chat", "models.chat"))
    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway.respond)) as client:
        sync = AdapterSync(client, token)
        await sync.step(shared)
        await settled(sync)
    assert tokens == ["shared"]
    assert (gateway.commands[0][1]["model"], gateway.commands[0][1]["cluster"]) == ("chat", "models.chat")


async def test_missing_key_file_is_reported(gateway):
    async def token(_):
        raise OrderFailedError("Secret 'chat-curve' does not exist yet")

    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway.respond)) as client:
        reading = await AdapterSync(client, token).step(seen(SPEC, "sql"))
    assert reading.problem == "Secret 'chat-curve' does not exist yet"


async def test_listed_names_are_announced_while_there_is_no_worker(sync, gateway):
    gateway.announced = []
    empty = replace(seen(SPEC, "sql"), parts=Parts.of(OWNER, []))
    reading = await sync.step(empty)
    assert (gateway.announced, gateway.commands, reading.announced) == (["sql"], [], {"sql"})
    assert (await sync.step(replace(seen({}, "sql"), parts=Parts.of(OWNER, [])))).announced == frozenset()
    assert gateway.announced == []


async def test_name_is_announced_only_once_the_status_lists_it(sync, gateway):
    gateway.announced = []
    await sync.step(seen(SPEC))
    assert gateway.announced == []


async def test_gateway_of_a_former_release_gets_no_announcement(sync, gateway):
    reading = await sync.step(seen(SPEC, "sql"))
    await settled(sync)
    assert (gateway.announced, reading.announced) == (None, frozenset())
