"""Fields of the objects within request bodies: each is served, known to have no effect, or refused by its path."""

from typing import Any

import anthropic.types as anthropic
import msgspec
import openai.types.chat as chats
import openai.types.responses as responses
import openai.types.shared_params as shared
import pytest
from msgspec import inspect
from openai.types.responses.response_create_params import StreamOptions as ResponsesStream

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import ApiError
from tandem_services.gateway.api.anthropic import requests as anthropic_chats
from tandem_services.gateway.api.anthropic.schemas import MessagesRequest
from tandem_services.gateway.api.embeddings import EmbeddingRequest
from tandem_services.gateway.api.openai_schemas import ChatRequest, CompletionRequest, TokenizeRequest
from tandem_services.gateway.api.responses import requests as response_chats
from tandem_services.gateway.api.responses.schemas import ResponsesRequest
from tandem_services.gateway.api.sessions import CloseRequest, OpenRequest
from tandem_services.gateway.http.body import BodyDecoder
from tandem_services.gateway.http.known_fields import NESTED_WITHOUT_EFFECT, is_refused, nested_objects, shape_fields
from tandem_testing.gateway_builders import live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, EmbeddingRequest, TokenizeRequest)
OBJECTS = [(body, place, shape) for body in BODIES for place, shape in nested_objects(body)]
SESSIONS = (OpenRequest, CloseRequest)


def minimal(type_: inspect.Type, into: list[str] | None = None, extra: dict[str, Any] | None = None) -> Any:
    """The smallest value of a type, with what is on the way `into` it, whose end has `extra` fields."""
    match type_:
        case inspect.UnionType(types=types):
            found = (minimal(each, into, extra) for each in types)
            return next((each for each in found if each is not None), None)
        case inspect.Metadata(type=inner):
            return minimal(inner, into, extra)
        case inspect.ListType(item_type=item):
            if into is None:
                return []
            if not into or into[0] != "[]":
                return None
            found = minimal(item, into[1:], extra)
            return None if found is None else [found]
        case inspect.StructType():
            return _object(type_, into, extra)
        case _ if into is not None:
            return None
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.StrType():
            return "text"
        case inspect.DictType():
            return {"a": 1}
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType():
            return 1
        case _:
            return "text"


def _object(shape: inspect.StructType, into: list[str] | None, extra: dict[str, Any] | None) -> Any:
    tag = {} if shape.tag is None else {str(shape.tag_field): shape.tag}
    value = tag | {field.encode_name: minimal(field.type) for field in shape.fields if field.required}
    if into is None:
        return value
    if shape.tag is not None:
        if into[:1] != [f"({shape.tag})"]:
            return None
        into = into[1:]
    if not into:
        return value | (extra or {})
    inner = next((field for field in shape.fields if field.encode_name == into[0]), None)
    found = None if inner is None else minimal(inner.type, into[1:], extra)
    return None if found is None else value | {into[0]: found}


def steps(place: str) -> list[str]:
    return place.replace("[]", ".[]").replace("(", ".(").split(".")


def path_of(place: str) -> str:
    """As errors have it."""
    return "".join(
        "[0]" if step == "[]" else "" if step.startswith("(") else f".{step}" for step in steps(place)
    ).lstrip(".")


def decoder(body: type[msgspec.Struct]) -> BodyDecoder[Any]:
    return BodyDecoder(body, strict=False, closed=body not in (TokenizeRequest, *SESSIONS))


