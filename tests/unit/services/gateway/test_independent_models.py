"""Models that a gateway opens one by one (`--independent-models`): none keeps another out, and there may be none."""

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_operator.telemetry.exposition import Exposition
from tandem_operator.telemetry.pod_metrics import GatewayFigures
from tandem_services.common.health import Health
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.gateway.app import Home, build_gateway
from tandem_services.gateway.config import GatewayConfig, ModelConfig, ModelsSource
from tandem_services.gateway.models.catalog import LiveModels
from tandem_services.gateway.models.file import ModelsFileMetrics, read_models
from tandem_services.gateway.models.fleet_tokenizer import TokenizerMissingError
from tandem_services.gateway.models.independent import FileEntries, IndependentModels, OneEntry
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoadError
from tandem_testing.gateway_builders import serving_gateway
from tandem_testing.metric_text import metric_sum
from tandem_testing.model_files import Door, entry, replace_file
from tandem_testing.service_clock import ServiceClock

DEFAULTS = ModelConfig(path=Path(), names=("unused",), redis=RedisAddress(url="redis://home:6379"), recovery_s=0.5)


@dataclass
class Front:
    http: httpx.AsyncClient
    path: Path
    door: Door
    models: IndependentModels
    clock: ServiceClock

    async def say(self, *entries: dict) -> None:
        replace_file(self.path, json.dumps({"models": entries}))
        await self.models.poll()

    async def later(self) -> None:
        """The next attempt after the longest pause."""
        self.clock.advance(60.0)
        await self.models.poll()

    async def answers(self, *names: str) -> dict[str, str | int]:
        """What each model says, or the status."""
        output: dict[str, str | int] = {}
        for name in names:
            body = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
            answer = await self.http.post("/v1/chat/completions", json=body)
            good = answer.status_code == 200
            output[name] = answer.json()["choices"][0]["message"]["content"] if good else answer.status_code
        return output

    async def metric(self, name: str) -> float:
        return metric_sum((await self.http.get("/metrics")).text, name)


@pytest.fixture
def front(rack, tokenizer, tmp_path):
    @asynccontextmanager
    async def front():
        path = tmp_path / "models.json"
        source, clock = ModelsSource(path, DEFAULTS), ServiceClock()
        settings = GatewayConfig(models=(), models_file=source, independent_models=True, ping_interval_s=5.0)
        gateway = build_gateway(settings, [], clock=clock, health=Health(), home=Home(None, "home"))
        door = Door(rack, tokenizer)
        live = LiveModels(catalog=gateway.models, door=door, build=gateway.build_service, opened=[], independent=True)
        metrics = ModelsFileMetrics(gateway.shared.families, served=0)
        models = IndependentModels(
            entries=FileEntries(source), live=live, metrics=metrics, clock=clock, families=gateway.shared.families
        )
        gateway.health.add_check("models", models.missing)
        async with serving_gateway(gateway, settings) as http:
            yield Front(http, path, door, models, clock)
            await live.close()

    return front


async def test_gateway_without_models_is_ready_once_it_has_read(front):
    async with front() as one:
        await one.models.poll()
        unread = await one.http.get("/ready")
        assert (unread.status_code, unread.json()["reasons"][0].split(" (")[0]) == (
            503,
            f"models: --models: cannot read {one.path}",
        )
        await one.say()
        assert (await one.http.get("/ready")).status_code == 200
        assert (await one.http.get("/v1/models")).json()["data"] == []
        nameless = await one.http.post("/v1/completions", json={"prompt": "hi"})
        assert nameless.status_code == 400
        await one.say(entry("a"))
        assert await one.answers("a") == {"a": "I am a."}
        await one.say()
        assert await one.answers("a") == {"a": 404}
        assert (await one.http.get("/ready")).status_code == 200


