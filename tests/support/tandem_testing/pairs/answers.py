"""What an answer says, in one form for whole and streamed ones, and where two of them differ.

An error is what its object says, in the body or in an event. Left out: ids, times, and
cached tokens, which depend on what ran before. Floats are equal within `TOLERANCE`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

TOLERANCE = 1e-3
"""Of logprobs in float32: batches, chunks and cached prefixes of another size add up in another order."""
JOINED = frozenset(
    ("text", "content", "refusal", "arguments", "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset")
)
"""Fields of which each chunk of a stream has a piece: texts and lists."""

Answer = dict[str, Any]


def whole_answer(response: httpx.Response) -> Answer:
    """Of a body."""
    document = response.json()
    if response.status_code != 200:
        return {"error": document["error"]}
    choices = {}
    for choice in document["choices"]:
        answer = dict(choice)
        answer |= _plain(answer.pop("message", {}))
        choices[choice["index"]] = _without_nothing(answer)
        # A chat has its prompt's once, a choice of a stream with its first chunk.
        for name in ("prompt_token_ids", "prompt_logprobs"):
            if name in document:
                choices[choice["index"]][name] = document[name]
    return {"usage": _usage(document["usage"]), "choices": choices}


def streamed_answer(response: httpx.Response) -> Answer:
    """Of all events of a stream. Raises `AssertionError` for one that has no proper end."""
    if response.status_code != 200:
        return whole_answer(response)
    *events, end = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert end == "[DONE]", f"the stream ends with {end}"
    choices: dict[int, Answer] = {}
    usage: Answer = {}
    for chunk in map(json.loads, events):
        if "error" in chunk:
            return {"error": chunk["error"]}
        usage = chunk.get("usage") or usage
        for piece in chunk["choices"]:
            answer = dict(piece)
            answer |= answer.pop("delta", {})
            if "prompt_token_ids" in chunk:
                answer["prompt_token_ids"] = chunk["prompt_token_ids"]
            _join(choices.setdefault(piece["index"], {}), answer)
    return {
        "usage": _usage(usage),
        "choices": {index: _without_nothing(_plain(choice)) for index, choice in choices.items()},
    }


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Places, each with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            yield from differences(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for position, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{path}[{position}]")
    elif isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > TOLERANCE:
            yield f"{path}: {one} and {other}"
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"


def _join(choice: Answer, piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        if name == "logprobs":
            _join(choice.setdefault(name, {}), value or {})
        elif name == "tool_calls":
            for call in value:
                _join_call(choice.setdefault(name, []), call)
        elif name in JOINED and choice.get(name) is not None and value is not None:
            choice[name] = choice[name] + value
        elif value is not None or name not in choice:
            choice[name] = value


def _join_call(calls: list[Answer], piece: Mapping[str, Any]) -> None:
    if piece["index"] == len(calls):
        calls.append({"type": piece["type"], "function": dict(piece["function"])})
    else:
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def _plain(message: Mapping[str, Any]) -> Answer:
    """Tool calls without their ids."""
    answer = dict(message)
    if "tool_calls" in answer:
        answer["tool_calls"] = [{"type": call["type"], "function": call["function"]} for call in answer["tool_calls"]]
    return answer


def _without_nothing(answer: Mapping[str, Any]) -> Answer:
    """Fields that are null or empty in one form are absent in the other."""
    filled = {
        name: _without_nothing(value) if name == "logprobs" and value else value for name, value in answer.items()
    }
    return {name: value for name, value in filled.items() if value not in (None, "", [], {}) and name != "role"}


def _usage(usage: Mapping[str, Any]) -> Answer:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
