"""Plans `POST /v1/responses` as the equivalent chat request, answered in its own format. Nothing is stored."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import msgspec

from tandem_engine.base.logs import quoted
from tandem_services.common.errors import bad_request
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.api.chat import ChatPlanner
from tandem_services.gateway.api.interface import AnswerFormat, ReadModel, renamed_fields
from tandem_services.gateway.api.openai_schemas import ChatMessage, ChatRequest, SentCall, SentFunction, shared_fields
from tandem_services.gateway.api.responses.answers import ResponsesFormat
from tandem_services.gateway.api.responses.schemas import (
    INCLUDABLE,
    OTHER_PARTS,
    AllowedFunctions,
    AnsweredReasoning,
    AnsweredTextFormat,
    FunctionTool,
    InputItem,
    NamedFunction,
    ResponsesRequest,
    ResponsesToolChoice,
    TextFormat,
    TextPart,
)
from tandem_services.gateway.dispatch.plan import GenerationPlan
from tandem_services.gateway.http.body import BodyDecoder
from tandem_services.gateway.http.known_fields import check_no_fields
from tandem_services.gateway.limits import MAX_MESSAGES
from tandem_services.gateway.output.structured_output import NamedSchema, ResponseFormat
from tandem_services.gateway.output.tools import (
    AllowedTools,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    ToolSelection,
)

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Raises `ApiError` 400 naming the field at fault."""
    _check_include(request)
    text_format = None if request.text is None else request.text.format
    return ChatRequest(
        **shared_fields(request),
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        stop=request.stop,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=None if text_format is None else _response_format(text_format),
        metadata=request.metadata,
        user=request.user,
        include_reasoning=request.include_reasoning,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        thinking_token_budget=None if request.reasoning is None else request.reasoning.max_tokens,
    )


def _check_include(request: ResponsesRequest) -> None:
    for position, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            raise bad_request(f"include[{position}]: {quoted(name)} is not supported", f"include[{position}]")


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    beginning = [] if request.instructions is None else [ChatMessage(role="system", content=request.instructions)]
    if isinstance(request.input, str):
        return [*beginning, ChatMessage(role="user", content=request.input)]
    if not request.input:
        raise bad_request("input must be a text or a list of at least one item", "input")
    if len(request.input) > MAX_MESSAGES:
        raise bad_request(f"input takes at most {MAX_MESSAGES} items, got {len(request.input)}", "input")
    conversation = _Conversation(beginning)
    for position, item in enumerate(request.input):
        conversation.add(item, f"input[{position}]")
    return conversation.messages


class _Conversation:
    """Items in sequence. Text, reasoning and calls of the model in one turn become one message."""

    def __init__(self, messages: list[ChatMessage]) -> None:
        self.messages = messages

    def add(self, item: InputItem, param: str) -> None:
        match item.type:
            case "message":
                self._add_message(item, param)
            case "reasoning":
                self._turn(None).reasoning_content = _text(item.content or [], f"{param}.content") or None
            case "function_call":
                turn = self._turn(None)
                turn.tool_calls = [*(turn.tool_calls or ()), _call(item, param)]
            case "function_call_output":
                output = _text(item.output, f"{param}.output")
                call_id = _required(item.call_id, f"{param}.call_id")
                self.messages.append(ChatMessage(role="tool", content=output, tool_call_id=call_id))
            case other:
                raise bad_request(f"{param}.type: items of type {quoted(other)} are not supported", f"{param}.type")

    def _add_message(self, item: InputItem, param: str) -> None:
        if item.role not in _ROLES:
            roles = ", ".join(_ROLES)
            raise bad_request(f"{param}.role must be one of {roles}, got {quoted(item.role)}", f"{param}.role")
        text = _text(item.content, f"{param}.content")
        if item.role == "assistant":
            self._turn(text)
        else:
            role = cast(Literal["system", "developer", "user"], item.role)
            self.messages.append(ChatMessage(role=role, content=text))

    def _turn(self, text: str | None) -> ChatMessage:
        """The assistant's newest message; a new one after text of its own or a message of another role."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or (text is not None and (last.content or last.tool_calls)):
            last = ChatMessage(role="assistant")
            self.messages.append(last)
        last.content = text if text is not None else last.content
        return last


def _call(item: InputItem, param: str) -> SentCall:
    return SentCall(
        id=_required(item.call_id, f"{param}.call_id"),
        function=SentFunction(
            name=_required(item.name, f"{param}.name"), arguments=_required(item.arguments, f"{param}.arguments")
        ),
    )


def _required(value: str | None, param: str) -> str:
    if value is None:
        raise bad_request(f"{param} is required", param)
    return value


def _text(content: str | list[TextPart] | None, param: str) -> str:
    if content is None:
        raise bad_request(f"{param} is required", param)
    if isinstance(content, str):
        return content
    for position, part in enumerate(content):
        if part.type not in _TEXT_PARTS or part.text is None:
            where = f"{param}[{position}]"
            raise bad_request(f"{where}: only parts of text are supported, got {quoted(part.type)}", where)
        check_no_fields(part, OTHER_PARTS, f"{param}[{position}]")
    return "\n".join(part.text or "" for part in content)


def _tool(tool: FunctionTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict) or None
    )
    return Tool(type=tool.type, function=function)


def _choice(choice: ResponsesToolChoice | None) -> ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedTool(function=FunctionName(name=choice.name))
    if isinstance(choice, AllowedFunctions):
        named = [NamedTool(function=FunctionName(name=tool.name)) for tool in choice.tools]
        return AllowedTools(allowed_tools=ToolSelection(mode=choice.mode, tools=named))
    return choice


def _response_format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    named = NamedSchema(name=wanted.name or "", schema=wanted.schema, strict=wanted.strict)
    return ResponseFormat(type="json_schema", json_schema=named)


_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
}
"""Fields of chats under their names here."""


class ResponsesPlanner:
    """Implements `Planner`."""

    endpoint = "/v1/responses"

    def __init__(self, chats: ChatPlanner, *, strict: bool) -> None:
        self._chats = chats
        self._decoder = BodyDecoder(ResponsesRequest, strict=strict, closed=True)

    def decode(self, body: bytes) -> ResponsesRequest:
        return self._decoder.decode(body)

    async def plan(self, request: ResponsesRequest, served: ReadModel, caller: Caller) -> GenerationPlan:
        """Raises `ApiError` or `InvalidRequestError` naming the field at fault."""
        chat = chat_request(request)
        with renamed_fields(_name):
            plan = await self._chats.plan(chat, served, caller)
        return replace(plan, grammar_field=_name(plan.grammar_field), repeated=_repeated(request))

    def format(self, plan: GenerationPlan, served: ReadModel, request_id: str, created: int) -> AnswerFormat:
        del served  # a response has no data of single tokens
        return ResponsesFormat(f"resp_{request_id}", created, plan)


def _name(param: str | None) -> str | None:
    """What clients of this endpoint call a field of a chat request."""
    if param is None:
        return None
    if param.startswith("messages"):
        return "input"
    return _NAMES.get(param, param.replace(".function.", "."))


def _repeated(request: ResponsesRequest) -> Mapping[str, Any]:
    """What a response repeats of its request."""
    text_format = None if request.text is None else request.text.format
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "text": AnsweredTextFormat(format={"type": "text"} if text_format is None else _present(text_format)),
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": AnsweredReasoning(effort=None if request.reasoning is None else request.reasoning.effort),
    }


def _present(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