@pytest.mark.parametrize("error", [RedisUnavailableError, RuntimeError], ids=["expected", "defect"])
async def test_entry_that_cannot_be_opened_keeps_no_other_out(front, error):
    async with front() as one:
        one.door.refusal = error("redis://bad:6379 does not answer")
        nowhere = {**entry("lost"), "model": "nowhere"}
        await one.say(entry("bad"), nowhere, entry("a"))
        assert await one.answers("a", "bad", "lost") == {"a": "I am a.", "bad": 404, "lost": 404}
        why = one.models.live.catalog.unserved
        assert why["bad"].endswith("redis://bad:6379 does not answer")
        assert "is no folder" in why["lost"]
        assert await one.metric("tandem_gateway_models_unserved") == 2
        served = one.models.live.fleets
        one.door.refusal = None
        await one.models.poll()
        assert one.models.live.fleets == served, "the pause is not over"
        await one.later()
        assert await one.answers("a", "bad") == {"a": "I am a.", "bad": "I am bad."}
        assert served[0] in one.models.live.fleets
        assert one.door.closed == []


async def test_successor_that_cannot_be_opened_leaves_its_model_alone(front):
    async with front() as one:
        await one.say(entry("bad"), entry("a"))
        one.door.refusal = RedisUnavailableError("it does not answer")
        await one.say(entry(("bad", "worse")), entry("a"))
        assert await one.answers("bad", "worse") == {"bad": "I am bad.", "worse": 404}
        await one.say({**entry(("bad", "worse")), "model": "nowhere"}, entry("a"))
        assert await one.answers("bad", "worse") == {"bad": "I am bad.", "worse": 404}
        one.door.refusal = None
        await one.say(entry(("bad", "worse")), entry("a"))
        assert await one.answers("bad", "worse") == {"bad": "I am bad.", "worse": "I am bad."}


async def test_invalid_file_changes_nothing_until_it_is_mended(front):
    async with front() as one:
        await one.say(entry("a"))
        await one.say(entry("a"), entry("a"))
        assert await one.metric("tandem_gateway_models_file_stale") == 1
        assert await one.answers("a") == {"a": "I am a."}
        await one.say(entry("a"))
        assert await one.metric("tandem_gateway_models_file_stale") == 0
        assert one.door.closed == []


async def test_awaited_model_gets_503_and_counts_as_waiting(front):
    async with front() as one:
        one.door.refusal = TokenizerMissingError("waiting for a worker to send the tokenizer of model bad")
        await one.say({**entry(("bad", "alias")), "model": "fleet"}, entry("a"))
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for name in ("bad", "alias"):
            answer = await one.http.post("/v1/chat/completions", json={**body, "model": name})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("ServiceUnavailableError", None)
            assert "no worker has sent its tokenizer" in error["message"]
        assert await one.answers("a", "unknown") == {"a": "I am a.", "unknown": 404}
        assert await one.metric('tandem_gateway_num_requests_waiting{model_name="bad"}') == 2
        GatewayFigures.of(Exposition.parse((await one.http.get("/metrics")).text), "bad")
        one.clock.advance(11.0)
        await one.models.poll()
        assert await one.metric('tandem_gateway_num_requests_waiting{model_name="bad"}') == 0
        one.door.refusal = None
        await one.later()
        assert await one.answers("bad", "alias") == {"bad": "I am bad.", "alias": "I am bad."}


async def test_awaited_model_is_tried_again_every_second(front):
    async with front() as one:
        one.door.refusal = TokenizerMissingError("waiting")
        await one.say({**entry("bad"), "model": "fleet"})
        for _ in range(4):
            one.clock.advance(1.1)
            await one.models.poll()
        one.door.refusal = None
        one.clock.advance(1.1)
        await one.models.poll()
        assert await one.answers("bad") == {"bad": "I am bad."}


