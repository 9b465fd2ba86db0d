"""Sampling fields as engines get them, and the logprobs of prompts as clients do."""

import asyncio
import threading

import pytest

from tandem_engine.base.release import RELEASE
from tandem_engine.config import Role
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.gateway_builders import events, live_gateway
from tandem_testing.healthy_engines import TOKEN, healthy
from tandem_testing.tokenizer_builders import EOS

PROMPT = "the quick brown"


async def sent(gateway, rack, **fields) -> SamplingParams:
    """What the engine was asked for."""
    answer = await gateway.complete("hi", max_tokens=2, **fields)
    assert answer.status_code == 200, answer.text
    return rack.engines[0].received[-1].sampling


async def test_request_names_the_release_of_the_gateway(gateway, rack):
    await sent(gateway, rack)
    assert rack.engines[0].received[-1].release == RELEASE


# Fields


async def test_fields_reach_the_engine_as_they_are(gateway, rack):
    sampling = await sent(
        gateway,
        rack,
        presence_penalty=-0.5,
        frequency_penalty=1,
        repetition_penalty=1.25,
        logit_bias={"7": 2, "9": -100},
        allowed_token_ids=[7, 9, 11],
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-0.5, 1.0, 1.25)
    assert sampling.logit_bias == ((7, 2.0), (9, -100.0))
    assert sampling.allowed_token_ids == (7, 9, 11)


async def test_absent_fields_edit_no_logits(gateway, rack):
    assert not (await sent(gateway, rack)).edits_logits
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "bad_words": [],
    }
    assert not (await sent(gateway, rack, **neutral)).edits_logits


async def test_bad_words_are_encoded_with_and_without_leading_space(gateway, rack, tokenizer):
    sampling = await sent(gateway, rack, bad_words=["quick", " dog", "quick"])
    expected = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("quick", " quick", "dog", " dog")]
    assert sampling.bad_words == tuple(dict.fromkeys(expected))
    assert len(sampling.bad_words) == 4


async def test_bad_word_spelling_that_ends_in_another_is_left_out(gateway, rack, tokenizer):
    word = "\N{SNOWMAN}"
    bare, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
    assert spaced[-len(bare) :] == bare
    assert (await sent(gateway, rack, bad_words=[word])).bad_words == (tuple(bare),)


async def test_all_tokens_disliked_still_end(gateway):  # [logit-bias]
    answer = await gateway.complete(max_tokens=3, logit_bias={str(token): -100 for token in range(300)})
    assert answer.json()["usage"]["completion_tokens"] == 3


# [prompt-logprobs]: prompt_logprobs


async def test_prompt_logprobs_have_vllms_shape(gateway, tokenizer):
    answer = (await gateway.complete(PROMPT, max_tokens=2, prompt_logprobs=2)).json()
    ids = tokenizer.encode(PROMPT)
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    for position, (token, entry) in enumerate(zip(ids[1:], rest, strict=True), 1):
        assert list(entry) == [str(token), str(token + 1)]
        text = tokenizer.decode([token])
        assert entry[str(token)] == {"logprob": -float(position), "rank": position, "decoded_token": text}
        assert (entry[str(token + 1)]["logprob"], entry[str(token + 1)]["rank"]) == (-0.125, 2)


async def test_chat_has_them_once_for_all_choices(gateway, rack):
    answer = (await gateway.chat("hello", max_tokens=2, n=3, prompt_logprobs=0)).json()
    asked = [request.sampling.prompt_logprobs for request in rack.engines[0].received]
    assert sorted(asked, key=str) == [0, None, None]
    assert len(answer["prompt_logprobs"]) == len(rack.engines[0].received[0].input_ids)
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_choices_of_one_prompt_share_them(gateway, rack):
    answer = (await gateway.complete([[5, 6, 7], [8, 9]], max_tokens=2, n=2, prompt_logprobs=0)).json()
    found = [[entry and list(entry) for entry in choice["prompt_logprobs"]] for choice in answer["choices"]]
    assert found == [[None, ["6"], ["7"]], [None, ["6"], ["7"]], [None, ["9"]], [None, ["9"]]]
    assert sum(request.sampling.prompt_logprobs is not None for request in rack.engines[0].received) == 2


