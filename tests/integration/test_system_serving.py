"""Two prefill and two decode workers behind one gateway, used as clients use them."""

import asyncio
import json

import pytest

from tandem_lab.bench.load import Lengths, RequestSpec, fixed_workload
from tandem_services.cli.main import main
from tandem_testing.system_client import ChatAnswer, SystemClient
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

INDEXED_S = 120.0
QUESTIONS = [
    [{"role": "user", "content": f"Tell me a story about {hero} who lives near a river."}]
    for hero in ("a fox", "a bear", "two cats", "an owl", "the baker", "a small boat", "Anna", "a lamp")
]


async def mixed_specs(client: SystemClient) -> list[RequestSpec]:
    """Half text, half token ids; prompts from a few tokens to several chunks, some with a common beginning."""
    short = fixed_workload(Lengths(prompt=40, output=40, spread=0.95), 28, rate=None, seed=1)
    long = fixed_workload(Lengths(prompt=400, output=24, spread=0.6, shared_prefix=120), 28, rate=None, seed=2)
    as_ids = [
        RequestSpec(prompt=await client.tokens(str(spec.prompt)), max_tokens=spec.max_tokens)
        for spec in (*short[::2], *long[::2])
    ]
    return [*short[1::2], *long[1::2], *as_ids]


async def test_64_concurrent_streams_equal_output_of_one_worker(fleet, reference):
    specs = await mixed_specs(fleet)
    expected = await reference.texts(specs)
    async with SystemClient(system=reference.system) as alone:
        expected_chats = [(await alone.chat(question)).text for question in QUESTIONS]

    answers, *chats = await asyncio.gather(fleet.streams(specs), *map(fleet.chat, QUESTIONS))

    assert len(specs) + len(chats) == 64
    assert [answer.error for answer in answers] == [None] * len(specs)
    assert [answer.text for answer in answers] == expected
    assert [chat.text for chat in chats] == expected_chats
    await fleet.settled()
    assert await fleet.metric("tandem_gateway_transferred_bytes_total") > 0


async def test_second_turn_hits_prefix_cache_and_explain_names_workers(fleet):
    first_turns: list[ChatAnswer] = []

    async def reused() -> bool:
        """The router learns a moment after the first turn where it is cached: was that too late, try another story."""
        spec, *_ = fixed_workload(Lengths(prompt=120, output=1), 1, rate=None, seed=9 + len(first_turns))
        messages = [{"role": "user", "content": f"{len(first_turns)}, continue: {spec.prompt}"}]
        first = await fleet.chat(messages)
        assert first.cached_tokens < 16
        first_turns.append(first)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        return (await fleet.chat(messages)).cached_tokens >= 100

    await until(reused, INDEXED_S, "a second turn finds the first")
    record = await fleet.get(f"/v1/requests/{first_turns[-1].id}/explain")
    (choice,) = record["choices"]
    assert choice["attempts"][0]["prefill"].startswith("prefill-")
    assert choice["attempts"][0]["decode"].startswith("decode-")
    assert choice["attempts"][0]["terms"]
    assert choice["transfer"]["pages"] >= 120 // 16
    assert choice["transfer"]["bytes"] >= choice["transfer"]["pages"] * 1024


async def test_prompt_alone_is_cached_on_the_decode_worker(fleet):
    """With local prefill, or while the index has not learned of the prompt yet, another prompt is tried."""
    tried: list[int] = []

    async def kept_on_both() -> bool:
        spec, *_ = fixed_workload(Lengths(prompt=400, output=1), 1, rate=None, seed=300 + len(tried))
        prompt = f"{len(tried)}: {spec.prompt}"
        alone = await fleet.complete(prompt, max_tokens=0)
        assert alone["usage"]["completion_tokens"] == 0
        assert (alone["choices"][0]["text"], alone["choices"][0]["finish_reason"]) == ("", "length")
        answer = await fleet.complete(prompt, max_tokens=4)
        [choice] = (await fleet.get(f"/v1/requests/{answer['id']}/explain"))["choices"]
        pages = (choice["transfer"] or {}).get("pages", 0)
        tried.append(pages)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached >= answer["usage"]["prompt_tokens"] - 32 and pages <= 2

    await until(kept_on_both, INDEXED_S, "the decode worker has the prompt")
    assert len(tried) < 20


EDITED = {
    "prompt": "Once upon a time there was a fox who",
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "bad_words": ["the", "fox"],
    "logprobs": 0,
    "echo": True,
}


