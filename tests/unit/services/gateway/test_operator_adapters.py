"""Adapters that the Kubernetes operator loads: its own client against the admin port of a gateway."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx
import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import Role
from tandem_operator.planning.adapters import HeldAdapter, Load, Unload, WantedAdapter
from tandem_operator.telemetry.adapter_orders import announce, registered_adapters, send_command
from tandem_operator.telemetry.worker_control import ModelAt, OrderFailedError
from tandem_services.common.health import Health
from tandem_services.gateway.admin import create_admin_app
from tandem_services.gateway.api.operator_adapters import ANNOUNCE, LIST, MAX_FAILED
from tandem_services.gateway.app import build_gateway
from tandem_services.gateway.models import adapter_updates
from tandem_services.gateway.models.adapters import AdapterNames
from tandem_services.gateway.models.adapters import HeldAdapter as HeldThere
from tandem_testing.adapter_ports import CONTENT, AdapterPort, adapter_ports
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior
from tandem_testing.pod_builders import pod
from tandem_testing.tokenizer_builders import EOS

TOKEN = "t" * 64
CLUSTER = config_of().models[0].cluster
GATEWAY = pod("g", "gateway", revision="")
SQL = WantedAdapter(name="sql", folder="one")


@dataclass
class Served:
    """A gateway with a prefill and a decode worker."""

    client: httpx.AsyncClient
    ports: list[AdapterPort]

    async def send(self, command: Load | Unload):
        return await send_command(self.client, GATEWAY, TOKEN, command)

    async def load(self, wanted: WantedAdapter = SQL, digest: str = ""):
        return await self.send(Load(wanted=wanted, digest=digest))

    async def registered(self):
        return (await registered_adapters(self.client, GATEWAY, TOKEN)).held

    async def announced(self):
        return (await registered_adapters(self.client, GATEWAY, TOKEN)).announced


@pytest.fixture
async def served(rack, tokenizer, monkeypatch, tmp_path):
    """Clients of its API need keys, which the operator does not have."""
    monkeypatch.setattr(adapter_updates, "RETRY_S", 0.0)
    async with serving(rack, tokenizer, write_keys(tmp_path, alice={})) as one:
        yield one


@asynccontextmanager
async def serving(rack, tokenizer, keys):
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        rack.add(name, MockBehavior(token=lambda *_: EOS, eos=EOS), role)
    config = config_of(admin_port=1, api_keys=keys)
    chooser = FakeChooser([engine.view for engine in rack.engines])
    fleet = fleet_of(config, chooser, SessionShelf(), rack.context, tokenizer)
    gateway = build_gateway(config, [fleet], clock=MonotonicClock(), health=Health())
    gateway = replace(gateway, order_access=replace(gateway.order_access, token=TOKEN))
    transport = httpx.ASGITransport(app=create_admin_app(gateway, drain=lambda: None), client=("10.9.9.9", 5))
    try:
        async with httpx.AsyncClient(transport=transport) as client, adapter_ports(chooser) as ports:
            yield Served(client, ports)
    finally:
        await gateway.close()


async def test_adapter_is_loaded_listed_and_unloaded(served):
    assert await served.registered() == {}
    done = await served.load()
    assert (done.done, done.failed) == (True, {})
    workers = frozenset({"p", "d"})
    assert await served.registered() == {"sql": HeldAdapter(digest=CONTENT["one"], folder="one", workers=workers)}
    assert (await served.send(Unload(name="sql"))).done
    assert await served.registered() == {}
    assert [port.loaded for port in served.ports] == [{}, {}]


async def test_spec_replaces_what_a_name_stands_for(served):
    await served.load()
    assert (await served.load(replace(SQL, folder="two"))).done
    held = (await served.registered())["sql"]
    assert (held.digest, held.folder) == (CONTENT["two"], "two")


async def test_other_content_than_the_digest_is_refused(served):
    report = await served.load(digest="f" * 32)
    assert not report.done
    assert f"digest {CONTENT['one']} here" in report.message
    assert list(report.failed) == ["d"], "the worker that has read it is named"
    assert await served.registered() == {}
    assert [port.loaded for port in served.ports] == [{}, {}]


async def test_each_failed_worker_is_named_with_its_reason(served):
    prefill = next(port for port in served.ports if port.chooser.fleet[port.number].worker_id == "p")
    del prefill.contents["one"]
    report = await served.load()
    assert (report.done, list(report.failed)) == (False, ["p"])
    assert "no such folder" in report.failed["p"]


async def test_pinned_adapter_is_pinned_on_workers(served):
    await served.load(replace(SQL, pinned=True))
    assert [order.pinned for port in served.ports for order in port.orders] == [True, True]


async def test_load_or_unload_of_a_wrong_adapter_name_is_answered_with_a_reason(served):
    report = await served.load(replace(SQL, name="a/b"))
    assert (report.done, "a name has 1 to 128 bytes" in report.message) == (False, True)
    missing = await served.send(Unload(name="sql"))
    assert (missing.done, missing.message) == (False, "The adapter 'sql' is not loaded.")


async def test_one_of_several_models_is_selected_by_name(served):
    mock, other = ModelAt("mock", CLUSTER), ModelAt("other", CLUSTER)
    assert (await send_command(served.client, GATEWAY, TOKEN, Load(wanted=SQL, digest=""), model=mock)).done
    assert list((await registered_adapters(served.client, GATEWAY, TOKEN, model=mock)).held) == ["sql"]
    with pytest.raises(OrderFailedError, match="404: .*no model 'other' is served here yet"):
        await registered_adapters(served.client, GATEWAY, TOKEN, model=other)
    report = await send_command(served.client, GATEWAY, TOKEN, Unload(name="sql"), model=other)
    assert (report.done, "no model 'other'" in report.message) == (False, True)


async def test_command_about_another_fleet_changes_no_adapter(served):
    await served.load()
    elsewhere = ModelAt("mock", "another")
    with pytest.raises(OrderFailedError, match="404: .*no model 'mock' is served here yet"):
        await registered_adapters(served.client, GATEWAY, TOKEN, model=elsewhere)
    for command in (Unload(name="sql"), Load(wanted=replace(SQL, folder="two"), digest="")):
        assert not (await send_command(served.client, GATEWAY, TOKEN, command, model=elsewhere)).done
    assert (await served.registered())["sql"].folder == "one"


@pytest.mark.parametrize("token", ["x" * 64, ""], ids=["another", "none"])
async def test_request_without_the_token_is_rejected(served, token):
    with pytest.raises(OrderFailedError, match="401"):
        await registered_adapters(served.client, GATEWAY, token)
    report = await send_command(served.client, GATEWAY, token, Load(wanted=SQL, digest=""))
    assert (report.done, "401" in report.message) == (False, True)
    with pytest.raises(OrderFailedError, match="401"):
        await announce(served.client, GATEWAY, token, ["sql"])
    assert await served.announced() == frozenset()
    headers = bearer("alice")
    assert (await served.client.get(GATEWAY.url("admin", "/operator/adapters"), headers=headers)).status_code == 401


async def test_operator_gets_a_bounded_number_of_failed_workers(served, monkeypatch):
    await served.load()
    everywhere = {f"d{number:03d}": "no such folder" for number in range(4 * MAX_FAILED)}
    monkeypatch.setattr(AdapterNames, "_failures", lambda _: {CONTENT["one"]: everywhere})
    found = await served.registered()
    assert found["sql"].failed == dict(sorted(everywhere.items())[:MAX_FAILED])
    assert found["sql"].failures == len(everywhere)


async def test_operator_of_a_former_release_gets_lists(served):
    await served.load()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = (await served.client.get(GATEWAY.url("admin", LIST), headers=headers)).json()
    [adapter] = answer["adapters"]
    assert (adapter["workers"], adapter["held"], answer["table"]) == (["d", "p"], "", None)


async def test_adapters_of_a_thousand_workers_take_little(served, monkeypatch):
    workers = [f"chat-decode-{number:04d}-abcde" for number in range(1000)]
    held = [
        HeldThere(
            id=f"mock:adapter-{number:03d}@{'a' * 32}",
            model="mock",
            name=f"adapter-{number:03d}",
            digest="a" * 32,
            rank=16,
            root="r",
            requested=True,
            registered=True,
            source=f"claims/adapters/{number}",
            workers=workers[number:],
            num_workers=1000 - number,
            failed=dict.fromkeys(workers, "x" * 512),
            num_failed=1000,
        )
        for number in range(256)
    ]
    monkeypatch.setattr(AdapterNames, "held", lambda *_: held)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = await served.client.get(GATEWAY.url("admin", f"{LIST}?workers=table"), headers=headers)
    assert len(answer.content) < 512 << 10
    found = await served.registered()
    assert {name: len(one.workers) for name, one in found.items()} == {
        one.name: 1000 - number for number, one in enumerate(held)
    }
    assert found["adapter-255"].workers == {*workers[255:]}
    assert {(one.failures, len(one.failed)) for one in found.values()} == {(1000, 2)}


async def test_announced_names_replace_those_before(served):
    assert await served.announced() == frozenset()
    await announce(served.client, GATEWAY, TOKEN, ["sql", "law"])
    assert await served.announced() == {"sql", "law"}
    await announce(served.client, GATEWAY, TOKEN, [])
    assert await served.announced() == frozenset()


@pytest.mark.parametrize("names", [["a/b"], ["x" * 129], [""]])
async def test_wrong_announced_name_changes_nothing(served, names):
    await announce(served.client, GATEWAY, TOKEN, ["sql"])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = await served.client.post(GATEWAY.url("admin", ANNOUNCE), headers=headers, json={"lora_names": names})
    assert answer.json()["done"] is False
    assert await served.announced() == {"sql"}
