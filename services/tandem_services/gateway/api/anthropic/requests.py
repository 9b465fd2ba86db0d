"""Plans `POST /v1/messages` as the equivalent chat request, and counts tokens the same way. Nothing is stored.

system                        first message, role system
blocks of an assistant        one message: its text, its reasoning, its calls
tool_result blocks            messages of the role tool, before the text of the same user message
"""

import re
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem_engine.base.logs import quoted
from tandem_services.common.errors import bad_request
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.api.anthropic.answers import MessagesFormat
from tandem_services.gateway.api.anthropic.schemas import (
    OTHER_BLOCKS,
    OTHER_TEXT_BLOCKS,
    Block,
    Choice,
    CountedTokens,
    CustomTool,
    InputMessage,
    MessagesRequest,
    TextBlock,
    Thinking,
)
from tandem_services.gateway.api.chat import ChatPlanner
from tandem_services.gateway.api.interface import AnswerFormat, ReadModel, renamed_fields
from tandem_services.gateway.api.openai_schemas import (
    ChatMessage,
    ChatRequest,
    SentCall,
    SentFunction,
    TemplateVariables,
    shared_fields,
)
from tandem_services.gateway.api.response_writer import Answering
from tandem_services.gateway.dispatch.plan import GenerationPlan
from tandem_services.gateway.http.body import BodyDecoder, decode_body, read_body
from tandem_services.gateway.http.errors import PATH
from tandem_services.gateway.http.known_fields import check_no_fields
from tandem_services.gateway.http.sse import encode_json
from tandem_services.gateway.limits import MAX_MESSAGES
from tandem_services.gateway.models.catalog import ModelCatalog
from tandem_services.gateway.output.structured_output import NamedSchema, ResponseFormat
from tandem_services.gateway.output.tools import Function, FunctionName, NamedTool, Tool, ToolChoice

_BLOCKS = ("text", "thinking", "tool_use", "tool_result")
_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: MessagesRequest) -> ChatRequest:
    """Raises `ApiError` 400 naming the field at fault."""
    _refuse(request)
    choice = request.tool_choice
    messages = _messages(request)
    return ChatRequest(
        **shared_fields(request),
        messages=messages,
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        tools=None if request.tools is None else [_tool(tool, n) for n, tool in enumerate(request.tools)],
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_response_format(request),
        user=None if request.metadata is None else request.metadata.user_id,
        chat_template_kwargs=_variables(request),
        thinking_token_budget=_budget(request.thinking),
        continue_final_message=_continues(messages, len(request.messages or ()) - 1),
    )


def _refuse(request: MessagesRequest) -> None:
    if request.output_config is not None and request.output_config.effort is not None:
        raise bad_request("output_config.effort is not supported: leave it out", "output_config.effort")


def _continues(messages: list[ChatMessage], last: int) -> bool | None:
    """A last message of the assistant's is the beginning of the answer (prefill)."""
    final = messages[-1]
    if final.role != "assistant":
        return None
    param = f"messages[{last}].content"
    if final.tool_calls or not isinstance(final.content, str) or not final.content:
        raise bad_request(f"{param}: a last message of the assistant's must end with text, for the answer", param)
    if final.content != final.content.rstrip():
        raise bad_request(f"{param}: text that the answer begins with must not end with white space", param)
    return True


def _variables(request: MessagesRequest) -> TemplateVariables | None:
    """The client's own template variables take precedence."""
    thinking = request.thinking
    if request.chat_template_kwargs is not None or thinking is None or thinking.type == "adaptive":
        return request.chat_template_kwargs
    return {"enable_thinking": thinking.type == "enabled"}


def _budget(thinking: Thinking | None) -> int | None:
    if thinking is None or thinking.budget_tokens is None:
        return None
    if thinking.budget_tokens < 0:
        raise bad_request(
            f"thinking.budget_tokens must be 0 or more, got {quoted(thinking.budget_tokens)}", "thinking.budget_tokens"
        )
    return thinking.budget_tokens if thinking.type == "enabled" else None


def _response_format(request: MessagesRequest) -> ResponseFormat | None:
    wanted = None if request.output_config is None else request.output_config.format
    if wanted is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=NamedSchema(name="output", schema=wanted.schema, strict=True))


def _messages(request: MessagesRequest) -> list[ChatMessage]:
    given = request.messages
    if not given:
        raise bad_request("messages must have at least one message", "messages")
    if len(given) > MAX_MESSAGES:
        raise bad_request(f"messages takes at most {MAX_MESSAGES} messages, got {len(given)}", "messages")
    messages = [] if not request.system else [ChatMessage(role="system", content=_text(request.system, "system"))]
    for position, message in enumerate(given):
        read = _of_assistant if message.role == "assistant" else _of_user
        messages += read(message, f"messages[{position}].content")
    return messages


def _of_user(message: InputMessage, param: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage(role="user", content=message.content)]
    results: list[ChatMessage] = []
    texts: list[str] = []
    for position, block in enumerate(message.content):
        where = f"{param}[{position}]"
        _check_kind(block, where)
        match block.type:
            case "text":
                texts.append(_required(block.text, f"{where}.text"))
            case "tool_result" if texts:
                raise bad_request(f"{where}: tool_result blocks come before any text of the message", where)
            case "tool_result":
                results.append(_result(block, where))
            case other:
                raise _unsupported(other, where)
    if not results and not texts:
        raise bad_request(f"{param} must have at least one block", param)
    return [*results, *([ChatMessage(role="user", content="\n".join(texts))] if texts else [])]


