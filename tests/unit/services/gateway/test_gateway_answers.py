"""What a client is answered: the rules that conformance suites assert."""

import asyncio

import pytest

from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import events, live_gateway, script
from tandem_testing.loop_time import set_forward
from tandem_testing.mock_engine import MockBehavior, hash_tokens, scripted_tokens
from tandem_testing.tokenizer_builders import CHATML, EOS, write_tokenizer

USAGE = {"include_usage": True}


@pytest.fixture
async def says(rack, tokenizer):
    """Make a gateway whose engine always answers the given text, then EOS."""
    async with asyncio.timeout(60):
        contexts = []

        async def start(text: str, **behavior):
            ids = script(tokenizer, text, eos=EOS)
            rack.add("solo", MockBehavior(token=scripted_tokens(ids), eos=EOS, **behavior))
            contexts.append(live_gateway(rack.context, tokenizer, rack.engines))
            return await contexts[-1].__aenter__()

        yield start
        for context in contexts:
            await context.__aexit__(None, None, None)


def chat_text(chunks: list[dict], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


# [stream-shape]: streams


async def test_chat_stream_has_role_first_one_finish_and_usage_last(gateway):
    chunks = events(await gateway.chat(max_tokens=6, stream=True, stream_options=USAGE))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert not any("role" in choice["delta"] for chunk in chunks[1:] for choice in chunk["choices"])
    assert len({(chunk["id"], chunk["model"], chunk["object"], chunk["created"]) for chunk in chunks}) == 1
    finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert finishes == ["length"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6


async def test_stream_without_include_usage_has_no_usage(gateway):
    chunks = events(await gateway.chat(max_tokens=4, stream=True))
    assert not any("usage" in chunk for chunk in chunks)


async def test_continuous_usage_counts_up(gateway):
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = events(await gateway.complete(max_tokens=4, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


# [stream-equals-whole]: streamed text is the text


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"temperature": 0}])
async def test_streamed_chat_text_equals_the_whole_text(gateway, fields):
    fields = {"max_tokens": 9, "seed": 7, **fields}
    whole = (await gateway.chat(**fields)).json()
    chunks = events(await gateway.chat(stream=True, **fields))
    for choice in whole["choices"]:
        assert chat_text(chunks, choice["index"]) == choice["message"]["content"]


async def test_choices_of_prompt_lists_are_numbered_prompt_by_prompt(gateway):
    fields = {"max_tokens": 5, "seed": 3, "n": 2}
    whole = (await gateway.complete(["one", "two"], **fields)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    alone = (await gateway.complete("two", **fields)).json()
    assert [c["text"] for c in alone["choices"]] == [c["text"] for c in whole["choices"][2:]]
    chunks = events(await gateway.complete(["one", "two"], stream=True, **fields))
    for choice in whole["choices"]:
        parts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(parts) == choice["text"]


# [usage-adds-up]: usage


async def test_usage_counts_every_generated_token_and_each_prompt_once(gateway, tokenizer):
    usage = (await gateway.complete(["one", "three"], n=2, max_tokens=5)).json()["usage"]
    prompt = len(tokenizer.encode("one")) + len(tokenizer.encode("three"))
    assert usage["prompt_tokens"] == prompt
    assert usage["completion_tokens"] == 20
    assert usage["total_tokens"] == prompt + 20
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_output_that_is_only_eos_counts_one_token(says):  # [stop-strings]
    gateway = await says("")
    answer = (await gateway.chat(max_tokens=5)).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0] == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "",
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        },
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


# [echo-is-prompt]: echo


async def test_echo_puts_the_prompt_first(gateway):
    plain = (await gateway.complete("hello", max_tokens=4, seed=1)).json()["choices"][0]["text"]
    echoed = (await gateway.complete("hello", max_tokens=4, seed=1, echo=True)).json()["choices"][0]["text"]
    assert echoed == "hello" + plain
    chunks = events(await gateway.complete("hello", max_tokens=4, seed=1, echo=True, stream=True))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == echoed


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_tokens_answers_the_computed_prompt(gateway, rack, stream):
    answer = await gateway.complete("hello", max_tokens=0, echo=True, stream=stream)
    chunks = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "hello"
    assert choices[-1]["finish_reason"] == "length"
    assert len(rack.engines[0].received) == 1


async def test_token_id_prompts_are_taken_as_they_are(gateway, rack):  # [token-id-prompts]
    assert (await gateway.complete([5, 6, 7], max_tokens=1)).status_code == 200
    assert (await gateway.complete([[5, 6], [7]], max_tokens=1)).status_code == 200
    assert [request.input_ids for request in rack.engines[0].received] == [(5, 6, 7), (5, 6), (7,)]


# [logprobs-fields]: logprobs


