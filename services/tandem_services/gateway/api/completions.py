"""Turns `POST /v1/completions` requests into plans, and their results into JSON."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from tandem_engine.base.logs import quoted
from tandem_engine.messages.outputs import TokenLogprob
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer, Truncation
from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.common.errors import ApiError, bad_request
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.api import logprobs
from tandem_services.gateway.api.interface import AnswerFormat, ReadModel, WholeChoice, stop_reason
from tandem_services.gateway.api.openai_schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Prompt,
    PromptLogprobs,
    Usage,
    place_of,
    split_prompts,
)
from tandem_services.gateway.api.request_fields import (
    PROMPT_ALONE_TOKENS,
    check_common_fields,
    check_prompt_alone,
    choice_counts,
    completion_logprobs,
    completion_prompt_logprobs,
    fit_output,
    generation_plan,
    requested_truncation,
    sampling_params,
)
from tandem_services.gateway.dispatch.plan import Choice, GenerationPlan
from tandem_services.gateway.dispatch.sessions import SessionTurn
from tandem_services.gateway.http.body import BodyDecoder
from tandem_services.gateway.http.errors import error_json
from tandem_services.gateway.http.sse import DONE, TextEvents, data_event, encode_json
from tandem_services.gateway.limits import (
    MAX_OUTPUT_TOKENS,
    MAX_PROMPTS,
    check_context,
    check_token_ids,
)
from tandem_services.gateway.models.prompts import PromptEncoder
from tandem_services.gateway.output.choice_text import ChoicePiece, ScoredToken
from tandem_services.gateway.output.structured_output import requested_grammar

FIELD = "suffix"


def check_suffix(request: CompletionRequest) -> None:
    """Raises `ApiError` 400 naming what it does not go together with."""
    if not request.suffix:
        return
    others = {
        "echo": request.echo,
        "session_params": request.session_params is not None,
        "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
    }
    for name, given in others.items():
        if given:
            raise bad_request(f"{name} is not available with {FIELD}", name)
    prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise bad_request(f"{FIELD} needs a prompt that is text: with token ids, send the model's own marks", FIELD)


def middle_sampling(request: CompletionRequest, sampling: SamplingParams, tokenizer: TextTokenizer) -> SamplingParams:
    """Some models end a middle with a special token."""
    marks = tokenizer.fim
    if not request.suffix or marks is None or marks.end is None or marks.end in sampling.stop_token_ids:
        return sampling
    return msgspec.structs.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, marks.end))


DEFAULT_MAX_TOKENS = 16


class CompletionPlanner:
    """Validates completion requests. Nothing is sent before `plan` has returned."""

    endpoint = "/v1/completions"

    def __init__(self, *, strict: bool) -> None:
        self._decoder = BodyDecoder(CompletionRequest, strict=strict, closed=True)

    def decode(self, body: bytes) -> CompletionRequest:
        return self._decoder.decode(body)

    async def plan(self, request: CompletionRequest, served: ReadModel, caller: Caller) -> GenerationPlan:
        """Raises `ApiError` or `InvalidRequestError` naming the field at fault."""
        prompt_encoder = served.prompts
        check_common_fields(request)
        check_suffix(request)
        prompts = split_prompts(request.prompt, param="prompt", most=MAX_PROMPTS)
        counts = choice_counts(request, prompts=len(prompts))
        wanted = _wanted_tokens(request)
        grammar = requested_grammar(request, request.response_format)
        # Ranges are checked before any prompt is encoded.
        sampling = sampling_params(
            request,
            max_tokens=DEFAULT_MAX_TOKENS if wanted is None else wanted or PROMPT_ALONE_TOKENS,
            logprobs=completion_logprobs(request),
            prompt_logprobs=completion_prompt_logprobs(request),
            bad_words=await prompt_encoder.bad_words(request.bad_words),
            vocab_size=prompt_encoder.tokenizer.vocab_size,
            grammar=grammar,
        )
        turn = await served.session_manager.take(
            request.session_params,
            cache_salt=caller.cache_salt(request.cache_salt or ""),
            choices=counts.generated * len(prompts),
            keeps_output=wanted != 0,
        )
        parsed = prompt_encoder.parses_special_tokens(request.parse_special_tokens, caller)
        choices = [
            await _choice(
                request,
                prompt_encoder,
                prompt,
                place_of(request.prompt, position, "prompt"),
                wanted,
                sampling,
                turn,
                parse_special_tokens=parsed,
            )
            for position, prompt in enumerate(prompts)
        ]
        return generation_plan(
            request,
            choices,
            counts,
            grammar_field=None if grammar is None else grammar.field,
            generate=wanted != 0,
            turn=turn,
        )

    def format(self, plan: GenerationPlan, served: ReadModel, request_id: str, created: int) -> AnswerFormat:
        return CompletionFormat(f"cmpl-{request_id}", created, plan, served.prompts.tokenizer.vocabulary)


async def _choice(
    request: CompletionRequest,
    prompts: PromptEncoder,
    prompt: Prompt,
    place: str,
    wanted: int | None,
    sampling: SamplingParams,
    turn: SessionTurn | None,
    *,
    parse_special_tokens: bool,
) -> Choice:
    # Around a turn that continues a text there is nothing to add, such as BOS.
    begins = turn is None or turn.begins
    truncation = requested_truncation(request, prompts.context_length, max_tokens=wanted or 0)
    context_length = prompts.context_length() - (0 if turn is None else turn.history)
    if truncation is None and not isinstance(prompt, str):
        # Before a look at each of millions of ids.
        check_context(len(prompt), wanted or 0, context_length, "prompt")
    input_ids = await _encode(
        request,
        prompts,
        prompt,
        place,
        begins=begins,
        truncation=truncation,
        parse_special_tokens=parse_special_tokens,
    )
    check_context(len(input_ids), wanted or 0, context_length, "prompt")
    vocab_size = prompts.tokenizer.vocab_size
    sampling = middle_sampling(request, sampling, prompts.tokenizer)
    return Choice(
        index=0,
        input_ids=input_ids,
        sampling=fit_output(sampling, context_length - len(input_ids), vocab_size=vocab_size),
        echo=await _echo(prompt if truncation is None else input_ids, prompts) if request.echo else None,
    )


async def _encode(
    request: CompletionRequest,
    prompts: PromptEncoder,
    prompt: Prompt,
    place: str,
    *,
    begins: bool,
    truncation: Truncation | None,
    parse_special_tokens: bool,
) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        check_token_ids(prompt, prompts.tokenizer.vocab_size, "prompt", place=place)
        return tuple(prompt) if truncation is None else truncation.of(prompt)
    add_special_tokens = begins if request.add_special_tokens is None else request.add_special_tokens
    if request.suffix:
        return await prompts.encode_middle(
            prompt,
            request.suffix,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
        )
    return await prompts.encode(
        prompt,
        add_special_tokens=add_special_tokens,
        parse_special_tokens=parse_special_tokens,
        truncation=truncation,
    )


async def _echo(prompt: str | Sequence[int], prompts: PromptEncoder) -> str:
    return prompt if isinstance(prompt, str) else await prompts.decode(prompt)


class CompletionFormat:
    """`text_completion` objects of one answer, whole or in chunks."""

    def __init__(self, answer_id: str, created: int, plan: GenerationPlan, vocabulary: Vocabulary) -> None:
        self._id = answer_id
        self._created = created
        self._model = plan.model
        self._vocabulary = vocabulary
        self._plan = plan
        self._top = plan.returned_logprobs
        self._no_usage: UnsetType | None = None if plan.include_usage or plan.continuous_usage else UNSET
        self._names = logprobs.TokenNames(vocabulary, by_id=plan.names_by_id)
        self._owes_prompt: set[int] = set()
        """Choices whose next chunk is their first, so that the ids of their prompts go with it."""
        self.text_events = None if plan.returns_ids else TextEvents(self._text_event)

    def opening(self, choice: Choice, first: ChoicePiece, usage: Usage | None) -> bytes:
        if self._plan.returns_ids:
            self._owes_prompt.add(choice.index)
        if choice.echo is None:
            return b""
        echoed = CompletionChoice(
            index=choice.index,
            text=choice.echo,
            logprobs=self._echoed(choice.index, first.prompt_logprobs),
            prompt_token_ids=self._owed_prompt(choice.index),
            token_ids=self._token_ids(()),
        )
        return self._chunk(echoed, usage)

    def chunk(self, piece: ChoicePiece, usage: Usage | None) -> bytes:
        if usage is None and piece.finish is None and not piece.scored and self.text_events is not None:
            return self.text_events.of(piece.index, piece.text)
        choice = CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs(piece.index, piece.scored) if piece.scored else None,
            finish_reason=None if piece.finish is None else piece.finish.reason,
            stop_reason=stop_reason(piece.finish),
            prompt_token_ids=self._owed_prompt(piece.index),
            token_ids=self._token_ids(piece.token_ids),
        )
        return self._chunk(choice, usage)

    def closing(self, usage: Usage) -> bytes:
        return (data_event(self._response([], usage)) if self._plan.include_usage else b"") + DONE

    def failure(self, refusal: ApiError) -> bytes:
        return data_event(error_json(refusal)) + DONE

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        return self._response([self._whole_choice(choice) for choice in choices], usage)

    def _chunk(self, choice: CompletionChoice, usage: Usage | None) -> bytes:
        return data_event(self._response([choice], self._no_usage if usage is None else usage))

    def _owed_prompt(self, index: int) -> Sequence[int] | UnsetType:
        if index not in self._owes_prompt:
            return UNSET
        self._owes_prompt.remove(index)
        return self._planned(index).input_ids

    def _token_ids(self, ids: Sequence[int]) -> list[int] | UnsetType:
        return list(ids) if self._plan.returns_ids else UNSET

    def _text_event(self, index: int, text: str) -> bytes:
        return self._chunk(CompletionChoice(index=index, text=text), None)

    def _response(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return encode_json(
            CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
        )

    def _whole_choice(self, choice: WholeChoice) -> CompletionChoice:
        assert choice.finish is not None, f"choice {choice.index} has not finished"
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=self._whole_logprobs(choice),
            finish_reason=choice.finish.reason,
            stop_reason=choice.finish.stop,
            prompt_logprobs=self._prompt_logprobs(choice),
            prompt_token_ids=self._planned(choice.index).input_ids if self._plan.returns_ids else UNSET,
            token_ids=self._token_ids(choice.token_ids),
        )

    def _whole_logprobs(self, choice: WholeChoice) -> CompletionLogprobs | None:
        output = self._logprobs(choice.index, choice.scored)
        echoed = self._echoed(choice.index, choice.prompt_logprobs)
        return output if output is None or echoed is None else logprobs.joined(echoed, output)

    def _logprobs(self, index: int, scored: list[ScoredToken]) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        echo = len(self._planned(index).echo or "")
        return logprobs.completion_logprobs(scored, self._names, self._top, after=echo)

    def _echoed(self, index: int, prompt: Sequence[TokenLogprob | None] | None) -> CompletionLogprobs | None:
        planned = self._planned(index)
        if self._top is None or prompt is None or planned.echo is None:
            return None
        return logprobs.echoed_logprobs(planned.input_ids, prompt, self._names, planned.sampling.logprobs or 0)

    def _prompt_logprobs(self, choice: WholeChoice) -> PromptLogprobs | UnsetType:
        top = self._plan.prompt_logprobs
        if top is None or choice.prompt_logprobs is None:
            return UNSET
        input_ids = self._planned(choice.index).input_ids
        return logprobs.prompt_logprobs(input_ids, choice.prompt_logprobs, self._vocabulary, top)

    def _planned(self, index: int) -> Choice:
        """The first choice of the prompt that choice `index` of the answer belongs to."""
        return self._plan.choices[index // self._plan.kept * self._plan.n]


def _wanted_tokens(request: CompletionRequest) -> int | None:
    wanted = request.max_tokens
    if wanted is not None and not 0 <= wanted <= MAX_OUTPUT_TOKENS:
        raise bad_request(f"max_tokens must be between 0 and {MAX_OUTPUT_TOKENS}, got {quoted(wanted)}", "max_tokens")
    if wanted == 0:
        check_prompt_alone(request)
    return wanted