@pytest.mark.parametrize(
    ("refusal", "attempts"),
    [(TokenizerMissingError("waiting"), 20), (RedisUnavailableError("away"), 20), (CheckpointError("invalid"), 4)],
    ids=["missing", "away", "invalid"],
)
async def test_model_that_cannot_be_opened_is_tried_less_often(front, refusal, attempts):
    async with front() as one:
        one.door.refusal = refusal
        await one.say({**entry("bad"), "model": "fleet"})
        one.door.refused = 0
        for _ in range(20):
            one.clock.advance(1.1)
            await one.models.poll()
        assert one.door.refused == attempts


async def test_broken_tokenizer_is_logged_once_and_sent_to_clients(front, caplog):
    """An attempt costs little: `TokenizerLoads` does not parse the same files again. Another digest is noticed."""
    async with front() as one:
        one.door.refusal = TokenizerLoadError("tokenizer.json is not a usable tokenizer")
        await one.say({**entry("bad"), "model": "fleet"})
        for _ in range(20):
            one.clock.advance(1.1)
            await one.models.poll()
        assert one.door.refused == 21
        assert caplog.text.count("tokenizer.json is not a usable tokenizer") == 1
        body = {"model": "bad", "messages": [{"role": "user", "content": "hi"}]}
        answer = await one.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 503
        assert "its tokenizer cannot be loaded" in answer.json()["error"]["message"]
        one.door.refusal = TokenizerMissingError("waiting")
        one.clock.advance(1.1)
        await one.models.poll()
        answer = await one.http.post("/v1/chat/completions", json=body)
        assert "no worker has sent its tokenizer" in answer.json()["error"]["message"]


async def test_model_with_another_tokenizer_is_opened_again(front):
    async with front() as one:
        await one.say({**entry("a"), "model": "fleet"})
        former = one.models.live.fleets[0]
        await one.models.poll()
        assert one.models.live.fleets == [former]
        former.outdated = True
        one.door.refusal = TokenizerMissingError("waiting")
        await one.models.poll()
        assert one.models.live.fleets[0] is not former
        assert await one.answers("a") == {"a": "I am a."}


async def test_fleet_model_needs_a_name(front):
    async with front() as one:
        await one.say({"model": "fleet"}, entry("a"))
        assert "served_model_name is required" in one.models.live.catalog.unserved["fleet"]
        assert await one.answers("a") == {"a": "I am a."}


@pytest.mark.parametrize("from_zero", [False, True])
async def test_only_model_makes_the_gateway_ready(rack, tokenizer, from_zero):
    model, clock = replace(DEFAULTS, path=None, names=("bad", "alias"), from_zero=from_zero), ServiceClock()
    settings = GatewayConfig(models=(), fleet_model=model, ping_interval_s=5.0)
    gateway = build_gateway(settings, [], clock=clock, health=Health(), home=Home(None, "home"))
    door = Door(rack, tokenizer, TokenizerMissingError("waiting for a worker to send the tokenizer of model bad"))
    live = LiveModels(catalog=gateway.models, door=door, build=gateway.build_service, opened=[], independent=True)
    families = gateway.shared.families
    metrics = ModelsFileMetrics(families, served=0)
    models = IndependentModels(entries=OneEntry(model), live=live, metrics=metrics, clock=clock, families=families)
    gateway.health.add_check("models", models.missing)
    async with serving_gateway(gateway, settings) as http:
        await models.poll()
        ready = await http.get("/ready")
        if from_zero:
            assert ready.status_code == 200, "requests for it wake the fleet"
        else:
            why = "models: waiting for a worker to send the tokenizer of model bad"
            assert (ready.status_code, ready.json()["reasons"]) == (503, [why])
        nameless = await http.post("/v1/completions", json={"prompt": "hi"})
        assert (nameless.status_code, nameless.headers["retry-after"]) == (503, "2")
        await live.close()


def test_file_with_a_fleet_model_needs_independent_models(tmp_path):
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"models": [{"model": "fleet", "served_model_name": "a"}]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="requires --independent-models"):
        read_models(path, DEFAULTS)
