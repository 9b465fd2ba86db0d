"""Adapters behind a gateway: what a name stands for, for which key, and what its requests carry."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem_engine.config import Role
from tandem_engine.messages.control import AdapterMemory, FailedAdapter, ServedAdapter
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_services.gateway.config import GatewayConfig, ModelConfig
from tandem_services.gateway.models import model as model_module
from tandem_services.gateway.models.adapters import AdapterNames
from tandem_services.gateway.models.service import Fleet
from tandem_services.router.decision import RouteDecision, RouteQuery, WorkerView
from tandem_services.router.registered_adapters import MAX_ANNOUNCED, RegisteredAdapters
from tandem_testing.gateway_builders import FULL, FakeChooser, SessionShelf, serving_fleets
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.metric_text import metric_sum
from tandem_testing.mock_engine import MockBehavior
from tandem_testing.router_builders import make_view
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until


def adapter(name: str, digit: str = "1") -> ServedAdapter:
    return ServedAdapter(name=name, digest=digit * 32, rank=4, root=f"folder-{name}")


def worker(incarnation: str, *adapters: ServedAdapter, **facts: Any) -> WorkerView:
    name, _, number = incarnation.partition("@")
    return make_view(name, number=int(number), adapters={each.name: each for each in adapters}, **facts)


def names_of(workers: Sequence[WorkerView], *, without: str = "") -> AdapterNames:
    """`without`: names of workers that take no new requests."""
    return AdapterNames(workers, offered={each.incarnation for each in workers if each.worker_id not in without})


@pytest.fixture
def fleets(rack, tokenizer):
    """llama, also called gpt, has the adapters sql, shared and qwen; qwen has shared. Yields clients, and engines."""

    @asynccontextmanager
    async def start(*, registered: Mapping[str, RegisteredAdapters] | None = None, **config):
        adapters = {
            "llama": (adapter("sql"), adapter("shared", "2"), adapter("qwen", "3")),
            "qwen": (adapter("shared", "4"),),
        }
        models = [
            ModelConfig(path=Path(), names=names, cluster=names[0], recovery_s=0.5, max_attempts=2)
            for names in (("llama", "gpt"), ("qwen",))
        ]
        engines, parts = {}, []
        for model in models:
            engine = engines[model.name] = rack.add(model.name, MockBehavior(token=lambda *_: EOS, eos=EOS))
            engine.model = model.name
            view = replace(engine.view, adapters={each.name: each for each in adapters[model.name]})
            chooser = FakeChooser([view])
            parts.append(
                Fleet(
                    config=model,
                    chooser=chooser,
                    sessions=SessionShelf(),
                    context=rack.context,
                    tokenizer=tokenizer,
                    adapters=(registered or {}).get(model.name),
                )
            )
        settings = GatewayConfig(models=tuple(models), ping_interval_s=5.0, **config)
        async with serving_fleets(settings, parts) as http:
            yield http, engines, {fleet.config.name: fleet.chooser for fleet in parts}

    return start


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("name", "model", "digit"),
    [
        ("sql", "llama", "1"),
        ("llama:sql", "llama", "1"),
        ("gpt:sql", "llama", "1"),
        ("llama:shared", "llama", "2"),
        ("qwen:shared", "qwen", "4"),
        ("llama:qwen", "llama", "3"),
        ("qwen", "qwen", None),
        ("gpt", "llama", None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_name_of_an_adapter_reaches_engine_and_router(fleets, path, name, model, digit):
    body = {"input": "hi"} if path == "/v1/embeddings" else CHAT
    async with fleets() as (http, engines, choosers):
        answer = await http.post(path, json={"model": name, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    [received] = engines[model].received
    digest = b"" if digit is None else bytes.fromhex(digit * 32)
    assert (b"" if received.adapter is None else received.adapter.digest) == digest
    assert [query.adapter for query in choosers[model].queries] == [digest]


def test_failed_loads_are_listed_by_worker_with_reasons():
    failed = FailedAdapter(name="sql", digest="1" * 32, reason="no such folder")
    broken = worker("d1@1", adapter("sql"), adapter_memory=AdapterMemory(limit=2, loads=True, failed=(failed,)))
    names = names_of([broken, worker("d2@1", adapter("sql"))])
    [held] = names.held("llama")
    assert (held.workers, held.failed) == (["d2"], {"d1": "no such folder"})


def test_name_without_workers_is_listed_for_administrators():
    names = AdapterNames([], offered=(), former={"sql": adapter("sql")})
    [held] = names.held("llama")
    assert (held.name, held.requested, held.registered, held.workers, held.failed) == ("sql", True, False, [], {})


async def test_name_of_several_adapters_needs_its_model(fleets):
    async with fleets() as (http, _, _):
        answer = await http.post("/v1/chat/completions", json={"model": "shared", **CHAT})
        cards = (await http.get("/v1/models")).json()["data"]
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("send 'llama:shared' or 'qwen:shared'.")
    facts = [(card["id"], card["root"], card["parent"]) for card in cards if card["parent"] is not None]
    assert facts == [
        ("llama:qwen", "folder-qwen", "llama"),
        ("llama:shared", "folder-shared", "llama"),
        ("sql", "folder-sql", "llama"),
        ("qwen:shared", "folder-shared", "qwen"),
    ]


@pytest.mark.parametrize("name", ["none", "llama:none", "none:sql", "sql:sql", "llama:", ":sql"])
async def test_unknown_adapter_is_404_never_the_model(fleets, name):
    async with fleets() as (http, engines, _):
        answer = await http.post("/v1/chat/completions", json={"model": name, **CHAT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert not any(engine.received for engine in engines.values())


async def test_key_needs_adapters_in_its_models(fleets, tmp_path):
    keys = write_keys(
        tmp_path, all={}, base={"models": ["llama"]}, short={"models": ["sql"]}, long={"models": ["llama:sql"]}
    )
    adapter_names = {"sql", "llama:sql"}
    allowed = {"all": {"llama", *adapter_names}, "base": {"llama"}, "short": adapter_names, "long": adapter_names}
    async with fleets(api_keys=keys) as (http, _, _):
        for key, names in allowed.items():
            for name in ("llama", "sql", "llama:sql"):
                answer = await http.post("/v1/chat/completions", json={"model": name, **CHAT}, headers=bearer(key))
                assert answer.status_code == (200 if name in names else 404), (key, name)
            cards = (await http.get("/v1/models", headers=bearer(key))).json()["data"]
            assert ("sql" in {card["id"] for card in cards}) == ("sql" in names)


async def test_missing_adapter_is_tried_elsewhere_then_503(fleets):
    gone = Finish(reason=FinishReason.ERROR, error="not here", code="adapter_missing", retryable=True)
    async with fleets() as (http, engines, _):
        engines["llama"].behavior.refuse = gone
        answer = await http.post("/v1/chat/completions", json={"model": "sql", **CHAT})
    assert answer.status_code == 503
    assert "has the adapter" in answer.json()["error"]["message"]
    assert len(engines["llama"].received) == 2


async def test_name_outlives_the_last_worker_and_its_requests_wait(fleets):
    async with fleets() as (http, engines, choosers):
        assert (await http.post("/v1/chat/completions", json={"model": "sql", **CHAT})).status_code == 200
        last = engines["llama"].view.incarnation
        choosers["llama"].dead.add(last)
        waiting = await http.post("/v1/chat/completions", json={"model": "sql", **CHAT})
        listed = {card["id"] for card in (await http.get("/v1/models")).json()["data"]}
        choosers["llama"].dead.discard(last)
        answer = await http.post("/v1/chat/completions", json={"model": "sql", **CHAT})
    assert (waiting.status_code, "retry-after" in waiting.headers, answer.status_code) == (503, True, 200)
    assert {"sql", "llama"} <= listed


async def test_name_of_flags_wakes_a_fleet_at_zero(rack, tokenizer, tmp_path):
    """The gateway has seen no worker; another one had."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    registered = RegisteredAdapters(model="mock")
    registered.note({"sql": adapter("sql")})
    model = ModelConfig(path=tmp_path, names=("mock",), from_zero=True, queue_s=60.0)
    chooser = FakeChooser([])
    parts = Fleet(
        config=model,
        chooser=chooser,
        sessions=SessionShelf(),
        context=rack.context,
        tokenizer=tokenizer,
        adapters=registered,
    )
    async with serving_fleets(GatewayConfig(models=(model,), ping_interval_s=5.0), [parts]) as http:
        listed = {card["id"]: card["parent"] for card in (await http.get("/v1/models")).json()["data"]}
        assert listed == {"mock": None, "sql": "mock"}
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json={"model": "sql", **CHAT}))
        held = "tandem_gateway_num_requests_held"

        async def is_held() -> bool:
            return metric_sum((await http.get("/metrics")).text, held) == 1

        await until(is_held, 30.0, "it is held, which starts a worker")
        unknown = await http.post("/v1/chat/completions", json={"model": "law", **CHAT})
        assert (unknown.status_code, waiting.done()) == (404, False)
        engine = rack.add("late", MockBehavior(token=lambda *_: EOS, eos=EOS))
        chooser.fleet.append(replace(engine.view, adapters={"sql": adapter("sql")}))
        assert (await waiting).status_code == 200
    [received] = engine.received
    assert received.adapter.digest == bytes.fromhex("1" * 32)


