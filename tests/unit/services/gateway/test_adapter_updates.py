"""Adapters that an administrator loads through the gateway: on all workers, or on none."""

import asyncio
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tandem_engine.config import Role
from tandem_engine.messages.control import AdapterMemory, LoadAdapter, OrderRefused, UnloadAdapter
from tandem_services.gateway.models import adapter_updates
from tandem_services.worker.engine_process import OrderRefusedError
from tandem_testing.adapter_ports import CONTENT, AdapterPort, adapter_ports
from tandem_testing.gateway_builders import FakeChooser, live_gateway
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior
from tandem_testing.tokenizer_builders import EOS

LOAD = {"lora_name": "sql", "lora_path": "one"}
UNLOAD = {"lora_name": "sql"}


@dataclass
class Fleet:
    """A gateway over a prefill worker and two decode workers, each with its port."""

    http: httpx.AsyncClient
    chooser: FakeChooser
    ports: list[AdapterPort]
    headers: dict[str, str]

    async def load(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/load_lora_adapter", json={**LOAD, **fields}, headers=self.headers)

    async def unload(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/unload_lora_adapter", json={**UNLOAD, **fields}, headers=self.headers)

    @property
    def loaded(self) -> list[dict[str, str]]:
        return [port.loaded for port in self.ports]


@pytest.fixture
def serve(rack, tokenizer, monkeypatch):
    monkeypatch.setattr(adapter_updates, "RETRY_S", 0.0)

    @asynccontextmanager
    async def start(**config):
        for name, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            rack.add(name, MockBehavior(token=lambda *_: EOS, eos=EOS), role)
        async with (
            live_gateway(rack.context, tokenizer, rack.engines, **config) as live,
            adapter_ports(live.chooser) as ports,
        ):
            headers = {"authorization": f"Bearer {live.order_token}"}
            yield Fleet(live.http, live.chooser, ports, headers)

    return start


@pytest.fixture
async def fleet(serve):
    async with serve() as fleet:
        yield fleet


def results(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {each["worker"]: each["state"] for each in answer.json()["workers"]}


def error(answer: httpx.Response) -> tuple[int, str | None, str]:
    problem = answer.json()["error"]
    assert set(problem) == {"message", "type", "param", "code"}
    return answer.status_code, problem["param"], problem["message"]


async def test_loaded_adapter_is_on_all_workers_and_serves(fleet):
    answer = await fleet.load()
    assert results(answer) == {"p": "loaded", "d0": "loaded", "d1": "loaded"}
    body = answer.json()
    assert (body["model"], body["lora_name"], body["digest"]) == ("mock", "sql", CONTENT["one"])
    assert body["message"] == "Success: LoRA adapter 'sql' added successfully."
    assert fleet.loaded == [{"sql": CONTENT["one"]}] * 3
    chat = await fleet.http.post("/v1/completions", json={"model": "sql", "prompt": "hi"})
    assert chat.status_code == 200
    assert results(await fleet.unload()) == {"p": "unloaded", "d0": "unloaded", "d1": "unloaded"}
    assert fleet.loaded == [{}] * 3
    assert (await fleet.http.post("/v1/completions", json={"model": "sql", "prompt": "hi"})).status_code == 404


async def test_one_worker_reads_and_the_others_get_its_digest(fleet):
    await fleet.load()
    digests = {port.chooser.fleet[port.number].worker_id: order.digest for port in fleet.ports for order in port.orders}
    assert digests == {"d0": "", "d1": CONTENT["one"], "p": CONTENT["one"]}


async def test_commands_read_no_certificates(fleet, monkeypatch):
    """That takes 25 ms of the event loop for each worker."""
    read: list[object] = []
    monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: read.append(1) or ssl.SSLContext())
    await fleet.load()
    assert fleet.loaded == [{"sql": CONTENT["one"]}] * 3
    assert read == []


async def test_repeated_load_changes_nothing(fleet):
    await fleet.load()
    assert results(await fleet.load()) == {"p": "unchanged", "d0": "unchanged", "d1": "unchanged"}
    assert fleet.loaded == [{"sql": CONTENT["one"]}] * 3


async def test_taken_name_needs_load_inplace(fleet):
    await fleet.load()
    status, param, message = error(await fleet.load(lora_path="two"))
    assert (status, param, "'sql' is loaded already" in message) == (400, "lora_name", True)
    assert fleet.loaded == [{"sql": CONTENT["one"]}] * 3
    replaced = await fleet.load(lora_path="two", load_inplace=True)
    assert results(replaced) == {"p": "replaced", "d0": "replaced", "d1": "replaced"}
    assert fleet.loaded == [{"sql": CONTENT["two"]}] * 3


async def test_worker_with_other_files_undoes_the_load(fleet):
    fleet.ports[0].contents["one"] = CONTENT["two"]
    status, _, message = error(await fleet.load())
    assert status == 503
    assert f"p: lora_path: the content of adapter 'sql' has the digest {CONTENT['two']} here" in message
    assert message.endswith("No other worker has changed.")
    assert fleet.loaded == [{}] * 3


async def test_worker_that_cannot_load_undoes_no_former_adapter(fleet):
    await fleet.load()
    del fleet.ports[2].contents["two"]
    status, _, message = error(await fleet.load(lora_path="two", load_inplace=True))
    assert (status, message.endswith("Other workers have carried it out: repeat the command.")) == (503, True)
    assert fleet.loaded == [{"sql": CONTENT["two"]}, {"sql": CONTENT["two"]}, {"sql": CONTENT["one"]}]
    fleet.ports[2].contents["two"] = CONTENT["two"]
    again = await fleet.load(lora_path="two", load_inplace=True)
    assert results(again) == {"p": "unchanged", "d0": "unchanged", "d1": "replaced"}


async def test_worker_without_a_usable_reply_is_tried_again(fleet):
    fleet.ports[2].broken = 2
    assert results(await fleet.load())["d1"] == "loaded"
    assert len(fleet.ports[2].orders) == 3
    fleet.ports[1].broken = 2
    assert results(await fleet.unload())["d0"] == "unloaded"


async def test_adapter_load_on_hanging_engine_is_tried_once(fleet):
    fleet.ports[2].hung = True
    status, _, message = error(await fleet.load())
    assert (status, "1 workers have not carried out the command (d1: the engine did not answer" in message) == (
        503,
        True,
    )
    assert message.endswith("No other worker has changed.")
    assert fleet.loaded == [{}] * 3
    # The second is the one that undoes what it may have done.
    assert [type(order) for order in fleet.ports[2].orders] == [LoadAdapter, UnloadAdapter]


async def test_next_worker_reads_where_the_first_hangs(fleet):
    fleet.ports[1].hung = True
    status, _, message = error(await fleet.load())
    assert (status, "(d0: the engine did not answer" in message) == (503, True)
    assert fleet.loaded == [{}] * 3
    assert [order.digest for order in fleet.ports[2].orders] == ["", CONTENT["one"]]


async def test_worker_that_does_not_take_commands_is_400(fleet):
    def refuse(_: object) -> None:
        raise OrderRefusedError(OrderRefused(nonce=1, code="config_error", message="adapters change at start alone"))

    for port in fleet.ports:
        port.on_order = refuse
    for answer in (await fleet.load(), await fleet.unload()):
        assert error(answer) == (400, None, "adapters change at start alone")


async def test_worker_without_a_port_undoes_the_load(fleet):
    fleet.chooser.fleet[2] = replace(fleet.chooser.fleet[2], health_endpoint="http://127.0.0.1:1")
    status, _, message = error(await fleet.load())
    assert (status, "d1: its health port does not answer (ConnectError)" in message) == (503, True)
    # Addresses are for the log.
    assert "127.0.0.1" not in message
    assert fleet.loaded == [{}] * 3


async def test_worker_that_has_left_does_not_count(fleet):
    incarnation = fleet.chooser.fleet[2].incarnation
    fleet.ports[2].broken = 9
    fleet.ports[2].on_order = lambda _: fleet.chooser.dead.add(incarnation)
    assert results(await fleet.load()) == {"p": "loaded", "d0": "loaded"}
    assert len(fleet.ports[2].orders) == 1


async def test_worker_that_joins_during_a_load_has_it(fleet):
    late = fleet.chooser.fleet[2].incarnation
    fleet.chooser.dead.add(late)
    fleet.ports[0].on_order = lambda _: fleet.chooser.dead.discard(late)
    assert results(await fleet.load()) == {"p": "loaded", "d0": "loaded", "d1": "loaded"}


async def test_undoing_spares_what_another_gateway_has_loaded(fleet):
    def replace_on_d0(order: object) -> None:
        if isinstance(order, UnloadAdapter):
            return
        assert isinstance(order, LoadAdapter)
        fleet.ports[1].carry_out(LoadAdapter(nonce=1, name="sql", path="two", replaces=True))

    del fleet.ports[2].contents["one"]
    fleet.ports[2].on_order = replace_on_d0
    status, _, message = error(await fleet.load())
    assert (status, fleet.loaded) == (503, [{}, {"sql": CONTENT["two"]}, {}])
    assert message.endswith("Other workers have carried it out: repeat the command.")


async def test_full_worker_is_503_with_retry_after(fleet):
    for port in fleet.ports:
        port.table.limit = 0
    answer = await fleet.load()
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert "--max-cpu-loras is 0" in answer.json()["error"]["message"]


async def test_adapter_load_without_workers_returns_503(fleet):
    fleet.chooser.dead.update(view.incarnation for view in fleet.chooser.fleet)
    answer = await fleet.load()
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert error(await fleet.unload())[0] == 404


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"lora_name": "mock"}, 400, "lora_name"),
        ({"lora_name": "a/b"}, 400, "lora_name"),
        ({"lora_name": ""}, 400, "lora_name"),
        ({"lora_name": "é" * 65}, 400, "lora_name"),
        ({"lora_name": "mock:mock"}, 400, "lora_name"),
        ({"lora_name": "other:sql"}, 404, "lora_name"),
        ({"lora_name": 7}, 400, "lora_name"),
        ({"lora_path": "none"}, 400, "lora_path"),
        ({"lora_path": ""}, 400, "lora_path"),
        ({"lora_path": "one\0"}, 400, "lora_path"),
        ({"lora_path": "x" * 4097}, 400, "lora_path"),
        ({"load_inplace": "yes"}, 400, "load_inplace"),
        ({"rank": 4}, 400, "rank"),
    ],
)
async def test_bad_load_names_its_field_and_changes_nothing(fleet, fields, status, param):
    assert error(await fleet.load(**fields))[:2] == (status, param)
    assert fleet.loaded == [{}] * 3