def _of_assistant(message: InputMessage, param: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage(role="assistant", content=message.content)]
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[SentCall] = []
    for position, block in enumerate(message.content):
        where = f"{param}[{position}]"
        _check_kind(block, where)
        match block.type:
            case "text":
                texts.append(_required(block.text, f"{where}.text"))
            case "thinking":
                thoughts.append(_required(block.thinking, f"{where}.thinking"))
            case "tool_use":
                calls.append(_call(block, where))
            case other:
                raise _unsupported(other, where)
    content = "\n".join(texts) if texts or not calls else None
    reasoning = "\n".join(thoughts) or None
    return [ChatMessage(role="assistant", content=content, reasoning_content=reasoning, tool_calls=calls or None)]


def _result(block: Block, param: str) -> ChatMessage:
    """Chats have no place for `is_error`, so the model gets it in words."""
    text = "" if block.content is None else _text(block.content, f"{param}.content")
    content = f"Error: {text}" if block.is_error else text
    return ChatMessage(role="tool", content=content, tool_call_id=_required(block.tool_use_id, f"{param}.tool_use_id"))


def _call(block: Block, param: str) -> SentCall:
    if block.input is None:
        raise bad_request(f"{param}.input is required", f"{param}.input")
    arguments = msgspec.json.encode(block.input).decode()
    return SentCall(
        id=_required(block.id, f"{param}.id"),
        function=SentFunction(name=_required(block.name, f"{param}.name"), arguments=arguments),
    )


def _text(content: str | list[TextBlock], param: str) -> str:
    if isinstance(content, str):
        return content
    for position, block in enumerate(content):
        if block.type != "text":
            raise _unsupported(block.type, f"{param}[{position}]")
        check_no_fields(block, OTHER_TEXT_BLOCKS, f"{param}[{position}]")
    return "\n".join(_required(block.text, f"{param}[{n}].text") for n, block in enumerate(content))


def _check_kind(block: Block, param: str) -> None:
    if block.type not in _BLOCKS:
        raise _unsupported(block.type, param)
    check_no_fields(block, OTHER_BLOCKS, param)


def _required(value: str | None, param: str) -> str:
    if value is None:
        raise bad_request(f"{param} is required", param)
    return value


def _tool(tool: CustomTool, position: int) -> Tool:
    param = f"tools[{position}]"
    if tool.type not in (None, "custom"):
        where = f"{param}.type"
        raise bad_request(f"{where}: {quoted(tool.type)} is not supported, only tools that the client runs", where)
    if tool.input_schema is None:
        raise bad_request(f"{param}.input_schema is required", f"{param}.input_schema")
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict or None
    )
    return Tool(type="function", function=function)


def _choice(choice: Choice) -> ToolChoice:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    return NamedTool(function=FunctionName(name=_required(choice.name, "tool_choice.name")))


def _unsupported(kind: str, param: str) -> Exception:
    return bad_request(f"{param}: blocks of the type {quoted(kind)} are not supported", param)


_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}
"""Fields of chats under their names here."""


class MessagesPlanner:
    """Implements `Planner`."""

    endpoint = PATH

    def __init__(self, chats: ChatPlanner, *, strict: bool) -> None:
        self._chats = chats
        self._decoder = BodyDecoder(MessagesRequest, strict=strict, closed=True)

    def decode(self, body: bytes) -> MessagesRequest:
        return self._decoder.decode(body)

    async def plan(self, request: MessagesRequest, served: ReadModel, caller: Caller) -> GenerationPlan:
        """Raises `ApiError` or `InvalidRequestError` naming the field at fault."""
        if request.max_tokens is None:
            raise bad_request("max_tokens is required", "max_tokens")
        chat = chat_request(request)
        if served.model.dialect.reasoning is None:
            # Clients ask whatever model they speak to for thinking.
            chat.thinking_token_budget = None
        with renamed_fields(field_name):
            plan = await self._chats.plan(chat, served, caller)
        return replace(plan, continuous_usage=True, grammar_field=field_name(plan.grammar_field))

    async def count(self, request: MessagesRequest, served: ReadModel) -> int:
        """Tokens of its prompt. Raises as `plan`."""
        chat = chat_request(request)
        with renamed_fields(field_name):
            return len(await self._chats.encode(chat, served))

    def format(self, plan: GenerationPlan, served: ReadModel, request_id: str, created: int) -> AnswerFormat:
        del served, created  # a message has no data of single tokens, nor its time
        return MessagesFormat(request_id, plan)


def field_name(param: str | None) -> str | None:
    """What clients of this endpoint call a field of a chat request."""
    if param is None:
        return None
    if param.startswith("messages"):
        return "messages"
    if param.startswith("json_schema") or param.startswith("response_format"):
        return "output_config.format"
    tool = re.fullmatch(r"(tools\[\d+\])\.function\.(\w+)(.*)", param)
    if tool is not None:
        return f"{tool[1]}.{'input_schema' if tool[2] == 'parameters' else tool[2]}{tool[3]}"
    return _NAMES.get(param, param)


class TokenCount:
    """The route."""

    path = f"{PATH}/count_tokens"

    def __init__(self, planner: MessagesPlanner, models: ModelCatalog, answering: Answering) -> None:
        self._planner = planner
        self._models = models
        self._shared = answering

    async def answer(self, request: Request) -> Response:
        asked = await decode_body(self._planner.decode, await read_body(request))
        served = self._models.of_request(request.scope, asked.model).service
        tokens = await self._shared.without_workers(request, lambda: self._planner.count(asked, served))
        return Response(encode_json(CountedTokens(input_tokens=tokens)), media_type="application/json")