def test_names_of_a_large_fleet_cost_little():
    """Every gateway looks at them each second."""
    many = {each.name: each for each in (adapter(f"a{number}") for number in range(256))}
    counted = 0

    class Counted(dict[str, ServedAdapter]):
        def get(self, name, default=None):
            nonlocal counted
            counted += 1
            return super().get(name, default)

    shared = Counted(many)
    workers = [make_view(f"w{number}", number=1 + number, adapters=shared) for number in range(100)]
    assert names_of(workers).all() == many
    assert {each.name for each in names_of(workers).held("llama")} == many.keys()
    assert counted <= 4 * len(many), "once for all workers that have the same adapters"


def test_list_of_held_adapters_reads_each_memory_once():
    """The operator asks for it often, and no other request is served at that time."""
    reads = 0

    class Counted(tuple[Any, ...]):
        def __iter__(self):
            nonlocal reads
            reads += 1
            return super().__iter__()

        def __contains__(self, value):
            return any(each == value for each in self)

    many = {
        f"a{number}": ServedAdapter(name=f"a{number}", digest=f"{number:032x}", rank=4, root="r")
        for number in range(256)
    }
    resident = Counted(each.digest for each in many.values())
    failed = Counted([FailedAdapter(name="a7", digest=f"{7:032x}", reason="no such folder")])
    memory = AdapterMemory(limit=256, loads=True, resident=resident, failed=failed)
    workers = [
        make_view(f"w{number:02}", number=1 + number, adapters=many, adapter_memory=memory) for number in range(50)
    ]
    held = names_of(workers).held("llama")
    names = [each.worker_id for each in workers]
    assert all(each.workers == names for each in held)
    assert {each.name: list(each.failed) for each in held if each.failed} == {"a7": names}
    assert reads <= 2 * len(workers)


