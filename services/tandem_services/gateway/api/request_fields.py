"""Converts OpenAI's request fields into Tandem's messages. Pure: checks and converts, allocates and sends nothing."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import msgspec

from tandem_engine.base.logs import quoted
from tandem_engine.messages.sampling import MAX_PROMPT_LOGPROBS, MAX_TOP_LOGPROBS, ReasoningBudget, SamplingParams
from tandem_engine.tokenizer.text_tokenizer import Truncation, TruncationSide
from tandem_services.common.errors import bad_request
from tandem_services.gateway.api.openai_schemas import ChatRequest, CompletionRequest, GenerationFields, StreamOptions
from tandem_services.gateway.dispatch.plan import Choice, GenerationPlan
from tandem_services.gateway.dispatch.sessions import SessionTurn
from tandem_services.gateway.limits import (
    MAX_BEST_OF,
    MAX_CHAT_TOP_LOGPROBS,
    MAX_COMPLETION_LOGPROBS,
    MAX_OUTPUT_TOKENS,
    check_cache_salt,
    check_choices,
    check_metadata,
    check_name,
    check_priority,
    check_stop,
)
from tandem_services.gateway.models.named_tokens import allowed_ids, logit_biases, named_ids
from tandem_services.gateway.output.reader import PLAIN, OutputReading
from tandem_services.gateway.output.structured_output import RequestedGrammar

FIELD = "truncate_prompt_tokens"


class Truncating(Protocol):
    """A request that may ask for it."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """Tokens that stay; -1 for as many as there is room for."""
        ...

    @property
    def truncation_side(self) -> TruncationSide | None: ...


def requested_truncation(
    request: Truncating, context_length: Callable[[], int], *, max_tokens: int = 0, side: TruncationSide = "left"
) -> Truncation | None:
    """None when prompts stay whole. `max_tokens`: of output, in the request; `side`: when the request has none.
    `context_length` is not called when there is nothing to cut.

    Raises `ApiError` 400 for a length that no prompt can have with its output.
    """
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return None
    # Where the output alone is too long, the check of both reports it.
    room = max(context_length() - max(max_tokens, 1), 1)
    if wanted != -1 and not 1 <= wanted <= room:
        raise bad_request(
            f"{FIELD} must be -1 (all there is room for) or between 1 and {room}, the context less the output, "
            f"got {quoted(wanted)}",
            FIELD,
        )
    return Truncation(room if wanted == -1 else wanted, request.truncation_side or side)


_seeds = random.Random()
"""Begins with entropy of the system: a system call for each request lets another thread take the GIL."""

_SEED_RANGE = 1 << 64
_SEED_LOWEST = -(1 << 63)


_CHECKED = (
    *("stream_options", "stream_interval", "user", "prompt_cache_key", "session_id", "metadata", "cache_salt"),
    *("priority", "stop", "session_params", "prompt_logprobs"),
)
_checked = attrgetter(*_CHECKED)

_SAMPLED = (
    *("min_tokens", "top_k", "min_p", "stop_token_ids", "stop", "logprob_token_ids", "logprob_start"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
)
"""Fields of the sampling that most requests leave out."""
_sampled = attrgetter(*_SAMPLED)


def check_common_fields(request: GenerationFields) -> None:
    """Checks of a request that need no prompt."""
    if _checked(request).count(None) == len(_CHECKED):
        return  # as of most requests
    if request.stream_options not in (None, StreamOptions()) and not request.stream:
        raise bad_request("stream_options is only allowed with stream=true", "stream_options")
    if request.stream_interval is not None and not 1 <= request.stream_interval <= MAX_OUTPUT_TOKENS:
        raise bad_request(
            f"stream_interval must be between 1 and {MAX_OUTPUT_TOKENS} tokens, got {quoted(request.stream_interval)}",
            "stream_interval",
        )
    check_name(request.user, "user")
    check_name(request.prompt_cache_key, "prompt_cache_key")
    check_name(request.session_id, "session_id")
    check_metadata(request.metadata)
    check_cache_salt(request.cache_salt)
    check_priority(request.priority or 0)
    check_stop(stop_strings(request))
    if request.session_params is not None and request.echo:
        raise bad_request("echo is not available with session_params", "echo")
    if request.session_params is not None and request.truncate_prompt_tokens is not None:
        raise bad_request(
            f"{FIELD} is not available with session_params: a turn continues after the whole session", FIELD
        )
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not available with stream=true", "prompt_logprobs")


def check_prompt_alone(request: GenerationFields) -> None:
    """What a request with `max_tokens` 0 cannot ask for. Raises `ApiError` 400."""
    if request.min_tokens:
        raise bad_request(f"min_tokens must be 0 with max_tokens 0, got {quoted(request.min_tokens)}", "min_tokens")


PROMPT_ALONE_TOKENS = 2
"""Output tokens of a request with `max_tokens` 0, both dropped. A prefill worker sends the prompt's KV with the first
token; the second ends the output at the decode worker, which so has the prompt in its cache, too."""


def _prompt_alone(prompt: Choice) -> Choice:
    """Nothing that could end the output with its first token, at the prefill worker."""
    sampling = msgspec.structs.replace(
        prompt.sampling, ignore_eos=True, stop=(), stop_token_ids=(), grammar=None, reasoning_budget=None
    )
    return replace(prompt, sampling=sampling)


def affinity_key(request: GenerationFields) -> str:
    """What the router's policy `session` keeps on one worker; "" where the client names nothing."""
    return request.session_id or request.prompt_cache_key or request.user or ""