async def test_best_choices_keep_the_logprobs_of_their_prompt(gateway):
    answer = (await gateway.complete([[5, 6], [8, 9]], max_tokens=2, best_of=3, prompt_logprobs=0)).json()
    assert [list(choice["prompt_logprobs"][1]) for choice in answer["choices"]] == [["6"], ["9"]]


async def test_tokens_before_logprob_start_are_null(gateway, rack):
    answer = (await gateway.complete([5, 6, 7, 8], max_tokens=2, prompt_logprobs=0, logprob_start=2)).json()
    entries = answer["choices"][0]["prompt_logprobs"]
    assert [entry and list(entry) for entry in entries] == [None, None, ["7"], ["8"]]
    assert rack.engines[0].received[0].sampling.logprob_start == 2


async def test_prompt_logprobs_field_is_absent_by_default(gateway):
    assert "prompt_logprobs" not in (await gateway.chat(max_tokens=1)).json()
    assert "prompt_logprobs" not in (await gateway.complete(max_tokens=1)).json()["choices"][0]


@pytest.mark.parametrize("fields", [{"n": 128}, {"prompt": [[5] * 400] * 64, "prompt_logprobs": 20}])
async def test_more_of_them_than_an_answer_may_hold_are_refused(gateway, rack, fields):
    body = {"model": "mock", "prompt": [5] * 400, "max_tokens": 1, "prompt_logprobs": 5, **fields}
    answer = await gateway.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert not rack.engines[0].received


# [known-fields]: logprob_token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_requested_logprob_ids_are_returned_in_order(gateway, rack, tokenizer, stream):
    fields = {"max_tokens": 3, "logprob_token_ids": [9, 5], "stream": stream}
    answers = [await gateway.chat(logprobs=True, **fields), await gateway.complete(logprobs=0, **fields)]
    assert {request.sampling.logprob_token_ids for request in rack.engines[0].received} == {(9, 5)}
    chat, text = ([c for d in (events(a) if stream else [a.json()]) for c in d["choices"]] for a in answers)
    names = [tokenizer.decode([token]) for token in (9, 5)]
    content = [item for choice in chat if choice["logprobs"] for item in choice["logprobs"]["content"]]
    assert len(content) == 3
    for item in content:
        assert [(top["token"], top["logprob"]) for top in item["top_logprobs"]] == [(names[0], -10), (names[1], -6)]
    tops = [top for choice in text if choice["logprobs"] for top in choice["logprobs"]["top_logprobs"]]
    assert len(tops) == 3
    assert all((top[names[0]], top[names[1]]) == (-10, -6) for top in tops)


