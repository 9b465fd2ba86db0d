"""Turns `POST /v1/chat/completions` requests into plans."""

from operator import attrgetter
from typing import Any

import msgspec

from tandem_engine.base.logs import quoted
from tandem_engine.messages.grammar import GrammarKind
from tandem_engine.tokenizer.chat_template import ChatTemplate
from tandem_engine.tokenizer.text_tokenizer import Truncation
from tandem_services.common.errors import bad_request
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.api.chat_answer import ChatFormat
from tandem_services.gateway.api.interface import AnswerFormat, ReadModel
from tandem_services.gateway.api.openai_schemas import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    SentCall,
    TemplateVariables,
)
from tandem_services.gateway.api.request_fields import (
    PROMPT_ALONE_TOKENS,
    after_prompt,
    chat_logprobs,
    check_common_fields,
    check_prompt_alone,
    choice_counts,
    fit_output,
    generation_plan,
    requested_truncation,
    sampling_params,
)
from tandem_services.gateway.dispatch.plan import Choice, GenerationPlan
from tandem_services.gateway.dispatch.sessions import SessionTurn
from tandem_services.gateway.http.body import BodyDecoder
from tandem_services.gateway.http.known_fields import check_no_fields
from tandem_services.gateway.limits import MAX_MESSAGES, MAX_OUTPUT_TOKENS, check_context
from tandem_services.gateway.output.reader import OutputReading
from tandem_services.gateway.output.structured_output import RequestedGrammar, requested_grammar
from tandem_services.gateway.output.tool_parsers.registry import Channels
from tandem_services.gateway.output.tools import ToolUse, answer_on_channel, tool_use

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


def template_messages(
    messages: list[ChatMessage] | None, *, continues: bool = False, on_channels: bool = False
) -> list[dict[str, Any]]:
    """As the chat template gets them.

    Args:
        continues: earlier messages are not among these, so tool messages may answer calls that are not here.
        on_channels: the model's outputs are messages on channels.
    """
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
        if message.tool_calls:
            called |= {call.id: call.function.name for call in message.tool_calls}
        if message.role == "tool" and not continues and message.tool_call_id not in called:
            where = f"{param}.tool_call_id"
            raise bad_request(f"{where}: {quoted(message.tool_call_id)} answers no tool call before it", where)
    return [_with_one_thought(entry) for entry in entries] if on_channels else entries


def _with_one_thought(message: dict[str, Any]) -> dict[str, Any]:
    """Templates of channels refuse reasoning and content together before calls, and write either as reasoning."""
    if not (message.get("tool_calls") and message.get("reasoning_content") and message["content"]):
        return message
    return {**message, "content": "", "reasoning_content": f"{message['reasoning_content']}\n{message['content']}"}


def continues_final(
    messages: list[ChatMessage] | None, *, asked: bool | None, add_generation_prompt: bool | None
) -> bool:
    """Whether the model continues the last message. Raises `ApiError` 400 for what excludes it."""
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
    if not (variables or documents) and reasoning_effort is None:
        return {}
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


_beside_text = attrgetter("name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id")
_ALONE = (None,) * 5


def _entry(message: ChatMessage, param: str) -> dict[str, Any]:
    if message.role in ("user", "system") and isinstance(message.content, str) and _beside_text(message) == _ALONE:
        return {"role": message.role, "content": message.content}  # as most are
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


class ChatPlanner:
    """Validates chat requests. Nothing is sent before `plan` has returned."""

    endpoint = "/v1/chat/completions"

    def __init__(self, *, strict: bool, fewest_tokens: int = 0) -> None:
        """`fewest_tokens`: what a client may set as the longest answer at least."""
        self._fewest_tokens = fewest_tokens
        self._decoder = BodyDecoder(ChatRequest, strict=strict, closed=True)

    def decode(self, body: bytes) -> ChatRequest:
        return self._decoder.decode(body)

    async def plan(self, request: ChatRequest, served: ReadModel, caller: Caller) -> GenerationPlan:
        """Raises `ApiError` or `InvalidRequestError` naming the field at fault."""
        check_common_fields(request)
        if request.echo:
            raise bad_request("echo is not supported for chat", "echo")
        if request.continue_final_message and request.session_params is not None:
            raise bad_request("continue_final_message is not available with session_params", "continue_final_message")
        counts = choice_counts(request, prompts=1)
        wanted = _wanted_tokens(request, self._fewest_tokens)
        tools = _tools(request, served) if request.tools or request.tool_choice is not None else None
        grammar = _grammar(request, tools, _channels(request, served))
        vocab_size = served.prompts.tokenizer.vocab_size
        # Ranges are checked before the prompt is encoded.
        sampling = sampling_params(
            request,
            max_tokens=MAX_OUTPUT_TOKENS if wanted is None else wanted or PROMPT_ALONE_TOKENS,
            logprobs=chat_logprobs(request),
            prompt_logprobs=request.prompt_logprobs,
            bad_words=await served.prompts.bad_words(request.bad_words) if request.bad_words else (),
            vocab_size=vocab_size,
            grammar=grammar,
            reasoning_budget=served.model.dialect.budget(request.thinking_token_budget),
        )
        turn = None
        if request.session_params is not None:
            salt = caller.cache_salt(request.cache_salt or "")
            turn = await served.session_manager.take(request.session_params, cache_salt=salt, choices=counts.generated)
        truncation = requested_truncation(request, served.prompts.context_length, max_tokens=wanted or 0)
        input_ids = await _encode(request, served, tools, turn, truncation)
        context_length = served.prompts.context_length() - (0 if turn is None else turn.history)
        check_context(len(input_ids), wanted or 0, context_length, "messages")
        reading = _reading(request, served, input_ids, tools, grammar)
        sampling = after_prompt(sampling, reading)
        sampling = fit_output(sampling, context_length - len(input_ids), vocab_size=vocab_size)
        return generation_plan(
            request,
            [Choice(index=0, input_ids=input_ids, sampling=sampling)],
            counts,
            grammar_field=None if grammar is None else grammar.field,
            generate=wanted != 0,
            turn=turn,
            reading=reading,
        )

    async def encode(self, request: ChatRequest, served: ReadModel) -> tuple[int, ...]:
        """The prompt alone. Raises as `plan`, for what is wrong with messages and tools."""
        return await _encode(request, served, _tools(request, served), None)

    def format(self, plan: GenerationPlan, served: ReadModel, request_id: str, created: int) -> AnswerFormat:
        return ChatFormat(f"chatcmpl-{request_id}", created, plan, served.prompts.tokenizer.vocabulary)


