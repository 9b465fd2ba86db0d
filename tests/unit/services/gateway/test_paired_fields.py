"""Every request field has its place in the arrays of `make pairs`, and a comparison finds what differs."""

import json

import httpx
import pytest

from tandem_services.gateway.api.anthropic.schemas import MessagesRequest
from tandem_services.gateway.api.openai_schemas import ChatRequest, CompletionRequest
from tandem_services.gateway.api.responses.schemas import ResponsesRequest
from tandem_services.gateway.http.known_fields import WITHOUT_EFFECT
from tandem_testing.pairs.answers import differences, streamed_answer, whole_answer
from tandem_testing.pairs.covering import pairs_of
from tandem_testing.pairs.fields import CHATS, COMPLETIONS
from tandem_testing.pairs.other_apis import MESSAGES, RESPONSES

SHAPES_OF = [
    (COMPLETIONS, CompletionRequest),
    (CHATS, ChatRequest),
    (RESPONSES, ResponsesRequest),
    (MESSAGES, MessagesRequest),
]


@pytest.mark.parametrize(("route", "shape"), SHAPES_OF)
def test_every_field_is_paired_or_has_a_reason_not_to_be(route, shape) -> None:
    fields = {*shape.__struct_fields__}
    assert fields - route.fields() - {*route.not_paired} - {*WITHOUT_EFFECT} == set()
    assert route.fields() | {*route.not_paired} <= fields
    assert not route.fields() & ({*route.not_paired} | {*WITHOUT_EFFECT})


@pytest.mark.parametrize("route", [route for route, _ in SHAPES_OF])
def test_each_row_is_a_body_without_a_refused_pair(route) -> None:
    refused = {frozenset((each.one, each.other)) for each in route.refused}
    for row in route.rows(3):
        assert refused.isdisjoint(pairs_of(row))
        assert route.body(row).items() >= route.always.items()


def whole(**choice: object) -> httpx.Response:
    output = {"index": 0, "text": "ab", "token_ids": [5, 6], "finish_reason": "length", "logprobs": None, **choice}
    return httpx.Response(200, json={"id": "x", "choices": [output], "usage": {"completion_tokens": 2}})


def stream(*pieces: dict[str, object], end: str = "[DONE]") -> httpx.Response:
    chunks = [{"choices": [{"index": 0, "finish_reason": None, **piece}]} for piece in pieces]
    chunks.append({"choices": [], "usage": {"completion_tokens": 2}})
    return httpx.Response(200, text="".join(f"data: {each}\n\n" for each in [*map(json.dumps, chunks), end]))


PIECES = ({"text": "a", "token_ids": [5]}, {"text": "b", "token_ids": [6], "finish_reason": "length"})


def test_pieces_of_a_stream_equal_the_whole_answer() -> None:
    assert [*differences(whole_answer(whole()), streamed_answer(stream(*PIECES)))] == []


@pytest.mark.parametrize(
    ("other", "place"),
    [
        (whole(text="ac"), "choices.0.text: 'ac' and 'ab'"),
        (whole(token_ids=[5, 7]), "choices.0.token_ids[1]: 7 and 6"),
        (whole(finish_reason="stop"), "choices.0.finish_reason: 'stop' and 'length'"),
        (whole(logprobs={"tokens": ["a", "b"]}), "choices.0.logprobs: {'tokens': ['a', 'b']} and None"),
        (
            httpx.Response(400, json={"error": {"param": "n"}}),
            "error: {'param': 'n'} and None",
        ),
    ],
)
def test_stream_that_differs_is_found(other, place) -> None:
    assert place in [*differences(whole_answer(other), streamed_answer(stream(*PIECES)))]


def test_logprobs_are_equal_within_the_tolerance() -> None:
    assert [*differences([-1.0, None], [-1.0005, None])] == []
    assert [*differences([-1.0], [-1.002])] == ["[0]: -1.0 and -1.002"]


def test_stream_without_the_done_event_fails_the_comparison() -> None:
    with pytest.raises(AssertionError, match="the stream ends with"):
        streamed_answer(stream(*PIECES, end="{}"))
