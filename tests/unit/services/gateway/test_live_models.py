"""Models that are added, removed and changed while a gateway serves: running requests are not affected."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_services.common.health import Health
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.gateway.app import build_gateway
from tandem_services.gateway.config import GatewayConfig, ModelConfig, ModelsSource
from tandem_services.gateway.models.catalog import LiveModels
from tandem_services.gateway.models.file import ModelsFileMetrics, ModelsWatch, read_models
from tandem_testing.gateway_builders import events, serving_gateway
from tandem_testing.metric_text import metric_sum
from tandem_testing.model_files import Door, entry, replace_file
from tandem_testing.waiting import until

WATCH = "tandem_services.gateway.models.file"
DEFAULTS = ModelConfig(path=Path(), names=("unused",), redis=RedisAddress(url="redis://shared:6379"), recovery_s=0.5)


@dataclass
class Live:
    http: httpx.AsyncClient
    path: Path
    door: Door
    models: LiveModels
    follower: object

    def write(self, *names: str | tuple[str, ...], **changes) -> None:
        """A new file takes the name, as a mounted ConfigMap's does."""
        entries = [entry(each, **changes) for each in names]
        replace_file(self.path, json.dumps({"models": entries}))

    async def say(self, *names: str | tuple[str, ...], **changes) -> None:
        self.write(*names, **changes)
        await self.follower.poll()

    async def ask(self, model: str, **fields) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def served(self) -> list[str]:
        return [card["id"] for card in (await self.http.get("/v1/models")).json()["data"]]

    async def metric(self, name: str) -> float:
        return metric_sum((await self.http.get("/metrics")).text, name)


def content(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


async def closed(live: Live, *names: str) -> None:
    await until(lambda: live.door.closed == [*names], timeout_s=60, what=f"the end of {names}")


def open_requests(live: Live, name: str) -> int:
    return next(service.open_requests.open for service in live.models.catalog if service.model.name == name)


@pytest.fixture
def serve(rack, tokenizer, tmp_path):
    @asynccontextmanager
    async def serve(*names: str):
        path = tmp_path / "models.json"
        path.write_text(json.dumps({"models": [entry(name) for name in names]}))
        models = read_models(path, DEFAULTS)
        door = Door(rack, tokenizer)
        opened = [await door.open(model) for model in models]
        settings = GatewayConfig(models=models, ping_interval_s=5.0)
        fleets = [fleet.parts for fleet in opened]
        gateway = build_gateway(settings, fleets, clock=MonotonicClock(), health=Health())
        live = LiveModels(catalog=gateway.models, door=door, build=gateway.build_service, opened=opened)
        metrics = ModelsFileMetrics(gateway.shared.families, served=len(models))
        watch = ModelsWatch(source=ModelsSource(path, DEFAULTS), live=live, metrics=metrics)
        async with serving_gateway(gateway, settings) as http:
            yield Live(http, path, door, live, watch.follower(models))
            await live.close()

    return serve


async def test_models_file_reload_adds_and_removes_models(serve):
    async with serve("a", "b") as live:
        await live.follower.poll()
        assert live.door.closed == []
        await live.say("a", "c")
        assert await live.served() == ["a", "c"]
        assert content(await live.ask("c")) == "I am c."
        refused = await live.ask("b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        await closed(live, "b")
        assert await live.metric("tandem_gateway_models") == 2
        assert await live.metric('tandem_gateway_models_file_reloads_total{outcome="loaded"}') == 1


async def test_removed_model_closes_after_its_streams_finish(serve, rack):
    async with serve("a", "b") as live:
        [engine] = [each for each in rack.engines if each.model == "b"]
        engine.behavior.hold_at = 1
        streaming = asyncio.create_task(live.ask("b", stream=True))
        await until(lambda: open_requests(live, "b") == 1, timeout_s=60, what="the request")
        await live.say("a")
        assert (await live.ask("b")).status_code == 404
        assert (live.door.closed, live.models.retiring) == ([], 1)
        engine.behavior.hold_at = None
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events(await streaming))
        assert text == "I am b."
        await closed(live, "b")
        await until(lambda: live.models.retiring == 0, timeout_s=60, what="the end of all that retires")


async def test_queued_request_of_removed_model_is_answered(serve):
    async with serve("a", "b") as live:
        chooser = live.models.fleets[1].chooser
        chooser.room = 0
        waiting = asyncio.create_task(live.ask("b"))
        await until(lambda: len(chooser.queries) > 0, timeout_s=60, what="the request")
        await live.say("a")
        chooser.room = 1
        assert content(await waiting) == "I am b."
        await closed(live, "b")


async def test_changed_aliases_of_one_model_restart_no_other_model(serve):
    async with serve("a", "b") as live:
        first, second = live.models.fleets
        await live.say("a", ("b", "gpt"))
        assert await live.served() == ["a", "b", "gpt"]
        assert live.models.fleets[0] is first
        assert live.models.fleets[1] is not second
        assert content(await live.ask("gpt")) == "I am b."
        await closed(live, "b")


@pytest.mark.parametrize(
    ("text", "error_message"),
    [
        ("{", "not valid JSON"),
        ('{"models": []}', "models is empty"),
        (json.dumps({"models": [entry("a"), entry("a")]}), "given twice"),
        (json.dumps({"models": [{"model": "nowhere"}]}), "is no folder"),
        (json.dumps({"models": [entry("b"), entry("a")]}), "the first entry's"),
        (json.dumps({"models": [entry("a"), entry("bad")]}), "cannot be reached"),
        (None, "cannot read"),
    ],
)
async def test_invalid_models_file_is_logged_once_and_ignored(serve, caplog, text, error_message):
    async with serve("a", "b") as live:
        live.door.refusal = RedisUnavailableError("Redis cannot be reached")
        before = live.models.fleets
        if text is None:
            live.path.unlink()
        else:
            replace_file(live.path, text)
        for _ in range(3):
            await live.follower.poll()
        # Not what threads of earlier tests log, such as an exporter of traces that gives up.
        errors = [record for record in caplog.records if (record.name, record.levelno) == (WATCH, logging.ERROR)]
        assert [error_message in error.getMessage() for error in errors] == [True]
        assert (live.models.fleets, await live.served()) == (before, ["a", "b"])
        assert await live.metric("tandem_gateway_models_file_stale") == 1
        assert await live.metric('tandem_gateway_models_file_reloads_total{outcome="refused"}') == 1
        # The contents of before are no change, and end the error.
        await live.say("a", "b")
        assert await live.metric("tandem_gateway_models_file_stale") == 0
        assert live.models.fleets == before


async def test_fleets_opened_by_a_failed_change_are_closed(serve):
    async with serve("a") as live:
        live.door.refusal = RedisUnavailableError("away")
        await live.say("a", "b", "bad")
        assert (await live.served(), live.door.closed) == (["a"], ["b"])
        live.door.refusal = None
        await live.follower.poll()  # The same file: its Redis is back.
        assert await live.served() == ["a", "b", "bad"]
        assert await live.metric("tandem_gateway_models_file_stale") == 0


async def test_first_fleet_stays_open_whatever_its_model_is_called(serve):
    async with serve("a") as live:
        await live.say("renamed", cluster="a")
        assert await live.served() == ["renamed"]
        await until(lambda: live.models.retiring == 0, timeout_s=60, what="the end of all that retires")
        assert live.door.closed == []
