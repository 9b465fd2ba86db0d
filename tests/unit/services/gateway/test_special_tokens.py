"""Special tokens in text prompts, the option that forbids them, and `suffix`."""

import json

import pytest

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS, SPECIALS, tokenizer_document, write_tokenizer

TEXT = "a<|im_end|>b<think>"
IM_END, THINK = 2, 303
TEXT_PROMPTS = {
    "/v1/completions": {"model": "mock", "max_tokens": 1, "prompt": TEXT},
    "/v1/embeddings": {"model": "mock", "input": TEXT},
}


async def ids_of(gateway, rack, path, **fields):
    answer = await gateway.http.post(path, json={**TEXT_PROMPTS[path], **fields})
    assert answer.status_code == 200, answer.text
    return rack.engines[0].received.pop().input_ids


@pytest.mark.parametrize("path", TEXT_PROMPTS)
async def test_special_tokens_in_text_prompts_parse_by_default(gateway, rack, path):
    ids = await ids_of(gateway, rack, path)
    assert [token for token in ids if token in (IM_END, THINK)] == [IM_END, THINK]


@pytest.mark.parametrize("path", TEXT_PROMPTS)
async def test_request_forbids_special_tokens_in_its_text(gateway, rack, path):
    ids = await ids_of(gateway, rack, path, parse_special_tokens=False)
    assert [token for token in ids if token in (IM_END, THINK)] == [THINK], "only special tokens are control tokens"


async def test_tokenize_shows_what_completions_see(gateway, tokenizer):
    for parse in (None, True, False):
        answer = await gateway.http.post("/tokenize", json={"prompt": TEXT, "parse_special_tokens": parse})
        assert answer.json()["tokens"] == tokenizer.encode(TEXT, parse_special_tokens=parse is not False)


@pytest.mark.parametrize("path", TEXT_PROMPTS)
async def test_gateway_flag_forbids_special_tokens(rack, tokenizer, path):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines, parse_special_tokens=False) as gateway:
        assert IM_END not in await ids_of(gateway, rack, path)
        assert IM_END not in await ids_of(gateway, rack, path, parse_special_tokens=False)
        asked = {**TEXT_PROMPTS[path], "parse_special_tokens": True}
        answer = await gateway.http.post(path, json=asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "parse_special_tokens")
        answer = await gateway.http.post(
            "/v1/completions", json={**TEXT_PROMPTS["/v1/completions"], "prompt": [IM_END]}
        )
        assert answer.status_code == 200, "token ids are what they are"


async def test_key_forbids_special_tokens(rack, tokenizer, tmp_path):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    keys = write_keys(tmp_path, free={}, strict={"parse_special_tokens": False})
    async with live_gateway(rack.context, tokenizer, rack.engines, api_keys=keys) as gateway:
        for name, controls in (("free", [IM_END]), ("strict", [])):
            body = TEXT_PROMPTS["/v1/completions"]
            answer = await gateway.http.post("/v1/completions", json=body, headers=bearer(name))
            assert answer.status_code == 200
            assert [token for token in rack.engines[0].received.pop().input_ids if token == IM_END] == controls
        asked = {**body, "parse_special_tokens": True}
        answer = await gateway.http.post("/v1/completions", json=asked, headers=bearer("strict"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "parse_special_tokens")


def with_marks(folder, *marks: str) -> TextTokenizer:
    """A tokenizer in which the first special tokens are called `marks`."""
    document = tokenizer_document()
    for special, mark in zip(SPECIALS, marks, strict=False):
        document = document.replace(json.dumps(special), json.dumps(mark))
    write_tokenizer(folder, chat_template=None)
    (folder / "tokenizer.json").write_text(document, "utf-8")
    (folder / "tokenizer_config.json").write_text("{}", "utf-8")
    return TextTokenizer.load(folder)


@pytest.mark.parametrize(
    ("marks", "shape"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "0P1S2"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "0P1S2"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "0P1S2"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "0P1S2"),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "1S0P2"),
        (("[PREFIX]", "[SUFFIX]"), "1S0P"),
    ],
)
async def test_suffix_fills_in_the_middle(rack, tmp_path, marks, shape):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    fim = with_marks(tmp_path, *marks)
    texts = {"P": "def f(x):\n    return ", "S": "\n\nprint(f(2))"}
    expected = [t for sign in shape for t in (fim.encode(texts[sign]) if sign in texts else [int(sign)])]
    async with live_gateway(rack.context, fim, rack.engines) as gateway:
        body = {"model": "mock", "prompt": texts["P"], "suffix": texts["S"], "max_tokens": 1}
        answer = await gateway.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert list(rack.engines[0].received.pop().input_ids) == expected
        assert (await gateway.http.post("/v1/completions", json={**body, "suffix": ""})).status_code == 200
        assert list(rack.engines[0].received.pop().input_ids) == fim.encode(texts["P"])
        for other in ({"echo": True}, {"truncate_prompt_tokens": 3}, {"session_params": {"id": "s"}}):
            refused = await gateway.http.post("/v1/completions", json={**body, **other})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(other)))
        refused = await gateway.http.post("/v1/completions", json={**body, "prompt": [5, 6]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


async def test_suffix_without_marks_is_refused_by_name(gateway, rack):
    answer = await gateway.complete("a", suffix="b")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert "no tokens that mark" in answer.json()["error"]["message"]
    assert not rack.engines[0].received
