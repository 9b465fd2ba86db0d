"""return_token_ids and return_tokens_as_token_ids: ids of prompts and outputs beside, and instead of, their text."""

from collections.abc import Iterable
from itertools import chain

import pytest

from tandem_testing.gateway_builders import events, live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS

TOKEN = hash_tokens(3, 250)
LENGTH = 12
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def written(rack, count: int = LENGTH) -> list[int]:
    return [TOKEN(rack.engines[0].received[0], position) for position in range(count)]


def flat(lists: Iterable[list]) -> list:
    return [*chain.from_iterable(lists)]


def choices_of(answer) -> list[dict]:
    chunks = [answer.json()] if "json" in answer.headers["content-type"] else events(answer)
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def test_chat_returns_prompt_ids_once_and_ids_per_choice(gateway, rack):
    answer = (await gateway.chat(max_tokens=LENGTH, return_token_ids=True, seed=3, n=2)).json()
    assert answer["prompt_token_ids"] == [*rack.engines[0].received[0].input_ids]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [LENGTH, LENGTH]
    by_seed = {request.sampling.seed: request for request in rack.engines[0].received}
    for seed, choice in zip((3, 4), answer["choices"], strict=True):
        assert choice["token_ids"] == [TOKEN(by_seed[seed], position) for position in range(LENGTH)]


async def test_streamed_chat_returns_prompt_ids_first_each_token_once(gateway, rack):
    chunks = events(await gateway.chat(max_tokens=LENGTH, return_token_ids=True, **STREAM))
    first, *others = chunks
    assert first["prompt_token_ids"] == [*rack.engines[0].received[0].input_ids]
    assert not any("prompt_token_ids" in chunk for chunk in others)
    ids = [choice.get("token_ids") or [] for chunk in chunks for choice in chunk["choices"]]
    assert flat(ids) == written(rack)


async def test_completions_tell_each_choice_its_prompt(gateway, rack):
    prompts = [[5, 6, 7], [8, 9]]
    answer = (await gateway.complete(prompts, max_tokens=2, n=2, return_token_ids=True)).json()
    found = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert found == [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2] * 4


@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_completion_has_prompt_ids_in_first_chunks(gateway, echo):
    fields = {"max_tokens": 3, "n": 2, "return_token_ids": True, "echo": echo, "stream": True}
    chunks = events(await gateway.complete([5, 6, 7], **fields))
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["prompt_token_ids"] == [5, 6, 7]
        assert not any("prompt_token_ids" in choice for choice in own[1:])
        assert len(flat(choice["token_ids"] for choice in own)) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_alone_has_no_output_ids(gateway, stream):
    fields = {"max_tokens": 0, "echo": True, "return_token_ids": True, "stream": stream}
    choices = choices_of(await gateway.complete([5, 6], **fields))
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert flat(choice["token_ids"] for choice in choices) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_include_stop_id_and_end_at_stop_string(rack, tokenizer, stream):
    ids = tokenizer.encode("the quick STOP and more", add_special_tokens=False)
    rack.add("solo", MockBehavior(token=lambda _, position: [*ids, EOS][position], eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        whole = choices_of(await live.complete(max_tokens=60, return_token_ids=True, stream=stream))
        cut = choices_of(await live.complete(max_tokens=60, return_token_ids=True, stream=stream, stop=["STOP"]))
    assert flat(choice["token_ids"] for choice in whole) == [*ids, EOS]
    reported = flat(choice["token_ids"] for choice in cut)
    assert reported == ids[: len(reported)]
    assert tokenizer.decode(reported).endswith("STOP")


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_name_tokens_by_id_and_keep_bytes(gateway, rack, tokenizer, stream):
    fields = {"max_tokens": LENGTH, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    choices = choices_of(await gateway.chat(stream=stream, **fields))
    content = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]]
    assert [item["token"] for item in content] == [f"token_id:{token}" for token in written(rack)]
    assert [bytes(item["bytes"]) for item in content] == [tokenizer.vocabulary.bytes_of(t) for t in written(rack)]
    assert all(item["top_logprobs"][0]["token"].startswith("token_id:") for item in content)


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_name_tokens_by_id_including_echo(gateway, rack, stream):
    fields = {"max_tokens": 3, "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True, "stream": stream}
    choices = choices_of(await gateway.complete([5, 6], **fields))
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = flat(entry["tokens"] for entry in found)
    assert tokens == [f"token_id:{token}" for token in [5, 6, *written(rack, 3)]]
    tops = [top for entry in found for top in entry["top_logprobs"] if top]
    assert all(name.startswith("token_id:") for top in tops for name in top)


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_absent_by_default(gateway, stream):
    for ask in (gateway.chat, gateway.complete):
        answer = await ask(max_tokens=3, return_token_ids=False, return_tokens_as_token_ids=None, stream=stream)
        assert "token_ids" not in answer.text