def _tools(request: ChatRequest, served: ReadModel) -> ToolUse | None:
    dialect, family = served.model.dialect, served.model.dialect.family
    if family is not None and request.thinking_token_budget is not None:
        # Grammars begin behind the reasoning, and a second thought would be content.
        family = family.after_reasoning()
    return tool_use(
        request.tools,
        request.tool_choice,
        parallel=request.parallel_tool_calls,
        family=family,
        template_knows_tools=dialect.knows_tools,
        channels=_channels(request, served),
    )


def _channels(request: ChatRequest, served: ReadModel) -> Channels | None:
    """How grammars write messages of this model. With a budget they begin behind the reasoning."""
    channels = served.model.dialect.channels
    if channels is None or request.thinking_token_budget is None:
        return channels
    return channels.after_reasoning()


def _reading(
    request: ChatRequest,
    served: ReadModel,
    prompt: tuple[int, ...],
    tools: ToolUse | None,
    grammar: RequestedGrammar | None,
) -> OutputReading:
    # Tags follow free text, but not those that are there instead of a formatted answer.
    tags = grammar is not None and grammar.spec.kind is GrammarKind.STRUCTURAL_TAG
    at_once = grammar is not None and (not tags or (tools is not None and grammar.field == "response_format"))
    # Ours are messages on channels there, and those of a client are within its messages.
    on_channels = tags and served.model.dialect.channels is not None
    return served.model.dialect.reading(
        prompt,
        tools,
        # After a budget it begins with the answer.
        constrained=at_once and not on_channels and request.thinking_token_budget is None,
        shows_reasoning=request.include_reasoning is not False,
    )


async def _encode(
    request: ChatRequest,
    served: ReadModel,
    tools: ToolUse | None,
    turn: SessionTurn | None,
    truncation: Truncation | None = None,
) -> tuple[int, ...]:
    continues = turn is not None and not turn.begins
    messages = template_messages(
        request.messages, continues=continues, on_channels=served.model.dialect.channels is not None
    )
    shown = None if tools is None else tools.for_template
    final = continues_final(
        request.messages, asked=request.continue_final_message, add_generation_prompt=request.add_generation_prompt
    )
    add_generation_prompt = not final and request.add_generation_prompt is not False
    variables = template_variables(
        served.prompts.tokenizer.chat_template,
        request.chat_template_kwargs,
        documents=request.documents,
        reasoning_effort=request.reasoning_effort,
    )
    if turn is not None and continues:
        return await served.prompts.encode_chat_turn(
            messages,
            last_token=turn.last_token,
            add_generation_prompt=add_generation_prompt,
            tools=shown,
            variables=variables,
        )
    return await served.prompts.encode_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        add_special_tokens=bool(request.add_special_tokens),
        continue_final=final,
        tools=shown,
        variables=variables,
        truncation=truncation,
    )


def _grammar(request: ChatRequest, tools: ToolUse | None, channels: Channels | None) -> RequestedGrammar | None:
    """The form of the output: as the tools require, or as the client requested. `channels`: of the model's outputs."""
    asked = requested_grammar(request, request.response_format)
    if tools is None:
        return asked if asked is None or channels is None else answer_on_channel(channels, asked)
    if asked is None:
        return tools.grammar()
    if asked.field != "response_format" or asked.spec.kind is GrammarKind.STRUCTURAL_TAG:
        raise bad_request(
            f"{asked.field} cannot be combined with tools that may be called: set tool_choice to none", asked.field
        )
    # The format is that of the content, of which an output of required calls has none.
    return tools.grammar_or(asked.spec) if tools.callable is None else tools.grammar()


def _wanted_tokens(request: ChatRequest, lowest: int) -> int | None:
    """The newer name wins. None leaves it to us: the rest of the context."""
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if wanted is not None and not lowest <= wanted <= MAX_OUTPUT_TOKENS:
        raise bad_request(f"{name} must be between {lowest} and {MAX_OUTPUT_TOKENS}, got {quoted(wanted)}", name)
    if wanted == 0:
        check_prompt_alone(request)
        if request.session_params is not None:
            raise bad_request(
                f"{name} 0 is not available for chats with session_params: a turn of a chat ends with an answer; "
                "append text with /v1/completions, or send the whole conversation",
                name,
            )
    return wanted
