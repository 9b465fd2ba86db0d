"""Messages of a chat as chat templates expect them, or a 400 that names the message at fault."""

from typing import Any

import msgspec

from tandem_engine.logs import quoted
from tandem_engine.tokenizer.chat_template import ChatTemplate
from tandem_services.common.errors import bad_request
from tandem_services.gateway.limits import MAX_MESSAGES
from tandem_services.gateway.nested_fields import check_no_fields
from tandem_services.gateway.openai_schemas import ChatMessage, ContentPart, SentCall, TemplateVariables

VARIABLES = "chat_template_kwargs"
_RESERVED = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
        *("strftime_now", "raise_exception"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"),
    )
)
"""Variables of chat templates that clients set by other fields, or that are the checkpoint's."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates switch reasoning on and off."""
_TEXT_PARTS = frozenset({"type", "text", "cache_control", "prompt_cache_breakpoint"})
OTHER_CHAT_PARTS = tuple(name for name in ContentPart.__struct_fields__ if name not in _TEXT_PARTS)
"""Fields of parts that are no text."""


def template_messages(messages: list[ChatMessage] | None, *, continues: bool = False) -> list[dict[str, Any]]:
    """`continues`: earlier messages are not among these, so tool messages may answer calls that are not here."""
    if not messages:
        raise bad_request("messages must have at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages takes at most {MAX_MESSAGES} messages, got {len(messages)}", "messages")
    if [message.role for message in messages[-2:]] == ["assistant", "assistant"]:
        raise bad_request("messages must not end with two assistant messages", "messages")
    called: dict[str, str] = {}
    entries = []
    for position, message in enumerate(messages):
        param = f"messages[{position}]"
        entries.append(_entry(message, param))
        called |= {call.id: call.function.name for call in message.tool_calls or ()}
        if message.role == "tool" and not continues and message.tool_call_id not in called:
            where = f"{param}.tool_call_id"
            raise bad_request(f"{where}: {quoted(message.tool_call_id)} answers no tool call before it", where)
    return entries


def continues_final(
    messages: list[ChatMessage] | None, *, asked: bool | None, add_generation_prompt: bool | None
) -> bool:
    """Whether the model goes on with the last message. Raises `ApiError` 400 for what excludes it."""
    if not asked:
        return False
    field = "continue_final_message"
    if add_generation_prompt:
        raise bad_request(f"{field} and add_generation_prompt exclude each other: set one of them", field)
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls or not last.content:
        raise bad_request(f"{field} needs a last message of the assistant's that has content and no tool calls", field)
    return True


def template_variables(
    template: ChatTemplate | None,
    variables: TemplateVariables | None,
    *,
    documents: list[dict[str, str]] | None = None,
    reasoning_effort: str | None = None,
) -> dict[str, Any]:
    """What the template gets besides messages and tools: `variables` as they are, whether or not it uses them.

    Raises `ApiError` 400 for documents or a reasoning effort that it has no place for.
    """
    given = {name: value for name, value in (variables or {}).items() if value is not None}
    for name in given:
        if name in _RESERVED:
            field = f"{VARIABLES}.{quoted(name)}"
            raise bad_request(f"{field}: the gateway sets this variable itself, leave it out", field)
    places = frozenset[str]() if template is None else template.variables
    if documents:
        if "documents" not in places:
            raise bad_request("documents is not supported: this model's chat template has no place for it", "documents")
        given["documents"] = documents
    if reasoning_effort is not None:
        # What the client sets in chat_template_kwargs wins, as with vLLM.
        given = {**_effort_variables(reasoning_effort, places), **given}
    return given


def _effort_variables(effort: str, places: frozenset[str]) -> dict[str, Any]:
    """As vLLM and SGLang do, an effort also switches thinking on, and `none` switches it off."""
    switches = {name: effort != "none" for name in _SWITCHES if name in places}
    if "reasoning_effort" in places:
        return {**switches, "reasoning_effort": effort}
    if not switches and effort != "none":
        raise bad_request(
            "reasoning_effort is not supported: this model's chat template has no place for it; leave it out",
            "reasoning_effort",
        )
    return switches


def _entry(message: ChatMessage, param: str) -> dict[str, Any]:
    _check_tool_fields(message, param)
    # Templates predate the newer name of the same role.
    entry: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    # OpenAI's clients send null for a turn of an assistant that had no text.
    absent = message.content is None and message.role == "assistant"
    entry["content"] = "" if absent else _text(message.content, f"{param}.content")
    reasoning = message.reasoning_content or message.reasoning
    optional = {
        "name": message.name,
        "reasoning_content": reasoning,
        "tool_calls": [_call(call) for call in message.tool_calls or ()] or None,
        "tool_call_id": message.tool_call_id,
    }
    return entry | {name: value for name, value in optional.items() if value is not None}


def _check_tool_fields(message: ChatMessage, param: str) -> None:
    if message.role == "tool":
        if message.tool_call_id is None:
            raise bad_request(f"{param}.tool_call_id is required of a tool message", f"{param}.tool_call_id")
    elif message.tool_call_id is not None:
        raise bad_request(f"{param}.tool_call_id is for tool messages alone", f"{param}.tool_call_id")
    if message.tool_calls and message.role != "assistant":
        raise bad_request(f"{param}.tool_calls is for assistant messages alone", f"{param}.tool_calls")


def _call(call: SentCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
    }


def _arguments(text: str) -> Any:
    """Templates write an object as their models do. What the model wrote instead of one stays as it is."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _text(content: str | list[ContentPart] | None, param: str) -> str:
    if content is None:
        raise bad_request(f"{param} is required", param)
    if isinstance(content, str):
        return content
    for position, part in enumerate(content):
        where = f"{param}[{position}]"
        if part.type != "text" or part.text is None:
            raise bad_request(f"{where}: only parts of type text with a text are supported", where)
        check_no_fields(part, OTHER_CHAT_PARTS, where)
    return "\n".join(part.text or "" for part in content)
