"""Several model services behind one gateway: routing, access, and what they have in common."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.config import GatewayConfig, ModelConfig
from tandem_services.gateway.fleets import load_tokenizers
from tandem_services.gateway.models.service import Fleet
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, events, script, serving_fleets
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.metric_text import metric_sum
from tandem_testing.mock_engine import MockBehavior, MockEngine, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer
from tandem_testing.waiting import until

THOUGHT = "<think>\nHm.\n</think>\nI am qwen."


@dataclass
class Served:
    """One model of the gateway."""

    engine: MockEngine
    chooser: FakeChooser
    sessions: SessionShelf


@dataclass
class Both:
    http: httpx.AsyncClient
    llama: Served
    qwen: Served

    async def ask(self, model: str, key: str = "", path: str = "/v1/chat/completions", **fields) -> httpx.Response:
        prompt: dict = (
            {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
        )
        headers = bearer(key) if key else {}
        return await self.http.post(path, json={"model": model, **prompt, **fields}, headers=headers)

    async def metric(self, name: str) -> float:
        return metric_sum((await self.http.get("/metrics")).text, name)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> TextTokenizer:
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("qwen"), chat_template=THINKING_CHATML))


@pytest.fixture
def both(rack, tokenizer, thinking):
    """llama, also called gpt, which says so in plain text; qwen, which reasons and knows tools."""

    def add(config: ModelConfig, tokenizer: TextTokenizer, text: str) -> tuple[Fleet, Served]:
        says = MockBehavior(token=scripted_tokens(script(tokenizer, text, eos=EOS)), eos=EOS)
        engine = rack.add(config.name, says)
        engine.model, engine.context_length = config.name, 4096 if config.name == "qwen" else 512
        chooser, sessions = FakeChooser([engine.view]), SessionShelf()
        parts = {"chooser": chooser, "sessions": sessions, "context": rack.context, "tokenizer": tokenizer}
        return Fleet(config=config, **parts), Served(engine, chooser, sessions)

    @asynccontextmanager
    async def start(**config):
        models = (
            ModelConfig(path=Path(), names=("llama", "gpt"), cluster="one", max_waiting=0, recovery_s=0.5),
            ModelConfig(path=Path(), names=("qwen",), cluster="two", recovery_s=0.5),
        )
        (first, llama), (second, qwen) = add(models[0], tokenizer, "I am llama."), add(models[1], thinking, THOUGHT)
        settings = GatewayConfig(models=models, ping_interval_s=5.0, **config)
        async with serving_fleets(settings, [first, second]) as http:
            yield Both(http, llama, qwen)

    return start


# Routing


async def test_each_model_answers_for_itself_in_its_own_dialect(both):
    async with both() as gateway:
        llama, qwen = (await gateway.ask("llama")).json(), (await gateway.ask("qwen")).json()
        tools = [{"type": "function", "function": {"name": "f"}}]
        refused, taken = await gateway.ask("llama", tools=tools), await gateway.ask("qwen", tools=tools)
    assert llama["choices"][0]["message"]["content"] == "I am llama."
    message = qwen["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("I am qwen.", "Hm.")
    assert (refused.status_code, refused.json()["error"]["param"], taken.status_code) == (400, "tools", 200)
    for served, name in ((gateway.llama, "llama"), (gateway.qwen, "qwen")):
        assert {query.model for query in served.chooser.queries} == {name}
        assert served.chooser.open == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_alias_maps_to_model_and_response_names_the_alias(both, path, stream):
    async with both() as gateway:
        answer = await gateway.ask("gpt", path=path, stream=stream)
        assert {chunk["model"] for chunk in (events(answer) if stream else [answer.json()])} == {"gpt"}
        explained = (await gateway.http.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")).json()
        assert (explained["model"], explained["requested_model"]) == ("llama", "gpt")
        assert [query.model for query in gateway.llama.chooser.queries] == ["llama"]
        series = f'tandem_gateway_requests_total{{model_name="llama",endpoint="{path}",code="200"}}'
        assert await gateway.metric(series) == 1
        text = (await gateway.http.get("/metrics")).text
    assert "gpt" not in text
    assert not gateway.qwen.engine.received


async def test_other_endpoints_route_by_model_name(both):
    async with both() as gateway:
        embedded = await gateway.http.post("/v1/embeddings", json={"model": "gpt", "input": "hi"})
        answer = await gateway.http.post("/v1/responses", json={"model": "qwen", "input": "hi"})
        counted = await gateway.http.post("/tokenize", json={"model": "qwen", "prompt": "hi"})
        unnamed = await gateway.http.post("/tokenize", json={"prompt": "hi"})
    assert (embedded.json()["model"], len(gateway.llama.engine.received)) == ("gpt", 1)
    assert [item["type"] for item in answer.json()["output"]] == ["reasoning", "message"]
    assert counted.json()["max_model_len"] == 4096
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")


async def test_unknown_models_are_404_and_no_metric(both):
    async with both() as gateway:
        answer = await gateway.ask("gpt-5")
        text = (await gateway.http.get("/metrics")).text
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "The model 'gpt-5' does not exist. Available: llama, gpt, qwen."
    assert "gpt-5" not in text


async def test_sessions_belong_to_a_model(both):
    async with both() as gateway:
        assert (await gateway.http.post("/v1/sessions", json={"session_id": "s"})).status_code == 400
        for model in ("gpt", "qwen"):
            opened = await gateway.http.post("/v1/sessions", json={"model": model, "session_id": "s"})
            assert opened.status_code == 200
        assert (len(gateway.llama.sessions.bindings), len(gateway.qwen.sessions.bindings)) == (1, 1)
        closed = await gateway.http.delete("/v1/sessions/s?model=llama")
        assert closed.status_code == 200
        assert (
            await gateway.http.post("/close_session", json={"session_id": "s", "model": "llama"})
        ).status_code == 404
    assert (len(gateway.llama.sessions.bindings), len(gateway.qwen.sessions.bindings)) == (0, 1)


def test_models_of_one_folder_share_its_tokenizer(tmp_path):
    folder = write_tokenizer(tmp_path)
    models = [ModelConfig(path=folder, names=(name,)) for name in ("a", "b")]
    assert load_tokenizers(models).keys() == {folder}


# What one does to the other


async def test_full_or_absent_model_does_not_affect_other_model(both):
    async with both() as gateway:
        gateway.llama.chooser.room = 0
        assert (await gateway.ask("llama")).status_code == 503
        assert (await gateway.ask("qwen")).status_code == 200
        assert await gateway.metric('tandem_gateway_queue_refusals_total{model_name="llama"}') == 1
        assert await gateway.metric('tandem_gateway_queue_refusals_total{model_name="qwen"}') == 0
        gateway.llama.chooser.fleet.clear()
        assert (await gateway.http.get("/ready")).status_code == 200
        gateway.qwen.chooser.fleet.clear()
        assert (await gateway.http.get("/ready")).status_code == 503


async def test_quarantine_is_per_model(both, rack):
    deadly = [5, 6, 7]
    async with both() as gateway:
        spare = rack.add("spare", MockBehavior(token=lambda *_: EOS, eos=EOS))
        spare.model = "llama"
        gateway.llama.chooser.fleet.append(spare.view)
        for engine in (gateway.llama.engine, spare):
            engine.behavior.dies_of = tuple(deadly)
        answers = [
            await gateway.ask(model, path="/v1/completions", prompt=deadly) for model in ("llama", "gpt", "qwen")
        ]
        assert await gateway.metric('tandem_gateway_quarantine_refusals_total{model_name="llama"}') == 1
    assert [answer.status_code for answer in answers] == [500, 500, 200]
    assert answers[1].json()["error"]["code"] == "request_quarantined"


# Access


@pytest.fixture
def keys(tmp_path):
    models = {"all": None, "llama": ["llama"], "gpt": ["gpt"], "qwen": ["qwen"], "none": []}
    entries = {name: {} if allowed is None else {"models": allowed} for name, allowed in models.items()}
    return write_keys(tmp_path, **entries, rpm={"requests_per_minute": 2})


async def test_key_sees_and_uses_the_names_it_may(both, keys):
    listed = {
        "all": ["llama", "gpt", "qwen"],
        "llama": ["llama", "gpt"],
        "gpt": ["gpt"],
        "qwen": ["qwen"],
        "none": [],
    }
    async with both(api_keys=keys) as gateway:
        for key, names in listed.items():
            cards = (await gateway.http.get("/v1/models", headers=bearer(key))).json()["data"]
            assert [card["id"] for card in cards] == names
            for name in listed["all"]:
                expected = 200 if name in names else 404
                assert (await gateway.ask(name, key)).status_code == expected
                found = await gateway.http.get(f"/v1/models/{name}", headers=bearer(key))
                assert found.status_code == expected
        hidden = (await gateway.ask("llama", "gpt")).json()["error"]
    assert hidden["message"] == "The model 'llama' does not exist. Available: gpt."
    assert hidden["code"] == "model_not_found"


async def test_cards_say_what_an_alias_stands_for(both):
    async with both() as gateway:
        cards = (await gateway.http.get("/v1/models")).json()["data"]
    facts = [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in cards]
    assert facts == [("llama", "llama", None, 512), ("gpt", "llama", None, 512), ("qwen", "qwen", None, 4096)]


async def test_limits_of_a_key_count_the_requests_to_all_models(both, keys):
    async with both(api_keys=keys) as gateway:
        answers = [(await gateway.ask(model, "rpm")).status_code for model in ("llama", "qwen", "llama")]
    assert answers == [200, 200, 429]


async def test_requests_to_one_model_wait_while_the_others_are_served(both, rack):
    async with both() as gateway:
        gateway.qwen.chooser.room = 0
        waiting = asyncio.create_task(gateway.ask("qwen"))
        series = 'tandem_gateway_num_requests_waiting{model_name="qwen"}'
        await until(lambda: _is(gateway, series, 1.0), 60.0, "qwen's request waits")
        assert (await gateway.ask("llama")).status_code == 200
        gateway.qwen.chooser.room = 1
        assert (await waiting).status_code == 200


async def _is(gateway: Both, series: str, value: float) -> bool:
    return await gateway.metric(series) == value
