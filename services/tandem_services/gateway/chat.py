"""`POST /v1/chat/completions`: its requests as plans and its answers as JSON."""

import msgspec
from msgspec import UNSET, UnsetType

from tandem_engine.logs import quoted
from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.common.errors import bad_request
from tandem_services.gateway import logprobs
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.answer_format import AnswerFormat, WholeChoice, encode_json, stop_reason
from tandem_services.gateway.choice_text import ChoicePiece, ScoredToken
from tandem_services.gateway.limits import MAX_OUTPUT_TOKENS, check_context
from tandem_services.gateway.openai_schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    PromptLogprobs,
    Usage,
)
from tandem_services.gateway.plan import GenerationPlan, PlannedChoice
from tandem_services.gateway.prompts import PromptEncoder, template_messages
from tandem_services.gateway.request_body import decode_body
from tandem_services.gateway.session_turns import SessionDesk, SessionTurn
from tandem_services.gateway.translate import (
    chat_logprobs,
    check_common_fields,
    choice_counts,
    fit_output,
    generation_plan,
    sampling_params,
)


class ChatPlanner:
    """Validates chat requests. Nothing is sent before `plan` has returned."""

    endpoint = "/v1/chat/completions"

    def __init__(self, prompts: PromptEncoder, sessions: SessionDesk) -> None:
        self._prompts = prompts
        self._sessions = sessions
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def plan(self, body: bytes, caller: Caller) -> GenerationPlan:
        """Raises `ApiError` or `InvalidRequestError` naming the field at fault."""
        request = decode_body(self._decoder, body)
        model = self._prompts.model
        model.check_name(request.model, caller)
        check_common_fields(request)
        if request.echo:
            raise bad_request("echo is not supported for chat", "echo")
        counts = choice_counts(request, prompts=1)
        top = chat_logprobs(request)
        wanted = _wanted_tokens(request)
        # Ranges are checked before the prompt is encoded.
        sampling = sampling_params(
            request,
            max_tokens=wanted or MAX_OUTPUT_TOKENS,
            logprobs=top,
            prompt_logprobs=request.prompt_logprobs,
            tokenizer=self._prompts.tokenizer,
        )
        turn = await self._sessions.take(
            request.session_params, cache_salt=caller.cache_salt(request.cache_salt or ""), choices=counts.generated
        )
        input_ids = await self._encode(request, turn)
        context_length = self._prompts.context_length() - (0 if turn is None else turn.history)
        check_context(len(input_ids), wanted or 0, context_length, "messages")
        sampling = fit_output(sampling, context_length - len(input_ids), vocab_size=self._prompts.tokenizer.vocab_size)
        choice = PlannedChoice(index=0, input_ids=input_ids, sampling=sampling)
        return generation_plan(request, model.name, [choice], counts, turn=turn)

    def format(self, plan: GenerationPlan, request_id: str, created: int) -> AnswerFormat:
        return ChatFormat(f"chatcmpl-{request_id}", created, plan, self._prompts.tokenizer.vocabulary)

    async def _encode(self, request: ChatRequest, turn: SessionTurn | None) -> tuple[int, ...]:
        messages = template_messages(request.messages)
        add_generation_prompt = request.add_generation_prompt is not False
        if turn is not None and not turn.begins:
            return await self._prompts.encode_chat_turn(
                messages,
                last_token=turn.last_token,
                add_generation_prompt=add_generation_prompt,
                variables=request.chat_template_kwargs,
            )
        return await self._prompts.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            add_special_tokens=bool(request.add_special_tokens),
            variables=request.chat_template_kwargs,
        )


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk` objects of one answer."""

    def __init__(self, answer_id: str, created: int, plan: GenerationPlan, vocabulary: Vocabulary) -> None:
        self._id = answer_id
        self._created = created
        self._model = plan.model
        self._vocabulary = vocabulary
        self._prompt = plan.choices[0].input_ids
        self._top = plan.choices[0].sampling.logprobs if plan.shows_logprobs else None
        self._prompt_top = plan.prompt_logprobs
        self._no_usage: UnsetType | None = None if plan.include_usage or plan.continuous_usage else UNSET

    def opening(self, choice: PlannedChoice, first: ChoicePiece, usage: Usage | None) -> bytes:
        del first  # a chat does not begin with its prompt
        delta = ChatDelta(role="assistant", content="")
        return self._chunk(ChatChunkChoice(index=choice.index, delta=delta), usage)

    def chunk(self, piece: ChoicePiece, usage: Usage | None) -> bytes:
        choice = ChatChunkChoice(
            index=piece.index,
            delta=ChatDelta(content=piece.text or UNSET),
            logprobs=self._logprobs(piece.scored) if piece.scored else None,
            finish_reason=None if piece.finish is None else piece.finish.reason,
            stop_reason=stop_reason(piece.finish),
        )
        return self._chunk(choice, usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        return encode_json(ChatChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=usage))

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        return encode_json(
            ChatResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._whole_choice(choice) for choice in choices],
                usage=usage,
                prompt_logprobs=self._prompt_logprobs(choices[0]),
            )
        )

    def _prompt_logprobs(self, first: WholeChoice) -> PromptLogprobs | UnsetType:
        """Of the one prompt that all choices have."""
        if self._prompt_top is None or first.prompt_logprobs is None:
            return UNSET
        return logprobs.prompt_logprobs(self._prompt, first.prompt_logprobs, self._vocabulary, self._prompt_top)

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | None) -> bytes:
        return encode_json(
            ChatChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[choice],
                usage=self._no_usage if usage is None else usage,
            )
        )

    def _whole_choice(self, choice: WholeChoice) -> ChatChoice:
        assert choice.finish is not None, f"choice {choice.index} has not finished"
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=choice.text),
            logprobs=self._logprobs(choice.scored),
            finish_reason=choice.finish.reason,
            stop_reason=choice.finish.stop,
        )

    def _logprobs(self, scored: list[ScoredToken]) -> ChatLogprobs | None:
        return None if self._top is None else logprobs.chat_logprobs(scored, self._vocabulary, self._top)


def _wanted_tokens(request: ChatRequest) -> int | None:
    """The newer name wins. None leaves it to us: the rest of the context."""
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if wanted is not None and not 1 <= wanted <= MAX_OUTPUT_TOKENS:
        raise bad_request(f"{name} must be between 1 and {MAX_OUTPUT_TOKENS}, got {quoted(wanted)}", name)
    return wanted