def stop_strings(request: GenerationFields) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def sampling_params(
    request: GenerationFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
    vocab_size: int,
    grammar: RequestedGrammar | None,
    prompt_logprobs: int | None = None,
    reasoning_budget: ReasoningBudget | None = None,
) -> SamplingParams:
    """Raises `InvalidRequestError` or `ApiError` 400 naming the field that is out of range."""
    if _sampled(request).count(None) == len(_SAMPLED):
        further = {}
    else:
        further = _further_sampling(request, logprobs=logprobs, vocab_size=vocab_size)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=_seeds.getrandbits(63) if request.seed is None else request.seed,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        bad_words=bad_words,
        grammar=None if grammar is None else grammar.spec,
        reasoning_budget=reasoning_budget,
        **further,
    )
    sampling.check(vocab_size=vocab_size)
    return sampling


def _further_sampling(request: GenerationFields, *, logprobs: int | None, vocab_size: int) -> dict[str, Any]:
    top_k = request.top_k or 0
    return {
        "min_tokens": request.min_tokens or 0,
        "top_k": 0 if top_k == -1 else top_k,
        "min_p": request.min_p or 0.0,
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "stop": stop_strings(request),
        "logprob_token_ids": named_ids(request.logprob_token_ids, logprobs=logprobs),
        "logprob_start": request.logprob_start or 0,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "repetition_penalty": 1.0 if request.repetition_penalty is None else request.repetition_penalty,
        "logit_bias": logit_biases(request.logit_bias, vocab_size),
        "allowed_token_ids": allowed_ids(request.allowed_token_ids),
    }


def fit_output(sampling: SamplingParams, room: int, *, vocab_size: int) -> SamplingParams:
    """At most `room` output tokens, the rest of the context. Raises as `sampling_params` when that is too few."""
    if sampling.max_tokens <= room:
        return sampling
    fitted = msgspec.structs.replace(sampling, max_tokens=room)
    fitted.check(vocab_size=vocab_size)
    return fitted


def after_prompt(sampling: SamplingParams, reading: OutputReading) -> SamplingParams:
    """A reasoning budget counts from the prompt's end where that has opened the reasoning."""
    if sampling.reasoning_budget is None or not reading.opened:
        return sampling
    opened = msgspec.structs.replace(sampling.reasoning_budget, opened=True)
    return msgspec.structs.replace(sampling, reasoning_budget=opened)


class ChoiceCounts(NamedTuple):
    """Choices of one prompt."""

    generated: int
    kept: int


_ONE = ChoiceCounts(generated=1, kept=1)


def choice_counts(request: GenerationFields, *, prompts: int) -> ChoiceCounts:
    """`n`, and `best_of` from which the n best are kept. Raises `ApiError` 400 naming the field out of range."""
    if request.n is None and request.best_of is None and prompts == 1:
        return _ONE
    n = 1 if request.n is None else request.n
    best_of = n if request.best_of is None else request.best_of
    check_choices(n, prompts)
    if not n <= best_of <= max(n, MAX_BEST_OF):
        raise bad_request(f"best_of must be between n ({n}) and {MAX_BEST_OF}, got {quoted(best_of)}", "best_of")
    if request.stream and best_of > n:
        raise bad_request("best_of above n cannot be streamed: the best is known at the end", "best_of")
    check_choices(best_of, prompts)
    return ChoiceCounts(generated=best_of, kept=n)