def test_name_stands_for_the_adapter_that_most_workers_have():
    old, new = adapter("sql", "1"), adapter("sql", "2")
    workers = [worker("a@1", old), worker("b@2", old), worker("c@10", new)]
    assert names_of(workers).find("sql") == old
    assert names_of([*workers, worker("d@9", new)]).find("sql") == new
    assert names_of([*workers[1:], worker("e@1")]).find("sql") == new
    assert names_of(workers).find("other") is None
    held = names_of(workers).held("llama")
    facts = [(each.model, each.name, each.digest[0], each.requested, each.workers) for each in held]
    assert facts == [("llama", "sql", "1", True, ["a", "b"]), ("llama", "sql", "2", False, ["c"])]


def test_workers_that_take_no_requests_decide_no_name():
    old, new = adapter("sql", "1"), adapter("sql", "2")
    workers = [worker("a@1", old), worker("b@2", new), worker("c@3", new)]
    assert names_of(workers).find("sql") == new
    assert names_of(workers, without="bc").find("sql") == old
    assert names_of(workers, without="abc").find("sql") == new


def test_prefill_workers_alone_decide_no_name():
    old, new = adapter("sql", "1"), adapter("sql", "2")
    decode = worker("a@1", old, role=Role.DECODE)
    prefill = [worker(name, new, role=Role.PREFILL) for name in ("b@2", "c@3")]
    assert names_of([decode, *prefill]).find("sql") == old
    assert names_of([decode, *prefill, worker("d@4", new, role=Role.DECODE)]).find("sql") == new
    assert names_of(prefill).find("sql") == new


