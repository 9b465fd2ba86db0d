"""Messages of a chat as chat templates expect them, or a 400 that names the message at fault."""

from typing import Any

import msgspec

from tandem_engine.logs import quoted
from tandem_engine.tokenizer.chat_template import ChatTemplate
from tandem_services.common.errors import bad_request
from tandem_services.gateway.limits import MAX_MESSAGES
from tandem_services.gateway.openai_schemas import CalledTool, ChatMessage, ChatTemplateVariables, ContentPart


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
    variables: ChatTemplateVariables | None,
    *,
    documents: list[dict[str, str]] | None = None,
    reasoning_effort: str | None = None,
) -> dict[str, Any]:
    """What the template is told besides messages and tools. Raises `ApiError` 400 for what it has no place for."""
    told = {} if variables is None else {k: v for k, v in msgspec.structs.asdict(variables).items() if v is not None}
    for name, value in (("documents", documents or None), ("reasoning_effort", reasoning_effort)):
        if value is None:
            continue
        if template is None or name not in template.variables:
            raise bad_request(f"{name} is not supported: this model's chat template has no place for it", name)
        told[name] = value
    return told


def _entry(message: ChatMessage, param: str) -> dict[str, Any]:
    _check_tool_fields(message, param)
    # Templates predate the newer name of the same role.
    entry: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    called = bool(message.tool_calls)
    entry["content"] = "" if called and message.content is None else _text(message.content, f"{param}.content")
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


def _call(call: CalledTool) -> dict[str, Any]:
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
        if part.type != "text" or part.text is None:
            where = f"{param}[{position}]"
            raise bad_request(f"{where}: only parts of type text with a text are supported", where)
    return "\n".join(part.text or "" for part in content)