async def test_unknown_adapter_cannot_be_unloaded(fleet):
    assert error(await fleet.unload())[:2] == (404, "lora_name")
    assert error(await fleet.unload(lora_name="other:sql"))[:2] == (404, "lora_name")
    await fleet.load()
    assert results(await fleet.unload(lora_name="mock:sql", lora_int_id=1))["p"] == "unloaded"
    assert error(await fleet.unload())[:2] == (404, "lora_name")


async def test_former_releases_unload_names_alone(fleet):
    """They load nothing for requests, and refuse commands with fields that they do not have."""
    await fleet.load()
    view = fleet.chooser.fleet[1]
    fleet.chooser.fleet[1] = replace(view, adapter_memory=AdapterMemory(limit=4))
    await fleet.unload()
    commands = [port.orders[-1] for port in fleet.ports]
    assert [command.cached for command in commands] == ["", CONTENT["one"], ""]


async def test_worker_without_the_adapter_is_absent_in_an_unload(fleet):
    await fleet.load()
    fleet.ports[1].table.remove("sql")
    fleet.ports[1].report()
    assert results(await fleet.unload()) == {"p": "unloaded", "d0": "absent", "d1": "unloaded"}


async def test_without_keys_a_command_needs_the_order_token(fleet):
    for path, body in (("/v1/load_lora_adapter", LOAD), ("/unload_lora_adapter", UNLOAD)):
        assert error(await fleet.http.post(path, json=body))[0] == 401
        foreign = {**fleet.headers, "origin": "http://evil.example"}
        assert error(await fleet.http.post(path, json=body, headers=foreign))[0] == 403
    assert not any(port.orders for port in fleet.ports)