class PartlyFull(FakeChooser):
    """Workers with adapters have no room for them."""

    full: bool = True

    async def choose(self, query: RouteQuery) -> RouteDecision:
        choice = await super().choose(query)
        return replace(choice, terms=(*choice.terms, FULL)) if query.adapter and self.full else choice


async def test_request_of_the_model_passes_a_full_adapter(rack, tokenizer):
    engines = [rack.add(name, MockBehavior(token=lambda *_: EOS, eos=EOS)) for name in ("w0", "w1")]
    views = [engine.view for engine in engines]
    views[0] = replace(views[0], adapters={"sql": adapter("sql")})
    chooser = PartlyFull(views)
    config = GatewayConfig(models=(ModelConfig(path=Path(), names=("mock",)),), ping_interval_s=5.0)
    parts = Fleet(
        config=config.models[0], chooser=chooser, sessions=SessionShelf(), context=rack.context, tokenizer=tokenizer
    )
    async with serving_fleets(config, [parts]) as http:
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json={"model": "sql", **CHAT}))
        await until(lambda: len(chooser.queries) > 1, 30.0, "it waits")
        answer = await http.post("/v1/chat/completions", json={"model": "mock", **CHAT})
        assert (answer.status_code, waiting.done()) == (200, False)
        assert len(engines[0].received) == 0
        assert len(engines[1].received) == 1
        [passing] = [query for query in chooser.queries if not query.adapter]
        assert passing.exclude == {views[0].incarnation}
        chooser.full = False
        assert (await waiting).status_code == 200
    assert [received.adapter is not None for received in engines[0].received] == [True]


async def is_held(http: httpx.AsyncClient, requests: int) -> bool:
    return metric_sum((await http.get("/metrics")).text, "tandem_gateway_num_requests_held") == requests


@pytest.fixture
def announcing(rack, tokenizer):
    """One model whose registered names are given."""

    @asynccontextmanager
    async def start(registered: RegisteredAdapters, **config):
        model = ModelConfig(path=Path(), names=("mock",), cluster="mock", recovery_s=0.5, max_attempts=2, **config)
        engine = rack.add("mock", MockBehavior(token=lambda *_: EOS, eos=EOS))
        view = replace(engine.view, adapters={}, adapter_memory=AdapterMemory(limit=2, loads=True))
        fleet = Fleet(
            config=model,
            chooser=FakeChooser([view]),
            sessions=SessionShelf(),
            context=rack.context,
            tokenizer=tokenizer,
            adapters=registered,
        )
        async with serving_fleets(GatewayConfig(models=(model,), ping_interval_s=5.0), [fleet]) as http:
            yield http, engine

    return start


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_request_of_an_announced_adapter_waits_for_it(announcing, path):
    registered = RegisteredAdapters(model="mock")
    await registered.announce(["sql"])
    body = {"input": "hi"} if path == "/v1/embeddings" else CHAT
    async with announcing(registered) as (http, engine):
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("mock", None), ("sql", "mock")]
        assert (await http.get("/v1/models/sql")).json()["parent"] == "mock"
        answer = asyncio.create_task(http.post(path, json={"model": "sql", **body}))
        await until(lambda: is_held(http, 1), 30.0, "the request is held")
        assert engine.received == []
        await registered.register(adapter("sql", "7"), source="folder")
        assert (await answer).status_code == 200
        assert metric_sum((await http.get("/metrics")).text, "tandem_gateway_num_requests_held") == 0
    [received] = engine.received
    assert received.adapter.digest == bytes.fromhex("7" * 32)