async def test_completion_logprobs_have_equal_lengths_and_offsets(says):
    gateway = await says("fox quick")
    choice = (await gateway.complete(max_tokens=20, logprobs=2)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"][:-1], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])


async def test_completion_logprobs_zero_name_the_sampled_token(says):
    gateway = await says("fox")
    logprobs = (await gateway.complete(max_tokens=20, logprobs=0)).json()["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_have_bytes_and_requested_top_logprobs(says, stream):
    gateway = await says("né fox")
    answer = await gateway.chat(max_tokens=20, logprobs=True, top_logprobs=2, stream=stream)
    choices = [c for chunk in events(answer) for c in chunk["choices"]] if stream else answer.json()["choices"]
    content = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]]
    spelled = b"".join(bytes(item["bytes"]) for item in content)
    assert spelled.decode() == "né fox<|im_end|>"
    assert {len(item["top_logprobs"]) for item in content} == {2}


async def test_chat_logprobs_without_alternatives_are_empty_lists(gateway):
    choice = (await gateway.chat(max_tokens=2, logprobs=True)).json()["choices"][0]
    assert [item["top_logprobs"] for item in choice["logprobs"]["content"]] == [[], []]


# [stop-strings]: stop


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cuts_text_tokens_and_logprobs_at_one_place(says, tokenizer, rack, stream):  # [one-cut]
    gateway = await says("hello wSTOPorld and much more text")
    fields = {"max_tokens": 60, "stop": ["STOP"], "logprobs": 0, "stream": stream, "stream_options": None}
    if stream:
        fields["stream_options"] = USAGE
    answer = await gateway.complete(**fields)
    chunks = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "hello w"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "STOP"
    tokens = "".join(t for choice in choices if choice["logprobs"] for t in choice["logprobs"]["tokens"])
    assert tokens == "hello wSTOP"
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokenizer.encode("hello wSTOP"))
    assert rack.engines[0].wait_until(lambda: rack.engines[0].aborted or not rack.engines[0].running)


async def test_no_chunk_shows_a_possible_beginning_of_a_stop_string(says):
    gateway = await says("go ST on STOP never")
    chunks = events(await gateway.chat(max_tokens=60, stop="STOP", stream=True))
    shown = ""
    for chunk in chunks:
        shown += chat_text([chunk])
        assert not shown.endswith("STO")
    assert shown == "go ST on "


async def test_stop_string_stays_on_request(says):
    gateway = await says("hello STOP world")
    answer = await gateway.complete(max_tokens=60, stop="STOP", include_stop_str_in_output=True)
    assert answer.json()["choices"][0]["text"] == "hello STOP"


async def test_stop_token_is_reported_and_not_shown(says, tokenizer):
    gateway = await says("ab.cd")
    [dot] = tokenizer.encode(".")
    choice = (await gateway.complete(max_tokens=60, stop_token_ids=[dot])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", dot)


async def test_special_tokens_are_shown_only_on_request(says):
    gateway = await says("ab")
    fields = {"max_tokens": 3, "ignore_eos": True, "skip_special_tokens": False}
    assert (await gateway.complete(**fields)).json()["choices"][0]["text"] == "ab<|im_end|>"


@pytest.mark.parametrize("tokens_per_output", [1, 3])
async def test_characters_are_never_cut_in_a_stream(says, tokens_per_output):  # [whole-characters]
    text = "👨‍👩‍👧‍👦 naïve 你好 🎉"
    gateway = await says(text, tokens_per_output=tokens_per_output)
    chunks = events(await gateway.chat(max_tokens=200, stream=True))
    assert chat_text(chunks) == text
    assert not any("\ufffd" in chat_text([chunk]) for chunk in chunks)


# [seeds-repeat]: seeds


async def test_choices_of_one_seed_differ_and_repeat(gateway, rack):
    first = (await gateway.chat(n=3, seed=5, max_tokens=8)).json()["choices"]
    again = (await gateway.chat(n=3, seed=5, max_tokens=8)).json()["choices"]
    texts = [choice["message"]["content"] for choice in first]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in again]
    assert {request.sampling.seed for request in rack.engines[0].received} == {5, 6, 7}


async def test_seeds_at_the_end_of_the_range_stay_in_it(gateway, rack):
    assert (await gateway.chat(n=2, seed=2**63 - 1, max_tokens=1)).status_code == 200
    assert {r.sampling.seed for r in rack.engines[0].received} == {2**63 - 1, -(2**63)}


async def test_requests_without_a_seed_draw_different_ones(gateway, rack):
    for _ in range(2):
        await gateway.chat(max_tokens=1)
    first, second = rack.engines[0].received
    assert first.sampling.seed != second.sampling.seed


# [context-length] [output-limit]: lengths


async def test_chat_may_use_the_rest_of_the_context(gateway, rack, tokenizer):
    await gateway.chat("hello")
    [request] = rack.engines[0].received
    assert request.sampling.max_tokens + len(request.input_ids) == 512


async def test_completions_default_to_sixteen_tokens_or_what_fits(gateway, rack):
    await gateway.complete([7] * 10)
    await gateway.complete([7] * 508)
    assert [r.sampling.max_tokens for r in rack.engines[0].received] == [16, 4]


async def test_prompt_that_fills_the_context_exactly_is_served(gateway):
    assert (await gateway.complete([7] * 500, max_tokens=12)).status_code == 200
    assert (await gateway.complete([7] * 511, max_tokens=1)).status_code == 200