async def test_with_keys_a_command_needs_an_administrators_key(serve, tmp_path):
    keys = write_keys(tmp_path, ann={}, root={"admin": True})
    async with serve(api_keys=keys) as fleet:
        for headers, status in ((bearer("ann"), 403), (fleet.headers, 401), ({}, 401)):
            fleet.headers = headers
            assert error(await fleet.load())[0] == status
        assert not any(port.orders for port in fleet.ports)
        fleet.headers = bearer("root")
        assert (await fleet.load()).status_code == 200
        assert (await fleet.unload()).status_code == 200


async def test_command_behind_one_that_hangs_is_refused(fleet, monkeypatch):
    """A worker may take half an hour to find that its engine hangs."""
    began, answers = asyncio.Event(), asyncio.Event()
    fleet.ports[1].answers, fleet.ports[1].on_order = answers, lambda _: began.set()
    first = asyncio.create_task(fleet.load())
    await began.wait()
    monkeypatch.setattr(adapter_updates, "TURN_S", 0.0)
    for refused in (await fleet.load(lora_name="other"), await fleet.unload()):
        status, _, message = error(refused)
        assert (status, message) == (503, "Another command about an adapter is running. Try again later.")
        assert "retry-after" in refused.headers
    answers.set()
    assert results(await first) == {"p": "loaded", "d0": "loaded", "d1": "loaded"}
    assert results(await fleet.unload()) == {"p": "unloaded", "d0": "unloaded", "d1": "unloaded"}
