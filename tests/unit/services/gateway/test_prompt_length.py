"""truncate_prompt_tokens: prompts that are cut before their length is checked."""

import pytest

IDS = [*range(10, 30)]


def received(rack) -> list[list[int]]:
    return [[*request.input_ids] for request in rack.engines[0].received]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, IDS[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, IDS[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, IDS[:3]),
        ({"truncate_prompt_tokens": 20}, IDS),
        ({"truncate_prompt_tokens": -1}, IDS),
        ({"truncation_side": "right"}, IDS),
    ],
)
async def test_truncation_keeps_the_requested_prompt_tokens(gateway, rack, fields, kept):
    answer = await gateway.complete(IDS, max_tokens=1, **fields)
    assert received(rack) == [kept]
    assert answer.json()["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize(("max_tokens", "room"), [(12, 500), (None, 511)])
async def test_truncation_to_minus_one_leaves_room_for_max_tokens(gateway, rack, max_tokens, room):
    body = {"model": "mock", "prompt": [7] * 600 + [9] * 400, "max_tokens": max_tokens, "truncate_prompt_tokens": -1}
    body = {name: value for name, value in body.items() if value is not None}
    assert (await gateway.http.post("/v1/completions", json=body)).status_code == 200
    assert received(rack) == [([7] * 600 + [9] * 400)[-room:]]


async def test_texts_too_long_for_the_context_are_cut_exactly(gateway, rack, tokenizer):
    text = "the quick brown fox " * 4000
    assert (await gateway.complete(text, max_tokens=1, truncate_prompt_tokens=7)).status_code == 200
    assert received(rack) == [tokenizer.encode(text)[-7:]]


async def test_every_prompt_of_a_list_is_cut_for_all_its_choices(gateway, rack, tokenizer):
    prompts = ["the quick brown fox", "hello"]
    answer = await gateway.complete(prompts, n=2, max_tokens=1, truncate_prompt_tokens=2, echo=True)
    kept = [tokenizer.encode(prompt)[-2:] for prompt in prompts]
    assert sorted(received(rack)) == sorted([kept[0], kept[0], kept[1], kept[1]])
    texts = [choice["text"] for choice in answer.json()["choices"]]
    for text, ids in zip(texts, [kept[0], kept[0], kept[1], kept[1]], strict=True):
        assert text.startswith(tokenizer.decode(ids)), "what is echoed is what the model saw"


async def test_conversation_is_cut_as_it_is_rendered(gateway, rack, tokenizer):
    content = "hello " * 600
    messages = [{"role": "user", "content": content}]
    whole = tokenizer.encode_chat(messages)
    assert (await gateway.chat(content, max_tokens=1, truncate_prompt_tokens=40)).status_code == 200
    fields = {"max_completion_tokens": 12, "truncate_prompt_tokens": -1, "truncation_side": "right"}
    assert (await gateway.chat(content, **fields)).status_code == 200
    assert received(rack) == [whole[-40:], whole[:500]]


async def test_max_tokens_beyond_context_is_rejected_with_truncation(gateway, rack):
    answer = await gateway.complete(IDS, max_tokens=600, truncate_prompt_tokens=-1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not rack.engines[0].received


@pytest.mark.parametrize(("side", "kept"), [(None, IDS[:4]), ("right", IDS[:4]), ("left", IDS[-4:])])
async def test_embedding_truncation_keeps_beginning_by_default(gateway, rack, side, kept):
    body = {"model": "mock", "input": [IDS, [5]], "truncate_prompt_tokens": 4, "truncation_side": side}
    answer = await gateway.http.post("/v1/embeddings", json=body)
    assert answer.json()["usage"]["prompt_tokens"] == 5
    assert sorted(received(rack)) == sorted([kept, [5]])


async def test_long_texts_to_embed_are_cut(gateway, rack, tokenizer):
    text = "the quick brown fox " * 4000
    body = {"model": "mock", "input": text, "truncate_prompt_tokens": -1}
    assert (await gateway.http.post("/v1/embeddings", json=body)).status_code == 200
    assert received(rack) == [tokenizer.encode(text)[:511]]


@pytest.mark.parametrize("tokens", [0, -2, 512])
async def test_lengths_that_no_input_can_have_are_refused(gateway, rack, tokens):
    answer = await gateway.http.post(
        "/v1/embeddings", json={"model": "mock", "input": "hi", "truncate_prompt_tokens": tokens}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "truncate_prompt_tokens")
    assert "between 1 and 511" in error["message"]
    assert not rack.engines[0].received
