"""Two fleets in one Redis behind one gateway, as processes: the bundled model twice, under two names."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anthropic
import httpx
import pytest

from tandem_services.cli.flags import bundled_model
from tandem_services.common.sockets import free_port
from tandem_testing.key_files import bearer, key_of, write_keys
from tandem_testing.redis_server import RedisServer
from tandem_testing.system import tandem_command
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORKER = "w"
"""Of both fleets: what keeps them apart is their namespace alone."""
ENGINE = ("--threads", "1", "--kv-cache-gib", "0.05", "--dtype", "float32")
NAMES = {"one": ["story", "tales"], "two": ["chat"]}
"""Cluster → names of its model."""


@dataclass
class Processes:
    """Started one by one, ended together by pid."""

    folder: Path
    redis_url: str
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = tandem_command(*argv, "--redis-url", self.redis_url)
            self.running.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ})
            )

    def close(self) -> None:
        for process in self.running:
            process.terminate()
        for process in self.running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))


@pytest.fixture(scope="module")
def processes(server: RedisServer, tmp_path_factory) -> Iterator[Processes]:
    server.wipe()
    started = Processes(tmp_path_factory.mktemp("models"), server.url)
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def gateway(processes: Processes) -> str:
    """Its URL."""
    folder, port, model = processes.folder, free_port(), str(bundled_model())
    for cluster, names in NAMES.items():
        identity = ("--worker-id", WORKER, "--cluster", cluster, "--model", model, "--served-model-name", *names)
        processes.start(f"worker-{cluster}", "worker", *identity, *ENGINE)
    entries = [{"model": model, "served_model_name": names, "cluster": cluster} for cluster, names in NAMES.items()]
    models = folder / "models.json"
    models.write_text(json.dumps({"models": entries}), encoding="utf-8")
    keys = write_keys(folder, all={"admin": True}, alias={"models": ["tales"]})
    processes.start("gateway", "gateway", "--port", str(port), "--models", str(models), "--api-keys", str(keys))
    return f"http://127.0.0.1:{port}"


@pytest.fixture
async def client(gateway, processes):
    """As the key that may do everything, once both models have a worker."""
    async with httpx.AsyncClient(base_url=gateway, headers=bearer("all"), timeout=60) as client:

        async def ready() -> bool:
            try:
                cards = (await client.get("/v1/models")).json()["data"]
            except httpx.TransportError:
                return False
            return all(card["max_model_len"] for card in cards)

        await until(ready, 300.0, "both models have workers", processes.logs)
        yield client


async def complete(client: httpx.AsyncClient, model: str, prompt: str, key: str = "all") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return await client.post("/v1/completions", json=body, headers=bearer(key))


async def test_requests_stay_in_the_fleet_of_the_model_that_is_named(client):
    prompt = "Once upon a time there was a fox who lived near a river. " * 8
    first = await complete(client, "story", prompt)
    again, elsewhere = await asyncio.gather(complete(client, "tales", prompt), complete(client, "chat", prompt))
    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, again, elsewhere)]
    # The alias finds what the model has cached; the other model, with a worker of the same name, has seen nothing.
    assert cached[0] == cached[2] == 0 < cached[1]
    texts = [answer.json()["choices"][0]["text"] for answer in (first, again, elsewhere)]
    assert len(set(texts)) == 1
    assert [answer.json()["model"] for answer in (first, again, elsewhere)] == ["story", "tales", "chat"]
    for answer, model in ((first, "story"), (again, "story"), (elsewhere, "chat")):
        record = (await client.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")).json()
        assert (record["model"], record["choices"][0]["attempts"][0]["decode"].partition("@")[0]) == (model, WORKER)


async def test_names_are_those_that_the_key_may_use(client):
    everything = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in everything] == ["story", "tales", "chat"]
    assert {card["root"] for card in everything} == {"story", "chat"}
    limited = (await client.get("/v1/models", headers=bearer("alias"))).json()["data"]
    assert [card["id"] for card in limited] == ["tales"]
    answers = {name: await complete(client, name, "hi", "alias") for name in ("tales", "story", "chat", "other")}
    assert [answer.status_code for answer in answers.values()] == [200, 404, 404, 404]
    error = answers["chat"].json()["error"]
    assert (error["code"], error["message"]) == (
        "model_not_found",
        "The model 'chat' does not exist. Available: tales.",
    )


async def test_anthropic_client_works_with_bundled_model(client, gateway):
    messages = [{"role": "user", "content": "Tell me a story about a fox who lives near a river."}]
    body = {"model": "tales", "max_tokens": 12, "messages": messages}
    greedy = {"temperature": 0}
    # The newest client has no parameter for the temperature; the API has.
    asked = {**body, "extra_body": greedy}
    async with anthropic.AsyncAnthropic(base_url=gateway, api_key=key_of("alias"), max_retries=0) as official:
        whole = await official.messages.create(**asked)
        async with official.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
    chat = (await client.post("/v1/chat/completions", json={**body, **greedy})).json()
    assert whole.content[0].text == final.content[0].text == chat["choices"][0]["message"]["content"]
    assert (whole.model, whole.stop_reason, whole.usage.output_tokens) == ("tales", "max_tokens", 12)
    assert final.usage.cache_read_input_tokens > 0