async def test_edited_output_and_logprobs_equal_aggregated_worker(fleet, reference):
    async def complete(client: SystemClient, **fields: object) -> dict:
        answer = await client.http.post("/v1/completions", json={"model": client.model, **EDITED, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    async with SystemClient(system=reference.system) as alone:
        expected = await complete(alone)
    choice, plain = await asyncio.gather(
        complete(fleet), complete(fleet, repetition_penalty=1, frequency_penalty=0, bad_words=[])
    )
    assert choice["text"] == expected["text"] != plain["text"]
    assert not {"the", "fox"} & {*choice["text"].removeprefix(EDITED["prompt"]).split()}
    first, *logprobs = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert logprobs == pytest.approx(expected["logprobs"]["token_logprobs"][1:], abs=1e-3)

    scored = await complete(fleet, max_tokens=0)
    assert scored["text"] == EDITED["prompt"]
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(logprobs[: -EDITED["max_tokens"]], abs=1e-3)


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_embeddings_of_prefill_workers_equal_aggregated_worker(fleet, reference, pooling):
    tokens = await fleet.tokens("Once upon a time there was a fox who lived near a river. " * 30)
    inputs = ["What is the capital of France?", tokens, tokens[:300], tokens[:7]]

    async def embed(client: SystemClient) -> list[list[float]]:
        body = {"model": client.model, "input": inputs, "pooling": pooling}
        answer = await client.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    async with SystemClient(system=reference.system) as alone:
        expected = await embed(alone)
    for mine, theirs in zip(await embed(fleet), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert len({vector[0] for vector in expected}) == len(inputs)
    await fleet.settled()


async def test_operator_orders_reach_one_worker_while_others_serve(fleet, capsys):
    worker = fleet.system.workers["decode-0"].removeprefix("http://")

    async def order(*words: str) -> tuple[int, dict]:
        status = await asyncio.to_thread(main, ["ctl", worker, *words])
        shown = capsys.readouterr()
        return status, json.loads(shown.out or shown.err)

    async def not_offered() -> bool:
        return not await fleet.is_ready(fleet.system.workers["decode-0"])

    before = (await fleet.chat(QUESTIONS[0])).text
    try:
        assert await order("pause", "--mode", "retract") == (0, {"message": "paused (retract)", "requests": 0})
        await until(not_offered, 60.0, "a paused worker is not ready")
        chats = await asyncio.gather(*map(fleet.chat, QUESTIONS[1:]))
        assert all(chat.text for chat in chats)
        status, answer = await order("flush-cache")
        assert (status, answer["message"]) == (0, "the prefix cache is empty")
        assert (await order("audit"))[1]["tree_pages"] == 0
        status, answer = await order("profile")
        assert (status, answer["code"]) == (1, "config_error")
        assert "--torch-profiler-dir" in answer["message"]
        status, answer = await order("reload", "/nowhere")
        assert (status, answer["code"]) == (1, "checkpoint_error")
        assert (await order("reload"))[0] == 0
        assert await order("abort", "unknown") == (0, {"message": "no request of this id is here", "requests": 0})
    finally:
        # Other tests have the same fleet, whatever failed here.
        resumed, _ = await order("resume")
    assert resumed == 0
    await fleet.all_ready()
    assert (await fleet.chat(QUESTIONS[0])).text == before


def structured(client: SystemClient, question: list[dict[str, str]], schema: dict[str, object]) -> dict[str, object]:
    return {
        "model": client.model,
        "messages": question,
        "max_tokens": 100,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}},
    }


ANIMAL = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}


async def test_every_pair_of_workers_follows_json_schema(fleet, reference):
    bodies = [structured(fleet, question, ANIMAL) for question in QUESTIONS]
    answers = await asyncio.gather(*(fleet.http.post("/v1/chat/completions", json=body) for body in bodies))
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    for text in texts:
        assert set(json.loads(text)) == {"name", "legs"}, text
    async with SystemClient(system=reference.system) as alone:
        again = [await alone.http.post("/v1/chat/completions", json=body) for body in bodies]
    assert texts == [answer.json()["choices"][0]["message"]["content"] for answer in again]
    await fleet.settled()


async def test_oversized_grammar_is_named_400_and_uses_no_memory(fleet):
    body = structured(fleet, QUESTIONS[0], {"type": "integer", "multipleOf": 100_000_007})
    answer = await fleet.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    await fleet.settled()