def refused(body: type[msgspec.Struct], document: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decoder(body).decode(msgspec.json.encode(document))
    assert caught.value.status == 400
    return caught.value


def test_objects_of_every_route_are_found():
    assert {body for body, _, _ in OBJECTS} == {*BODIES} - {EmbeddingRequest}
    assert len({shape for _, _, shape in OBJECTS}) > 25


@pytest.mark.parametrize(
    ("body", "place", "shape"), OBJECTS, ids=[f"{body.__name__}-{place}" for body, place, _ in OBJECTS]
)
def test_unknown_fields_of_objects_are_refused_by_path(body, place, shape):
    document = minimal(inspect.type_info(body), steps(place), {})
    assert document is not None
    decoder(body).decode(msgspec.json.encode(document))
    for value in (1, None, {}, []):
        error = refused(body, minimal(inspect.type_info(body), steps(place), {"no_such_field": value}))
        assert error.param == f"{path_of(place)}.no_such_field"
        assert "is not a known field" in str(error)


@pytest.mark.parametrize("body", SESSIONS)
def test_unknown_fields_of_sessions_are_refused(body):
    known = {"session_id": "s", "rid": "r", "capacity_of_str_len": 9} if body is OpenRequest else {"session_id": "s"}
    decoder(body).decode(msgspec.json.encode(known))
    assert refused(body, known | {"no_such_field": 1}).param == "no_such_field"


def test_refused_fields_are_taken_as_null_alone():
    seen = 0
    for body, place, shape in OBJECTS:
        for field in filter(is_refused, shape_fields(shape)):
            seen += 1
            with_null = minimal(inspect.type_info(body), steps(place), {field.encode_name: None})
            decoder(body).decode(msgspec.json.encode(with_null))
            document = minimal(inspect.type_info(body), steps(place), {field.encode_name: {"asks": "for something"}})
            error = refused(body, document)
            assert error.param == f"{path_of(place)}.{field.encode_name}"
            assert "is not supported here; " in str(error)
    assert seen > 10


def test_fields_without_effect_are_of_the_structs():
    shapes = {shape for _, _, shape in OBJECTS} | {*SESSIONS}
    fields = {f"{shape.__name__}.{name}" for shape in shapes for name in shape.__struct_encode_fields__}
    assert set(NESTED_WITHOUT_EFFECT) <= fields


CLIENTS: dict[tuple[type[msgspec.Struct], str], tuple[Any, ...]] = {
    (ChatRequest, "messages[]"): (
        chats.ChatCompletionAssistantMessageParam,
        chats.ChatCompletionUserMessageParam,
        chats.ChatCompletionToolMessageParam,
        chats.ChatCompletionMessage,
        chats.ParsedChatCompletionMessage,
    ),
    (ChatRequest, "messages[].content[]"): (
        chats.ChatCompletionContentPartTextParam,
        chats.ChatCompletionContentPartImageParam,
        chats.ChatCompletionContentPartInputAudioParam,
        chats.ChatCompletionContentPartRefusalParam,
    ),
    (ChatRequest, "messages[].tool_calls[]"): (
        chats.ChatCompletionMessageToolCallParam,
        chats.ParsedFunctionToolCall,
    ),
    (ChatRequest, "messages[].tool_calls[].function"): (chats.ParsedFunction,),
    (ChatRequest, "tools[]"): (chats.ChatCompletionFunctionToolParam, chats.ChatCompletionCustomToolParam),
    (ChatRequest, "tools[].function"): (shared.FunctionDefinition,),
    (ChatRequest, "stream_options"): (chats.ChatCompletionStreamOptionsParam,),
    (ChatRequest, "response_format"): (shared.ResponseFormatJSONSchema,),
    (ChatRequest, "response_format.json_schema"): (shared.response_format_json_schema.JSONSchema,),
    (ResponsesRequest, "input[]"): (
        responses.EasyInputMessageParam,
        responses.ResponseOutputMessageParam,
        responses.ResponseFunctionToolCallParam,
        responses.ResponseReasoningItemParam,
        responses.response_input_param.FunctionCallOutput,
        responses.ParsedResponseFunctionToolCall,
    ),
    (ResponsesRequest, "input[].content[]"): (
        responses.ResponseInputTextParam,
        responses.ResponseOutputTextParam,
        responses.ResponseOutputRefusalParam,
        responses.ResponseInputImageParam,
        responses.ResponseInputFileParam,
        responses.ParsedResponseOutputText,
    ),
    (ResponsesRequest, "tools[]"): (responses.FunctionToolParam,),
    (ResponsesRequest, "text"): (responses.ResponseTextConfigParam,),
    (ResponsesRequest, "text.format"): (responses.ResponseFormatTextJSONSchemaConfigParam,),
    (ResponsesRequest, "reasoning"): (shared.Reasoning,),
    (ResponsesRequest, "stream_options"): (ResponsesStream,),
    (MessagesRequest, "messages[]"): (
        anthropic.user_message_param.UserMessageParam,
        anthropic.assistant_message_param.AssistantMessageParam,
    ),
    (MessagesRequest, "messages[].content[]"): (
        anthropic.TextBlockParam,
        anthropic.ThinkingBlockParam,
        anthropic.RedactedThinkingBlockParam,
        anthropic.ToolUseBlockParam,
        anthropic.ToolResultBlockParam,
        anthropic.ImageBlockParam,
        anthropic.DocumentBlockParam,
        anthropic.ParsedTextBlock,
    ),
    (MessagesRequest, "tools[]"): (anthropic.ToolParam,),
    (MessagesRequest, "thinking"): (anthropic.ThinkingConfigEnabledParam, anthropic.ThinkingConfigAdaptiveParam),
    (MessagesRequest, "output_config"): (anthropic.OutputConfigParam,),
    (MessagesRequest, "metadata"): (anthropic.MetadataParam,),
}


@pytest.mark.parametrize(("body", "place"), CLIENTS, ids=[f"{body.__name__}-{place}" for body, place in CLIENTS])
def test_fields_of_the_clients_types_are_known(body, place):
    (shape,) = {each for one, where, each in OBJECTS if (one, where) == (body, place)}
    for kind in CLIENTS[body, place]:
        fields = getattr(kind, "model_fields", None) or kind.__annotations__
        names = {name.removesuffix("_") for name in fields}
        assert names <= {*shape.__struct_encode_fields__}, (kind.__name__, names - {*shape.__struct_encode_fields__})


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "text", "text": "a", "image_url": {"url": "x"}}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "messages[0].content[0]"),
        ({"type": "text", "text": "a", "detail": "high"}, "messages[0].content[0].detail"),
    ],
)
async def test_content_parts_of_unsupported_types_are_refused(rack, tokenizer, part, param):
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        answer = await live.chat(messages=[{"role": "user", "content": [part]}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_blocks_of_other_types_are_refused():
    image = {"type": "text", "text": "a", "source": {"type": "url"}}
    for kind, param in (("text", "messages[0].content[0].source"), ("image", "messages[0].content[0]")):
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": [image | {"type": kind}]}]}
        request = decoder(MessagesRequest).decode(msgspec.json.encode(body))
        with pytest.raises(ApiError) as caught:
            anthropic_chats.chat_request(request)
        assert caught.value.param == param
    part = {"type": "input_text", "text": "a", "file_id": "f"}
    given = {"input": [{"role": "user", "content": [part]}]}
    asked = decoder(ResponsesRequest).decode(msgspec.json.encode(given))
    with pytest.raises(ApiError) as caught:
        response_chats.chat_request(asked)
    assert caught.value.param == "input[0].content[0].file_id"


def test_type_of_an_object_is_named_with_its_field():
    error = refused(ResponsesRequest, {"input": [{"type": "computer_call", "action": {}}]})
    assert str(error) == "input[0].action is not a known field in an object of the type computer_call; leave it out"


TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}
CALLING = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


async def test_whole_response_messages_are_accepted_as_input_messages(rack, tmp_path):
    """All of a message, as programs do that keep what they got."""
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=THINKING_CHATML))
    ids = script(tokenizer, CALLING, eos=EOS)
    rack.add("solo", MockBehavior(token=scripted_tokens(ids), eos=EOS)).context_length = 4096
    async with live_gateway(rack.context, tokenizer, rack.engines, tool_call_parser="hermes") as live:
        function = {"name": "weather", "parameters": TOOL}
        asked = [{"role": "user", "content": "hi"}]
        tools = {"tools": [{"type": "function", "function": function}]}
        message = (await live.chat(messages=asked, **tools)).json()["choices"][0]["message"]
        again = await live.chat(messages=[*asked, message, _result(message)], **tools)
        assert again.status_code == 200, again.text
        flat = {"model": "mock", "tools": [{"type": "function", **function}]}
        output = (await live.http.post("/v1/responses", json={**flat, "input": asked})).json()["output"]
        answered = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "rain"}
        again = await live.http.post("/v1/responses", json={**flat, "input": [*asked, *output, answered]})
        assert again.status_code == 200, again.text
        own = {"model": "mock", "max_tokens": 400, "tools": [{"name": "weather", "input_schema": TOOL}]}
        content = (await live.http.post("/v1/messages", json={**own, "messages": asked})).json()["content"]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "rain"}
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        again = await live.http.post("/v1/messages", json={**own, "messages": [*asked, *turns]})
        assert again.status_code == 200, again.text


def _result(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
