"""Responses and Messages as routes of `make pairs`: the axes that their bodies share with chats, their own tools and
lengths, and one form of their whole and streamed answers.

Left out of an answer: ids, times, and cached tokens.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from tandem_testing.pairs.answers import Answer
from tandem_testing.pairs.fields import NOT_PAIRED, SHAPES, SHARED, WEATHER, Parts, Route

GRAMMARS = "beside tools they are refused, and as constraints of a step they are paired in chats"
NOT_HERE = {
    **{name: NOT_PAIRED[name] for name in ("model", "stream")},
    **dict.fromkeys(SHAPES, GRAMMARS),
    "chat_template_kwargs": "paired in chats",
}
ENDS = ("response.completed", "response.incomplete", "response.failed")
FUNCTION = WEATHER["function"]
TEMPERATURES: Parts = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 7}}


def shared_axes(*without: str) -> Mapping[str, Parts]:
    return {name: values for name, values in SHARED.items() if name not in ("choices", "id names", "grammar", *without)}


def whole_response(response: httpx.Response) -> Answer:
    """Of a body of /v1/responses."""
    document = response.json()
    return {"error": document["error"]} if response.status_code != 200 else _response(document)


def streamed_response(response: httpx.Response) -> Answer:
    """Of its events. Raises `AssertionError` for pieces that are not what the last event says."""
    if response.status_code != 200:
        return whole_response(response)
    pieces: dict[int, str] = {}
    last: dict[str, Any] = {}
    for last in _events(response):
        if last["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            pieces[last["output_index"]] = pieces.get(last["output_index"], "") + last["delta"]
    if last.get("type") == "error":
        return {"error": last.get("error", last)}
    assert last.get("type") in ENDS, f"the stream ends with {last}"
    output = _response(last["response"])
    texts = {number: _text(item) for number, item in enumerate(output["output"])}
    assert {**dict.fromkeys(texts, ""), **pieces} == texts, f"{pieces} are not {texts}"
    return output


def whole_message(response: httpx.Response) -> Answer:
    """Of a body of /v1/messages."""
    document = response.json()
    return {"error": document["error"]} if response.status_code != 200 else _message(document)


def streamed_message(response: httpx.Response) -> Answer:
    """Of its events. Raises `AssertionError` for one that has no proper end."""
    if response.status_code != 200:
        return whole_message(response)
    document: dict[str, Any] = {}
    event: dict[str, Any] = {}
    for event in _events(response):
        match event["type"]:
            case "message_start":
                document = event["message"]
            case "content_block_start":
                document["content"].append({**event["content_block"], "pieces": ""})
            case "content_block_delta":
                delta = event["delta"]
                document["content"][event["index"]]["pieces"] += delta.get("text") or delta.get("partial_json") or ""
            case "message_delta":
                document |= event["delta"]
                document["usage"] |= event["usage"]
            case "error":
                return {"error": event["error"]}
    assert event.get("type") == "message_stop", f"the stream ends with {event}"
    for block in document["content"]:
        pieces = block.pop("pieces")
        block.update({"input": json.loads(pieces or "{}")} if block["type"] == "tool_use" else {"text": pieces})
    return _message(document)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.text.split("\n"):
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _response(document: Mapping[str, Any]) -> Answer:
    usage = document["usage"] or {}
    return {
        "status": document["status"],
        "incomplete": document["incomplete_details"],
        "output": [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in document["output"]],
        "usage": {name: value for name, value in usage.items() if name != "input_tokens_details"},
    }


def _text(item: Mapping[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


def _message(document: Mapping[str, Any]) -> Answer:
    usage = document["usage"]
    return {
        "content": [{k: v for k, v in block.items() if k != "id"} for block in document["content"]],
        "stop": (document["stop_reason"], document["stop_sequence"]),
        "input_tokens": sum(value or 0 for name, value in usage.items() if name.endswith("input_tokens")),
        "output_tokens": usage["output_tokens"],
    }


RESPONSES = Route(
    path="/v1/responses",
    always={},
    streamed={"stream": True},
    whole_form=whole_response,
    streamed_form=streamed_response,
    not_paired={
        **NOT_HERE,
        "text": GRAMMARS,
        "stream_options": "without effect here",
        "reasoning": "the bundled model does not reason",
        "include_reasoning": "the bundled model does not reason",
        "include": "what may be included needs nothing done",
    },
    axes={
        **shared_axes(),
        "input": {
            "text": {"input": "Tell me about a bear."},
            "messages": {"input": [{"role": "user", "content": "Tell me about a bear."}]},
            "instructions": {"input": "Tell me about a bear.", "instructions": "Be short."},
        },
        "length": {"10": {"max_output_tokens": 10}, "24": {"max_output_tokens": 24}},
        "tools": {
            "absent": {},
            "none": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"},
            "auto": {"tools": [{"type": "function", **FUNCTION}]},
            "one at a time": {"tools": [{"type": "function", **FUNCTION}], "parallel_tool_calls": False},
        },
    },
    refused=(),
    whole_only={},
)

ASKED = {"role": "user", "content": "Tell me about a bear."}
TOOL = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}

MESSAGES = Route(
    path="/v1/messages",
    always={},
    streamed={"stream": True},
    whole_form=whole_message,
    streamed_form=streamed_message,
    not_paired={**NOT_HERE, "output_config": GRAMMARS, "thinking": "the bundled model does not reason"},
    axes={
        **shared_axes("stop", "client"),
        "drawing": TEMPERATURES,
        "messages": {
            "one": {"messages": [ASKED]},
            "system": {"messages": [ASKED], "system": "Be short."},
            "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me about a bear."}]}]},
        },
        "length": {"10": {"max_tokens": 10}, "24": {"max_tokens": 24}},
        "stop": {
            "absent": {},
            "two": {"stop_sequences": [" a", "ed"]},
            "kept": {"stop_sequences": [" a"], "include_stop_str_in_output": True},
            "kept, other name": {"stop_sequences": [" a"], "no_stop_trim": True},
            "tokens": {"stop_token_ids": [*range(300, 306)]},
        },
        "client": {name: body for name, body in SHARED["client"].items() if name != "user"},
        "tools": {
            "absent": {},
            "none": {"tools": [TOOL], "tool_choice": {"type": "none"}},
            "auto": {"tools": [TOOL]},
        },
    },
    refused=(),
    whole_only={},
)