async def test_withdrawn_announcement_is_404(announcing):
    registered = RegisteredAdapters(model="mock")
    await registered.announce(["sql"])
    async with announcing(registered) as (http, engine):
        answer = asyncio.create_task(http.post("/v1/chat/completions", json={"model": "sql", **CHAT}))
        await until(lambda: is_held(http, 1), 30.0, "the request waits")
        await registered.announce([])
        assert (await answer).status_code == 404
        again = await http.post("/v1/chat/completions", json={"model": "sql", **CHAT})
    assert (again.status_code, engine.received) == (404, [])


async def test_adapter_that_no_worker_loads_in_time_is_503(announcing):
    registered = RegisteredAdapters(model="mock")
    await registered.announce(["sql"])
    async with announcing(registered, queue_s=0.2, start_wait_s=0.2) as (http, engine):
        answer = await http.post("/v1/chat/completions", json={"model": "sql", **CHAT})
    assert (answer.status_code, answer.headers["retry-after"], engine.received) == (503, "5", [])
    assert "No worker has loaded the adapter 'sql' yet" in answer.text


async def test_requests_of_announced_adapters_are_bounded(announcing):
    registered = RegisteredAdapters(model="mock")
    await registered.announce(["sql"])
    async with announcing(registered, max_waiting=1) as (http, _):
        body = {"model": "sql", **CHAT}
        first = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(lambda: is_held(http, 1), 30.0, "the first waits")
        further = [await http.post("/v1/chat/completions", json=body) for _ in range(2)]
        assert [("Too many" in answer.text, answer.status_code) for answer in further] == [(True, 503)] * 2
        first.cancel()
        await until(lambda: is_held(http, 0), 30.0, "its client has left")
        later = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(lambda: is_held(http, 1), 30.0, "its place is free")
        await registered.announce([])
        assert (await later).status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_request_of_an_announced_adapter_holds_no_body(announcing, path):
    """Bodies in flight are bounded for all models together, and it may wait for minutes."""
    registered = RegisteredAdapters(model="mock")
    await registered.announce(["sql"])
    body = {"input": "hi"} if path == "/v1/embeddings" else CHAT
    async with announcing(registered) as (http, _):
        answer = asyncio.create_task(http.post(path, json={"model": "sql", **body}))
        await until(lambda: is_held(http, 1), 30.0, "it waits")
        assert metric_sum((await http.get("/metrics")).text, "tandem_gateway_request_body_bytes") == 0
        await registered.announce([])
        assert (await answer).status_code == 404


async def test_announced_name_of_another_model_is_listed_with_models(fleets):
    registered = RegisteredAdapters(model="qwen")
    await registered.announce(["sql"])
    async with fleets(registered={"qwen": registered}) as (http, _, _):
        cards = (await http.get("/v1/models")).json()["data"]
        answers = {name: await http.get(f"/v1/models/{name}") for name in ("sql", "llama:sql", "qwen:sql")}
    assert {card["id"] for card in cards if card["id"].endswith("sql")} == {"llama:sql", "qwen:sql"}
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "sql": 400,
        "llama:sql": 200,
        "qwen:sql": 200,
    }


async def test_list_of_many_announced_adapters_looks_at_the_fleet_once(announcing, monkeypatch):
    registered = RegisteredAdapters(model="mock")
    await registered.announce([f"sql-{number}" for number in range(MAX_ANNOUNCED)])
    views = []

    class CountedNames(AdapterNames):
        def __init__(self, *args: Any, **facts: Any) -> None:
            views.append(self)
            super().__init__(*args, **facts)

    async with announcing(registered) as (http, _):
        monkeypatch.setattr(model_module, "AdapterNames", CountedNames)
        cards = (await http.get("/v1/models")).json()["data"]
    assert len(cards) == 1 + MAX_ANNOUNCED
    assert len(views) < 10
