"""`max_tokens` 0: the prompt is computed and cached, and the answer has no output."""

import pytest

from tandem_engine.messages.requests import SessionRef
from tandem_testing.gateway_builders import events

ROUTES = [("chat", "max_tokens"), ("chat", "max_completion_tokens"), ("complete", "max_tokens")]


async def ask(gateway, route, **fields):
    return await (gateway.chat(**fields) if route == "chat" else gateway.complete("hello there", **fields))


def text_of(choice) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content") or part.get("text") or ""


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "field"), ROUTES)
async def test_prompt_alone_answers_empty_choices_and_usage(gateway, rack, route, field, stream, n):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await ask(gateway, route, n=n, stream=stream, **{field: 0}, **options)
    assert answer.status_code == 200, answer.text
    chunks = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(map(text_of, choices)) == ""
    finishes = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert sorted(finishes) == [(index, "length") for index in range(n)]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    assert [request.sampling.max_tokens for request in rack.engines[0].received] == [2] * n


@pytest.mark.parametrize(("route", "field"), ROUTES)
async def test_prompt_alone_cannot_end_at_the_prefill_worker(gateway, rack, route, field):
    answer = await ask(gateway, route, stop=["x"], stop_token_ids=[7], **{field: 0})
    assert answer.status_code == 200, answer.text
    [request] = rack.engines[0].received
    sampling = request.sampling
    assert (sampling.ignore_eos, sampling.stop, sampling.stop_token_ids) == (True, (), ())


@pytest.mark.parametrize(("route", "field"), ROUTES)
async def test_prompt_alone_with_min_tokens_is_refused(gateway, rack, route, field):
    answer = await ask(gateway, route, min_tokens=1, **{field: 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
    assert not rack.engines[0].received


@pytest.mark.parametrize(
    ("path", "field", "rest"),
    [
        ("/v1/responses", "max_output_tokens", {"input": "hello"}),
        ("/v1/messages", "max_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
async def test_apis_without_empty_answers_refuse_zero_tokens(gateway, rack, path, field, rest):
    answer = await gateway.http.post(path, json={"model": "mock", field: 0, **rest})
    assert answer.status_code == 400
    assert f"{field} must be between 1 and" in answer.json()["error"]["message"]
    assert not rack.engines[0].received


async def test_session_turn_without_output_adds_its_prompt(gateway, rack):
    fields = {"ignore_eos": True}
    first = await gateway.complete([5, 6], max_tokens=0, session_params={"id": "s", "turn": 0}, **fields)
    second = await gateway.complete([7], max_tokens=2, session_params={"id": "s", "turn": 1}, **fields)
    assert [answer.status_code for answer in (first, second)] == [200, 200]
    assert [request.session for request in rack.engines[0].received] == [
        SessionRef(id="s", turn=0, keeps_output=False),
        SessionRef(id="s", turn=1),
    ]
    assert second.json()["usage"]["prompt_tokens"] == 3


async def test_chat_turn_without_output_is_refused_in_a_session(gateway, rack):
    answer = await gateway.chat(max_tokens=0, session_params={"id": "s", "turn": 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert "/v1/completions" in answer.json()["error"]["message"]
    assert not rack.engines[0].received