async def test_newer_name_of_max_tokens_wins(gateway):
    usage = (await gateway.chat(max_tokens=9, max_completion_tokens=3)).json()["usage"]
    assert usage["completion_tokens"] == 3


# [unknown-fields] [null-is-absent]: extra and null fields


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
async def test_continue_final_message_extends_the_assistant_message(gateway, rack, tokenizer, fields):  # [known-fields]
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the quick"}]
    body = {"model": "mock", "messages": messages, "continue_final_message": True, **fields}
    answer = await gateway.http.post("/v1/chat/completions", json={**body, "max_tokens": 2})
    assert answer.status_code == 200
    prompt = rack.engines[0].received[0].input_ids
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\nthe quick")
    assert (await gateway.http.post("/tokenize", json=body)).json()["tokens"] == list(prompt)


async def test_chat_template_receives_documents_and_reasoning_effort(rack, tmp_path):  # [known-fields]
    template = "{{ reasoning_effort }}:{% for d in documents %}{{ d.text }};{% endfor %}" + CHATML
    knowing = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=template))
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, knowing, rack.engines) as live:
        reported = {"documents": [{"text": "a<|im_end|>"}, {"text": "b"}], "reasoning_effort": "high"}
        assert (await live.chat("hi", max_tokens=1, **reported)).status_code == 200
        prompt = rack.engines[0].received[0].input_ids
        body = {"messages": [{"role": "user", "content": "hi"}], **reported}
        assert (await live.http.post("/tokenize", json=body)).json()["tokens"] == list(prompt)
    assert knowing.decode(prompt, skip_special_tokens=False).startswith("high:a<|im_end|>;b;<|im_start|>user\nhi")
    assert prompt.count(EOS) == 1, "a literal in a document is text"


async def test_unknown_and_neutral_fields_are_accepted(gateway):
    harmless = {
        "made_up": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "bad_words": [],
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "return_token_ids": False,
        "stream_interval": 1,
    }
    assert (await gateway.chat(max_tokens=1, **harmless)).status_code == 200


async def test_null_means_absent_for_every_field(gateway):
    from tandem_services.gateway.api.openai_schemas import ChatRequest

    names = set(ChatRequest.__struct_fields__) - {"model", "messages", "max_tokens"}
    assert (await gateway.chat(max_tokens=1, **dict.fromkeys(names))).status_code == 200


async def test_text_parts_are_joined_and_developer_becomes_system(gateway, rack, tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    body = {"model": "mock", "messages": messages, "max_tokens": 1}
    assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
    expected = [{"role": "system", "content": "be"}, {"role": "user", "content": "a\nb"}]
    assert rack.engines[0].received[0].input_ids == tuple(tokenizer.encode_chat(expected))


# [response-ids]: ids


async def test_clients_request_id_is_echoed_and_ours_names_the_answer(gateway):
    headers = {"X-Request-Id": "mine-1"}
    body = {"model": "mock", "prompt": "a", "max_tokens": 1}
    answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"].startswith("cmpl-")
    chat = await gateway.chat(max_tokens=1)
    assert chat.json()["id"] == f"chatcmpl-{chat.headers['x-request-id']}"


@pytest.mark.parametrize("bad", ["a b", "x" * 129, ""])
async def test_insane_request_id_is_replaced(gateway, bad):
    answer = await gateway.http.get("/live", headers={"X-Request-Id": bad})
    assert len(answer.headers["x-request-id"]) == 32


# [errors-in-place]: errors


async def test_error_after_the_first_chunk_is_one_event_before_done(rack, tokenizer):
    failure = Finish(reason=FinishReason.ERROR, code="engine_error", error="/secret/path exploded")
    ids = script(tokenizer, "hello there", eos=EOS)
    behavior = MockBehavior(token=scripted_tokens(ids), eos=EOS, fail_after=(3, failure))
    rack.add("solo", behavior)
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        answer = await gateway.chat(max_tokens=9, stream=True)
        chunks = events(answer)
        assert answer.status_code == 200
        assert chat_text(chunks[:-1]) == tokenizer.decode(ids[:3])
        assert [("error" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in answer.text


async def test_error_before_the_first_chunk_is_a_status(rack, tokenizer):
    refuse = Finish(reason=FinishReason.ERROR, code="invalid_request", error="top_k is odd", param="top_k")
    rack.add("solo", MockBehavior(token=hash_tokens(3, 200), refuse=refuse))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        answer = await gateway.chat(max_tokens=9, stream=True)
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "top_k is odd",
            "type": "BadRequestError",
            "param": "top_k",
            "code": None,
        }


async def test_request_that_outlives_its_deadline_is_a_504(rack, tokenizer):
    engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 200), mute=True))
    async with live_gateway(rack.context, tokenizer, rack.engines, request_timeout_s=30.0) as gateway:
        answering = asyncio.ensure_future(gateway.chat(max_tokens=9))
        assert await asyncio.to_thread(engine.wait_until, lambda: bool(engine.received))
        set_forward(30.0)
        assert (await answering).status_code == 504
        assert await asyncio.to_thread(engine.wait_until, lambda: engine.aborted)
