"""Adapters on a fleet: streams equal those of the model with the adapter merged, also after the loss of a worker."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx
import openai
import pytest

from tandem_engine.ipc.keys import KeyPair
from tandem_lab.verify.reference import TransformersReference
from tandem_services.cli.flags import bundled_model
from tandem_services.cli.main import main
from tandem_services.common.tokens import order_token
from tandem_testing.adapters import FLEET_ADAPTERS, write_adapter
from tandem_testing.system_client import SystemClient
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

PROMPT = tuple(Random(22).choices(range(20, 900), k=200))
"""More than a decode worker may compute itself."""
TOKENS = 24
LONG = 400
MAX_SWAPS = 5
"""Replacements until one meets a stream that runs."""


@pytest.fixture(scope="module")
def merged(systems) -> dict[str | None, tuple[int, ...]]:
    """Outputs of transformers for the prompt: of the model alone (None) and with each adapter merged."""
    reference = TransformersReference(str(bundled_model()))
    output = {}
    for name in (None, *FLEET_ADAPTERS):
        folder = None if name is None else str(systems[0].run_dir.parent / name)
        with reference.adapted(folder):
            output[name] = reference.generate(PROMPT, TOKENS, frozenset(), ignore_eos=True).token_ids
    assert len(set(output.values())) == 1 + len(FLEET_ADAPTERS)
    return output


async def complete(fleet: SystemClient, model: str, *, max_tokens: int = TOKENS) -> dict[str, Any]:
    answer = await fleet.http.post("/v1/completions", json=body_of(model, max_tokens) | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    output: dict[str, Any] = answer.json()
    return output


def body_of(model: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def test_names_of_adapters_answer_as_merged_weights(fleet, merged):
    names = {"one": "one", f"{fleet.model}:one": "one", "two": "two", f"{fleet.model}:two": "two", fleet.model: None}
    for _ in range(2):  # the second time from the prefix cache
        answers = await asyncio.gather(*(complete(fleet, name) for name in names))
        output = [tuple(answer["choices"][0]["token_ids"]) for answer in answers]
        assert output == [merged[adapter] for adapter in names.values()]
    record = await fleet.get(f"/v1/requests/{answers[0]['id']}/explain")
    assert (record["requested_model"], record["model"], len(record["adapter"])) == ("one", fleet.model, 32)
    assert answers[0]["model"] == "one"


async def test_stream_of_an_adapter_outlives_its_worker(fleet, merged):
    expected = tuple((await complete(fleet, "one", max_tokens=LONG))["choices"][0]["token_ids"])
    assert expected[:TOKENS] == merged["one"]
    output: list[int] = []
    engines = {name: fleet.system.engine_pid(name) for name in ("decode-0", "decode-1")}
    fields = {"stream": True, "return_token_ids": True}
    async with fleet.http.stream("POST", "/v1/completions", json=body_of("one", LONG) | fields) as response:
        killed = None
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            output += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
            if killed is None:
                killed = await kill_decode_worker(fleet, chunk["id"], engines)
    assert killed is not None
    assert tuple(output) == expected
    assert len(await fleet.attempts(chunk["id"])) > 1, "the worker died too late"
    await fleet.all_ready(instead_of=[killed])
    await fleet.settled()


async def kill_decode_worker(fleet: SystemClient, request_id: str, engines: dict[str, int]) -> int:
    """SIGKILL the engine that generates `request_id`; none of `engines` generates anything before. Returns its pid."""
    for pid in engines.values():
        os.kill(pid, signal.SIGSTOP)
    killed = None
    try:
        [attempt] = await fleet.attempts(request_id)
        killed = engines[attempt["decode"].partition("@")[0]]
        os.kill(killed, signal.SIGKILL)
    finally:
        # Other tests have the same fleet, whatever failed here.
        for pid in engines.values():
            if pid != killed:
                os.kill(pid, signal.SIGCONT)
    return killed


async def test_openai_client_lists_and_uses_adapters(fleet, merged):
    async with openai.AsyncOpenAI(base_url=f"{fleet.system.url}/v1", api_key="none", max_retries=0) as client:
        cards = {card.id: card async for card in await client.models.list()}
        assert {name: (cards[name].root, cards[name].parent) for name in FLEET_ADAPTERS} == {
            name: (name, fleet.model) for name in FLEET_ADAPTERS
        }
        assert (await client.models.retrieve("two")).parent == fleet.model
        hi = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
        base, one = [await client.chat.completions.create(model=name, **hi) for name in (fleet.model, "one")]
        assert (base.model, one.model) == (fleet.model, "one")
        assert base.choices[0].message.content != one.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="'three' does not exist.*one, two"):
            await client.chat.completions.create(model="three", **hi)


async def test_adapter_is_loaded_and_unloaded_while_streams_run(fleet, merged):
    expected = (await complete(fleet, "one", max_tokens=LONG))["choices"][0]["token_ids"]
    running = asyncio.create_task(complete(fleet, "one", max_tokens=LONG))
    folder = str(fleet.system.run_dir.parent / "two")
    loaded = await command(fleet, "/v1/load_lora_adapter", lora_name="late", lora_path=folder)
    assert loaded == {(worker, "loaded") for worker in fleet.system.workers}
    await until(lambda: known(fleet, "late"), 60.0, "the adapter is listed")
    answer = await complete(fleet, "late")
    assert tuple(answer["choices"][0]["token_ids"]) == merged["two"]
    again = await command(fleet, "/v1/load_lora_adapter", lora_name="late", lora_path=folder)
    assert again == {(worker, "unchanged") for worker in fleet.system.workers}
    unloaded = await command(fleet, "/v1/unload_lora_adapter", lora_name="late")
    assert unloaded == {(worker, "unloaded") for worker in fleet.system.workers}
    assert (await running)["choices"][0]["token_ids"] == expected

    async def gone() -> bool:
        return not await known(fleet, "late")

    await until(gone, 60.0, "the adapter is listed no more")
    refused = await fleet.http.post("/v1/completions", json=body_of("late", 4))
    assert refused.status_code == 404
    assert tuple((await complete(fleet, "two"))["choices"][0]["token_ids"]) == merged["two"]


async def test_registered_name_outlives_workers_and_gateway(fleet, merged):
    """None of the new workers has the adapter: they load it for the request."""
    folder = write_adapter(fleet.system.run_dir.parent / "fresh", bundled_model(), seed=9)
    await command(fleet, "/v1/load_lora_adapter", lora_name="fresh", lora_path="fresh")
    expected = (await complete(fleet, "fresh"))["choices"][0]["token_ids"]
    assert tuple(expected) not in merged.values()
    for worker in fleet.system.workers:
        fleet.system.kill(fleet.system.engine_pid(worker))
    fleet.system.kill(fleet.system.gateway_pid())
    answers: list[dict[str, Any]] = []

    async def answered() -> bool:
        try:
            answer = await fleet.http.post(
                "/v1/completions", json=body_of("fresh", TOKENS) | {"return_token_ids": True}
            )
        except httpx.TransportError:
            return False  # no gateway
        assert answer.status_code in {200, 503}, answer.text
        if answer.status_code == 200:
            answers.append(answer.json())
        return bool(answers)

    await until(answered, 120.0, "the fleet answers again")
    assert answers[0]["choices"][0]["token_ids"] == expected
    await fleet.all_ready()
    shutil.rmtree(folder)
    await command(fleet, "/v1/unload_lora_adapter", lora_name="fresh")
    assert (await fleet.http.post("/v1/completions", json=body_of("fresh", 4))).status_code == 404


async def test_replaced_name_answers_with_its_new_content(fleet, merged):
    """Streams that run end with the former content, and equal prompts find no page of it."""
    folders = {name: str(fleet.system.run_dir.parent / name) for name in FLEET_ADAPTERS}
    former, later = FLEET_ADAPTERS
    await command(fleet, "/v1/load_lora_adapter", lora_name="swap", lora_path=folders[former])
    expected = {name: (await complete(fleet, name, max_tokens=LONG))["choices"][0]["token_ids"] for name in folders}
    session = (await fleet.http.post("/v1/sessions", json={})).json()["id"]
    assert await turn_of(fleet, session, 0) == 200
    overlapped = False
    for _ in range(MAX_SWAPS):
        running = await speaking_streams(fleet, ["swap"] * 4)
        states = await command(
            fleet, "/v1/load_lora_adapter", lora_name="swap", lora_path=folders[later], load_inplace=True
        )
        assert {state for _, state in states} == {"replaced"}
        overlapped = overlapped or not all(task.done() for task in running)
        for _ in range(2):  # the second time from the prefix cache
            answers = await asyncio.gather(*(complete(fleet, name) for name in ("swap", *FLEET_ADAPTERS, fleet.model)))
            output = [tuple(answer["choices"][0]["token_ids"]) for answer in answers]
            assert output == [merged[later], *(merged[name] for name in FLEET_ADAPTERS), merged[None]]
        assert [await task for task in running] == [expected[former]] * len(running)
        assert await turn_of(fleet, session, 1) == 409
        if overlapped:
            break
        former, later = later, former
    assert overlapped, "all streams ended before each replacement"
    await fleet.http.delete(f"/v1/sessions/{session}")
    await command(fleet, "/v1/unload_lora_adapter", lora_name="swap")
    await fleet.settled()


async def turn_of(fleet: SystemClient, session: str, turn: int) -> int:
    """Status of a turn with the adapter `swap`."""
    params = {"session_params": {"id": session, "turn": turn}}
    return (await fleet.http.post("/v1/completions", json=body_of("swap", 4) | params)).status_code


async def test_streams_of_adapters_outlive_changes_of_roles(fleet):
    names = (*FLEET_ADAPTERS, fleet.model)
    expected = [(await complete(fleet, name, max_tokens=LONG))["choices"][0]["token_ids"] for name in names]
    engines = {name: fleet.system.engine_pid(name) for name in ("decode-0", "decode-1")}
    try:
        for worker in engines:
            running = await speaking_streams(fleet, names * 2)
            await set_role(fleet, worker, "prefill")
            assert [await task for task in running] == expected * 2
            await set_role(fleet, worker, "decode")
    finally:
        for worker in engines:
            await set_role(fleet, worker, "decode")
    assert {name: fleet.system.engine_pid(name) for name in engines} == engines
    await fleet.settled()


async def set_role(fleet: SystemClient, worker: str, role: str) -> None:
    assert await asyncio.to_thread(main, ["ctl", fleet.system.workers[worker], "role", role]) == 0


async def speaking_streams(fleet: SystemClient, models: Sequence[str]) -> "list[asyncio.Task[list[int]]]":
    """Long ones, each of which has some output."""
    before = fleet.chunks.speaking
    running = [asyncio.create_task(streamed(fleet, model, LONG)) for model in models]
    await until(lambda: fleet.chunks.speaking >= before + len(running), 60.0, "streams speak")
    return running


async def streamed(fleet: SystemClient, model: str, max_tokens: int) -> list[int]:
    """Tokens of one stream."""
    output: list[int] = []
    fields = {"stream": True, "return_token_ids": True}
    async with fleet.http.stream("POST", "/v1/completions", json=body_of(model, max_tokens) | fields) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                output += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
    return output


async def command(fleet: SystemClient, path: str, **body: object) -> set[tuple[str, str]]:
    """What each worker did."""
    token = order_token(KeyPair.load(fleet.system.run_dir / "keys.json"))
    answer = await fleet.http.post(path, json=body, headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200, answer.text
    return {(each["worker"], each["state"]) for each in answer.json()["workers"]}


async def known(fleet: SystemClient, name: str) -> bool:
    return name in {card["id"] for card in (await fleet.get("/v1/models"))["data"]}