# [echo-is-prompt]: echo with logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echo_puts_the_prompts_logprobs_before_the_outputs(gateway, tokenizer, stream, max_tokens):
    answer = await gateway.complete(PROMPT, max_tokens=max_tokens, echo=True, logprobs=2, seed=1, stream=stream)
    chunks = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] for choice in choices)
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens, logprobs, top, offsets = (
        [value for part in parts for value in part[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    ids = tokenizer.encode(PROMPT)
    assert len(tokens) == len(logprobs) == len(top) == len(offsets) == len(ids) + max_tokens
    assert logprobs == [None, *(-float(i) for i in range(1, len(ids))), *[-0.5] * max_tokens]
    assert top[0] is None
    assert "".join(tokens[: len(ids)]) == PROMPT
    assert text.startswith(PROMPT)
    assert choices[-1]["finish_reason"] == "length"
    for token, offset in zip(tokens[: len(ids) + 1], offsets[: len(ids) + 1], strict=True):
        assert text[offset : offset + len(token)] == token or "\ufffd" in token
    if not stream:
        assert chunks[0]["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echo_of_prompt_without_text_has_its_logprobs(gateway, stream, max_tokens):
    fields = {"max_tokens": max_tokens, "echo": True, "logprobs": 1, "seed": 1, "stream": stream, "ignore_eos": True}
    answer = await gateway.complete([EOS, EOS, EOS], return_tokens_as_token_ids=True, **fields)
    chunks = events(answer) if stream else [answer.json()]
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    names = [name for part in parts for name in part["tokens"]]
    logprobs = [value for part in parts for value in part["token_logprobs"]]
    assert names[:3] == [f"token_id:{EOS}"] * 3
    assert logprobs == [None, -1.0, -2.0, *[-0.5] * max_tokens]
    assert [offset for part in parts for offset in part["text_offset"]][:3] == [0, 0, 0]


async def test_scored_prompt_has_no_output(gateway, rack):
    answer = (await gateway.complete(PROMPT, max_tokens=0, echo=True, logprobs=0)).json()
    assert answer["choices"][0]["text"] == PROMPT
    assert [request.sampling.max_tokens for request in rack.engines[0].received] == [2]
    assert answer["usage"]["completion_tokens"] == 0


async def test_echo_and_prompt_logprobs_have_own_top_counts(gateway):
    answer = await gateway.complete([5, 6], max_tokens=1, echo=True, logprobs=1, prompt_logprobs=3)
    [choice] = answer.json()["choices"]
    assert len(choice["prompt_logprobs"][1]) == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1


# Two workers, and workers that die


@pytest.fixture
def faulty(rack, tokenizer):
    return lambda **config: live_gateway(rack.context, tokenizer, rack.engines, **config)


async def test_decode_tokens_wait_for_prompt_logprobs(rack, faulty):  # [position-once]
    gate = threading.Event()
    rack.add("p", healthy(first_token_gate=gate), Role.PREFILL)
    decode = rack.add("d", healthy(awaits_handoff=False), Role.DECODE)
    async with faulty() as gateway:
        answering = asyncio.ensure_future(gateway.complete([5, 6, 7], max_tokens=6, prompt_logprobs=0))
        assert await asyncio.to_thread(decode.wait_until, lambda: decode.emitted >= 6)
        gate.set()
        answer = (await answering).json()
    assert len(answer["choices"][0]["prompt_logprobs"]) == 3
    assert answer["usage"]["completion_tokens"] == 6
    assert len(decode.received) == 1


async def test_prefill_worker_that_dies_with_them_is_replaced(rack, faulty):
    gate = threading.Event()
    first = rack.add("p1", healthy(first_token_gate=gate), Role.PREFILL)
    rack.add("p2", healthy(), Role.PREFILL)
    decode = rack.add("d", healthy(awaits_handoff=False), Role.DECODE)
    async with faulty() as gateway:
        answering = asyncio.ensure_future(gateway.complete([5, 6, 7], max_tokens=6, prompt_logprobs=0, seed=1))
        assert await asyncio.to_thread(decode.wait_until, lambda: decode.emitted >= 6)
        first.stop()
        answer = (await answering).json()
    assert len(answer["choices"][0]["prompt_logprobs"]) == 3
    assert answer["usage"]["completion_tokens"] == 6
    again = decode.received[1]
    assert (again.resume_ids, again.sampling.prompt_logprobs) == ((), 0)


async def test_retry_keeps_logit_edits_and_drops_prompt_logprobs(rack, faulty):
    dying = rack.add("d1", healthy(die_after=4))
    second = rack.add("d2", healthy())
    edits = {"presence_penalty": 0.5, "logit_bias": {"7": 1}, "bad_words": ["fox"], "repetition_penalty": 1.5}
    async with faulty() as gateway:
        answer = await gateway.complete([5, 6, 7], max_tokens=9, seed=1, prompt_logprobs=1, **edits)
    [original], [resumed] = dying.received, second.received
    assert len(answer.json()["choices"][0]["prompt_logprobs"]) == 3
    assert resumed.resume_ids == tokens_of(original, len(resumed.resume_ids))
    assert resumed.resume_ids
    assert resumed.sampling == original.sampling.without_prompt_logprobs()
    assert original.sampling.prompt_logprobs == 1


def tokens_of(request: GenerateRequest, count: int) -> tuple[int, ...]:
    return tuple(TOKEN(request, position) for position in range(count))
