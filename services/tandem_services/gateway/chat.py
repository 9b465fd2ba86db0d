"""`POST /v1/chat/completions`: its requests as plans."""

from tandem_engine.logs import quoted
from tandem_engine.messages.grammar import GrammarKind
from tandem_engine.tokenizer.truncation import Truncation
from tandem_services.common.errors import bad_request
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.answer_format import AnswerFormat
from tandem_services.gateway.chat_format import ChatFormat
from tandem_services.gateway.chat_messages import continues_final, template_messages, template_variables
from tandem_services.gateway.limits import MAX_OUTPUT_TOKENS, check_context
from tandem_services.gateway.openai_schemas import ChatRequest
from tandem_services.gateway.output_reader import OutputReading
from tandem_services.gateway.plan import GenerationPlan, PlannedChoice
from tandem_services.gateway.prompt_length import asked_truncation
from tandem_services.gateway.read_model import ReadModel
from tandem_services.gateway.request_body import BodyDecoder
from tandem_services.gateway.session_turns import SessionTurn
from tandem_services.gateway.structured_output import AskedGrammar, asked_grammar
from tandem_services.gateway.tools import ToolUse, tool_use
from tandem_services.gateway.translate import (
    PROMPT_ALONE_TOKENS,
    behind_prompt,
    chat_logprobs,
    check_common_fields,
    check_prompt_alone,
    choice_counts,
    fit_output,
    generation_plan,
    sampling_params,
)


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
        tools = _tools(request, served)
        grammar = _grammar(request, tools)
        vocab_size = served.prompts.tokenizer.vocab_size
        # Ranges are checked before the prompt is encoded.
        sampling = sampling_params(
            request,
            max_tokens=MAX_OUTPUT_TOKENS if wanted is None else wanted or PROMPT_ALONE_TOKENS,
            logprobs=chat_logprobs(request),
            prompt_logprobs=request.prompt_logprobs,
            bad_words=await served.prompts.bad_words(request.bad_words),
            vocab_size=vocab_size,
            grammar=grammar,
            reasoning_budget=served.model.dialect.budget(request.thinking_token_budget),
        )
        turn = await served.desk.take(
            request.session_params, cache_salt=caller.cache_salt(request.cache_salt or ""), choices=counts.generated
        )
        truncation = asked_truncation(request, served.prompts.context_length, max_tokens=wanted or 0)
        input_ids = await _encode(request, served, tools, turn, truncation)
        context_length = served.prompts.context_length() - (0 if turn is None else turn.history)
        check_context(len(input_ids), wanted or 0, context_length, "messages")
        reading = _reading(request, served, input_ids, tools, grammar)
        sampling = behind_prompt(sampling, reading)
        sampling = fit_output(sampling, context_length - len(input_ids), vocab_size=vocab_size)
        return generation_plan(
            request,
            [PlannedChoice(index=0, input_ids=input_ids, sampling=sampling)],
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
    dialect = served.model.dialect
    return tool_use(
        request.tools,
        request.tool_choice,
        parallel=request.parallel_tool_calls,
        family=dialect.family,
        template_knows_tools=dialect.knows_tools,
    )


def _reading(
    request: ChatRequest,
    served: ReadModel,
    prompt: tuple[int, ...],
    tools: ToolUse | None,
    grammar: AskedGrammar | None,
) -> OutputReading:
    # Tags stand behind free text, but not those that are there instead of a formatted answer.
    tags = grammar is not None and grammar.spec.kind is GrammarKind.STRUCTURAL_TAG
    at_once = grammar is not None and (not tags or (tools is not None and grammar.field == "response_format"))
    return served.model.dialect.reading(
        prompt,
        tools,
        # Behind a budget it begins with the answer.
        constrained=at_once and request.thinking_token_budget is None,
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
    messages = template_messages(request.messages, continues=continues)
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


def _grammar(request: ChatRequest, tools: ToolUse | None) -> AskedGrammar | None:
    """What the output must look like: as the tools demand, or as the client asked."""
    asked = asked_grammar(request, request.response_format)
    if tools is None:
        return asked
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
