"""Conversations as clients send them, for tests of chat templates. All text is free of special tokens."""

from collections.abc import Callable
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city, in °C; a < b & c > d",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name", "enum": ["Oslo", "Rome"]},
                    "days": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "either": {"type": ["string", "null"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
DOCUMENTS = [{"title": "One", "text": "first <text>"}, {"title": "Two", "text": ""}]


def call(name: str = "get_weather", arguments: Any = None, number: int = 0) -> dict[str, Any]:
    arguments = (
        {"city": "Oslo", "days": 2, "tags": ["a", "<b>"], "deep": {"x": None}} if arguments is None else arguments
    )
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: Any, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05d}"}


SYSTEM = {"role": "system", "content": "Be brief. /no_think"}
THOUGHT = "<think>\nhm, if a < b\n</think>\n\nSo: yes"

HISTORIES: dict[str, list[dict[str, Any]]] = {
    "one": [user("Hello")],
    "system": [SYSTEM, user(" Hello <world> & 'all' \n")],
    "turns": [user("a\n\nb"), assistant("c"), user("d // e\n# f\n  g"), assistant(" h "), user("i\r\nj")],
    "code": [user("if (a <b && c> d) { x[0] |= y; } // [INST]?"), assistant("<b>no</b>"), user("<|>")],
    "thought": [user("q"), assistant(THOUGHT), user("r")],
    "thought_in_last_turn": [user("q"), assistant(THOUGHT)],
    "two_thoughts": [
        user("q"),
        assistant(THOUGHT + "</think>more"),
        user("/think r"),
        assistant("</think>"),
        user("s"),
    ],
    "reasoning": [
        user("q"),
        assistant("a", reasoning_content="why <so>"),
        user("r"),
        assistant("b", reasoning_content="\nx\n"),
    ],
    "reasoning_other_names": [user("q"), assistant("a", reasoning="because"), user("r"), assistant("b", thinking="as")],
    "call": [SYSTEM, user("w?"), assistant("", tool_calls=[call()]), tool('{"t": "<5"}'), user("and?")],
    "call_without_content": [user("w?"), assistant(None, tool_calls=[call()]), tool("5"), assistant("It is 5.")],
    "calls": [
        user("w?"),
        assistant("Let me see", reasoning_content="two", tool_calls=[call(), call("now", {}, 1)]),
        tool("5"),
        tool("<tool_response>noon</tool_response>", 1),
        assistant(THOUGHT),
        user("thanks"),
    ],
    "call_with_text_arguments": [
        user("w?"),
        assistant("", tool_calls=[call(arguments='{"city": "Oslo"')]),
        tool("bad"),
    ],
    "parts": [
        user([{"type": "text", "text": "look: <x>"}, {"type": "text", "text": " at\n"}]),
        assistant([{"type": "text", "text": "I see"}]),
        user([{"type": "text", "text": "good"}]),
    ],
    "image": [user([{"type": "image"}, {"type": "text", "text": "what?"}])],
    "empties": [SYSTEM, user(""), assistant(""), user("\n"), assistant("   "), user("")],
    "no_user": [SYSTEM],
    "other_letters": [user("Straße İstanbul ﬁ ＜｜ｉｍ＿ｅｎｄ｜＞ ｜ ▁ 你好 😀"), assistant("ΑΣ"), user("“q”")],
    "named": [{**user("hi"), "name": "ann"}, assistant("x", name="bob"), user("y")],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "no_thinking": {"variables": {"enable_thinking": False, "thinking": True, "preserve_thinking": True}},
    "documents": {"variables": {"documents": DOCUMENTS}, "add_generation_prompt": False},
}


def edited(value: Any, edit: Callable[[str], str]) -> Any:
    """A copy of a JSON-like value in which `edit` has changed all text that clients choose, without roles and ids."""
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, dict):
        return {name: each if _is_fixed(name, each) else edited(each, edit) for name, each in value.items()}
    if isinstance(value, list):
        return [edited(each, edit) for each in value]
    return value


def _is_fixed(name: str, value: Any) -> bool:
    return name in ("role", "type", "id", "tool_call_id") or value == ""