def generation_plan(
    request: GenerationFields,
    prompts: Sequence[Choice],
    counts: ChoiceCounts,
    *,
    grammar_field: str | None,
    generate: bool = True,
    turn: SessionTurn | None = None,
    reading: OutputReading = PLAIN,
) -> GenerationPlan:
    """`prompts` hold one choice each; every prompt gets as many as are generated, whose seeds follow one another."""
    generated = counts.generated
    if not generate:
        prompts = [_prompt_alone(prompt) for prompt in prompts]
    # All prompts are sampled alike.
    shows_logprobs = prompts[0].sampling.logprobs is not None
    if generated > counts.kept:
        prompts = [_scored(prompt) for prompt in prompts]
    options = request.stream_options
    include_usage = options is not None and options.includes_usage
    _check_prompt_logprobs(prompts, counts.kept)
    return GenerationPlan(
        model=request.model or "",
        choices=(prompts[0],)
        if generated == len(prompts) == 1
        else tuple(
            _nth_choice(prompt, position * generated + nth, nth, scores_prompt=nth == 0 or bool(request.stream))
            for position, prompt in enumerate(prompts)
            for nth in range(generated)
        ),
        shows_logprobs=shows_logprobs,
        n=generated,
        kept=counts.kept,
        stream=bool(request.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
        stream_interval=(request.stream_interval or 1) if request.stream else 1,
        generate=generate,
        cache_salt=request.cache_salt or "",
        session_key=affinity_key(request),
        priority=request.priority or 0,
        skip_special_tokens=request.skip_special_tokens is not False,
        keep_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
        prompt_logprobs=request.prompt_logprobs,
        returns_ids=bool(request.return_token_ids),
        names_by_id=bool(request.return_tokens_as_token_ids),
        reading=reading,
        grammar_field=grammar_field,
        turn=turn,
    )


def chat_logprobs(request: ChatRequest) -> int | None:
    """Number of alternatives per token; None when no logprobs were requested."""
    top = request.top_logprobs
    if top is None:
        return 0 if request.logprobs else None
    if not request.logprobs:
        raise bad_request("top_logprobs is only allowed with logprobs=true", "top_logprobs")
    if not 0 <= top <= min(MAX_CHAT_TOP_LOGPROBS, MAX_TOP_LOGPROBS):
        raise bad_request(
            f"top_logprobs must be between 0 and {MAX_CHAT_TOP_LOGPROBS}, got {quoted(top)}", "top_logprobs"
        )
    return top


def completion_logprobs(request: CompletionRequest) -> int | None:
    """As `chat_logprobs`, for the older field that is a number."""
    top = request.logprobs
    if top is None:
        return None
    if not 0 <= top <= MAX_COMPLETION_LOGPROBS:
        raise bad_request(f"logprobs must be between 0 and {MAX_COMPLETION_LOGPROBS}, got {quoted(top)}", "logprobs")
    return top


def _scored(prompt: Choice) -> Choice:
    """With the logprobs that choices are ranked by."""
    logprobs = prompt.sampling.logprobs or 0
    return replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, logprobs=logprobs))


def completion_prompt_logprobs(request: CompletionRequest) -> int | None:
    """Alternatives per prompt token: for `prompt_logprobs`, and for `logprobs` when the prompt is echoed."""
    asked = request.prompt_logprobs
    if not request.echo or request.logprobs is None:
        return asked
    if request.logprob_start:
        raise bad_request("logprob_start must be 0 when logprobs are requested with echo", "logprob_start")
    return request.logprobs if asked is None else max(asked, request.logprobs)


def _check_prompt_logprobs(prompts: Sequence[Choice], kept: int) -> None:
    """Bounds on what one answer may hold: each of its choices repeats those of its prompt."""
    total = 0
    for prompt in prompts:
        sampling, tokens = prompt.sampling, len(prompt.input_ids)
        if sampling.prompt_logprobs is not None:
            sampling.check_prompt(tokens)
            total += kept * (tokens - sampling.logprob_start) * (1 + sampling.prompt_logprobs)
    if total > MAX_PROMPT_LOGPROBS:
        raise bad_request(
            f"all choices together have {total} logprobs of prompts, the limit is {MAX_PROMPT_LOGPROBS}",
            "prompt_logprobs",
        )


def _nth_choice(prompt: Choice, index: int, nth: int, *, scores_prompt: bool) -> Choice:
    """`scores_prompt`: it requests the prompt's logprobs. In a stream each does, so that none waits for another."""
    if nth == 0 and index == prompt.index and (scores_prompt or prompt.sampling.prompt_logprobs is None):
        return prompt
    seed = (prompt.sampling.seed + nth - _SEED_LOWEST) % _SEED_RANGE + _SEED_LOWEST
    sampling = msgspec.structs.replace(prompt.sampling, seed=seed)
    return Choice(
        index=index,
        input_ids=prompt.input_ids,
        sampling=sampling if scores_prompt else sampling.without_prompt_logprobs(),
        echo=prompt.echo,
    )
