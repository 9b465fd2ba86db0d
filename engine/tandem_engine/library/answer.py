"""One prompt of a library caller: its choices as requests to the engine, and their growing outputs.

    1. asked      a `GenerateRequest` per choice, in one group so that they share their prompt
    2. growing    each output of the engine goes to the choice that it names
    3. finished   every choice has ended; the best of `best_of` are kept

`Completion` turns the tokens of a choice into text and a finish reason. One cut applies to ids, logprobs and text
[one-cut]: the token that completes a stop string is the last one in all three. Tokens are taken by position, each once.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tandem_engine.base.errors import (
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    SessionError,
    SessionLostError,
)
from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.library.adapters import NamedAdapters
from tandem_engine.library.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenScores,
)
from tandem_engine.library.prompts import Encoded
from tandem_engine.library.sampling_params import SamplingParams
from tandem_engine.messages import sampling as wire
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob, TokenOutput
from tandem_engine.messages.requests import GenerateRequest, PoolingParams, SessionRef
from tandem_engine.messages.sampling import SamplingParams as WireSamplingParams
from tandem_engine.tokenizer.output_text import OutputText
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_engine.tokenizer.vocabulary import Vocabulary


class Completion:
    """Choice `index` of one prompt. Without a vocabulary it has no text."""

    def __init__(
        self, index: int, params: SamplingParams, sampling: wire.SamplingParams, vocabulary: Vocabulary | None
    ) -> None:
        self.index = index
        self.finish: Finish | None = None
        self._params = params
        self._vocabulary = vocabulary
        self._text = None if vocabulary is None else _output_text(vocabulary, params, sampling)
        self._shown = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by."""
        return self._sum() / len(self._logprobs) if self._logprobs else float("-inf")

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return len(self._token_ids)

    def take(self, output: TokenOutput) -> None:
        """What one step brought. Nothing follows a finish."""
        if not self._params.generates:
            self.finish = _prompt_alone(output.finish)
            return
        known = len(self._token_ids) - output.index
        hidden = self._hidden_tokens(output.finish)
        for position in range(known, len(output.token_ids)):
            self._token_ids.append(output.token_ids[position])
            if output.logprobs is not None:
                self._logprobs.append(output.logprobs[position])
            if position < len(output.token_ids) - hidden and self._push(output.token_ids[position]):
                return
        if output.finish is not None:
            self._end(output.finish)

    def output(self) -> CompletionOutput:
        """The state now."""
        finish = self.finish
        scored = self._params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self._shown,
            token_ids=tuple(self._token_ids),
            cumulative_logprob=self._sum() if scored else None,
            logprobs=tuple(self._scores()) if scored else None,
            finish_reason=None if finish is None else finish.reason.value,
            stop_reason=None if finish is None else finish.matched_stop,
            error=None if finish is None else finish.error,
        )

    def _push(self, token_id: int) -> bool:
        """Add a token's text. True when it completes a stop string."""
        if self._text is None:
            return False
        cut = self._text.push(token_id)
        self._shown += cut.text
        if cut.matched is not None:
            self.finish = Finish(reason=FinishReason.STOP, matched_stop=cut.matched)
        return cut.matched is not None

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        if self._text is None:
            return
        rest = self._text.flush()
        self._shown += rest.text
        if rest.matched is not None:
            self.finish = Finish(reason=FinishReason.STOP, matched_stop=rest.matched)

    def _hidden_tokens(self, finish: Finish | None) -> int:
        """A stop token ends the output and is no part of its text; it counts all the same."""
        if finish is None or finish.reason is not FinishReason.STOP or self._params.include_stop_str_in_output:
            return 0
        return 0 if isinstance(finish.matched_stop, str) else 1

    def _sum(self) -> float:
        return sum(each.logprob for each in self._logprobs)

    def _scores(self) -> Iterator[TokenScores]:
        for token_id, scored in zip(self._token_ids, self._logprobs, strict=True):
            yield token_scores(token_id, scored, self._vocabulary, named=bool(self._params.logprob_token_ids))


def _prompt_alone(finish: Finish | None) -> Finish | None:
    """How an output that stays empty ends."""
    ended = finish is not None and finish.reason is FinishReason.STOP
    return Finish(reason=FinishReason.LENGTH) if ended else finish


def _output_text(vocabulary: Vocabulary, params: SamplingParams, sampling: wire.SamplingParams) -> OutputText:
    return OutputText(
        vocabulary,
        sampling,
        skip_special_tokens=params.skip_special_tokens,
        keep_stop=params.include_stop_str_in_output,
    )


def token_scores(
    token_id: int, scored: TokenLogprob, vocabulary: Vocabulary | None, *, named: bool = False
) -> TokenScores:
    """The likeliest, best first, and the token itself. `named`: those that were asked for instead, without a rank."""

    def spelling(token: int) -> str:
        return "" if vocabulary is None else vocabulary.decode([token], skip_special_tokens=False)

    scores = {
        other: Logprob(logprob=logprob, rank=None if named else rank, decoded_token=spelling(other))
        for rank, (other, logprob) in enumerate(scored.top, start=1)
    }
    own = Logprob(logprob=scored.logprob, rank=scored.rank, decoded_token=spelling(token_id))
    return {token_id: own, **scores} if token_id not in scores else scores


def mean_ranked(completions: Sequence[Completion], keep: int) -> list[Completion]:
    """The `keep` best, best first."""
    return sorted(completions, key=lambda each: each.mean_logprob, reverse=True)[:keep]


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What an answer has to know of the engine."""

    text: TextTokenizer | None
    max_request_tokens: int
    """Longest prompt + max_tokens."""
    adapters: NamedAdapters = field(default_factory=NamedAdapters)


def serving_of(engine: Engine, config: EngineConfig) -> Serving:
    """What serves after `engine` was launched with `config`."""
    return Serving(
        text=engine.text,
        max_request_tokens=engine.scheduler.max_request_tokens,
        adapters=NamedAdapters(refs=engine.adapters.names, config=config.adapters),
    )


@dataclass(kw_only=True, slots=True)
class Answer:
    """Belongs to one thread."""

    request_id: str
    prompt: Encoded
    params: SamplingParams
    requests: tuple[GenerateRequest, ...]
    completions: dict[str, Completion]
    """By rid, in order of their index."""
    vocabulary: Vocabulary | None
    first_output: TokenOutput | None = None
    prompt_logprobs: tuple[TokenScores | None, ...] | None = None
    failure: Finish | None = field(default=None)
    """The first error that a choice ended with."""

    @property
    def finished(self) -> bool:
        return all(completion.finish is not None for completion in self.completions.values())

    def take(self, output: TokenOutput) -> None:
        """What one step brought for the choice that `output` names."""
        if self.first_output is None and output.cached_tokens is not None:
            self.first_output = output
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = tuple(self._prompt_scores(output.prompt_logprobs))
        if output.finish is not None and output.finish.reason is FinishReason.ERROR:
            self.failure = self.failure or output.finish
        completion = self.completions[output.rid]
        # The engine may yet report the end of an output whose text ended before.
        if completion.finish is None:
            completion.take(output)
            self._note_turn(completion)

    def output(self) -> RequestOutput:
        """The state now."""
        first = self.first_output
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=tuple(self._outputs()),
            finished=self.finished,
            metrics=RequestMetrics(
                queue_s=None if first is None else first.queue_s,
                prefill_s=None if first is None else first.prefill_s,
                cached_tokens=0 if first is None else first.cached_tokens or 0,
            ),
        )

    def _note_turn(self, completion: Completion) -> None:
        session, finish = self.prompt.session, completion.finish
        if session is not None and finish is not None and finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            session.turn_ended(prompt=len(self.prompt.token_ids), output=completion.tokens)

    def _prompt_scores(self, logprobs: Sequence[TokenLogprob | None]) -> Iterator[TokenScores | None]:
        for token_id, scored in zip(self.prompt.token_ids, logprobs, strict=True):
            yield None if scored is None else token_scores(token_id, scored, self.vocabulary)

    def _outputs(self) -> list[CompletionOutput]:
        completions = [*self.completions.values()]
        if self.params.generated > self.params.n:
            # While they grow it is unknown which will be kept.
            completions = mean_ranked(completions, self.params.n) if self.finished else []
            for index, completion in enumerate(completions):
                completion.index = index
        return [completion.output() for completion in completions]


def make_answer(request_id: str, prompt: Encoded, params: SamplingParams, serving: Serving) -> Answer:
    """Ready to be asked. Raises `InvalidRequestError` for counts and words that cannot be."""
    params.check_counts()
    session = _session_ref(prompt, params)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    history = 0 if prompt.session is None else prompt.session.tokens
    room = serving.max_request_tokens - history - len(prompt.token_ids)
    vocabulary = None if serving.text is None else serving.text.vocabulary
    requests, completions = [], {}
    for index in range(params.generated):
        rid = request_id if params.generated == 1 else f"{request_id}/{index}"
        sampling = params.of_choice(index, seed=seed, room=room, text=serving.text, prompt=prompt.token_ids)
        group = request_id if params.generated > 1 else ""
        requests.append(
            GenerateRequest(
                rid=rid,
                input_ids=prompt.token_ids,
                sampling=sampling,
                group=group,
                session=session,
                cache_salt=prompt.cache_salt,
                adapter=prompt.adapter,
            )
        )
        completions[rid] = Completion(index, params, sampling, vocabulary)
    return Answer(
        request_id=request_id,
        prompt=prompt,
        params=params,
        requests=tuple(requests),
        completions=completions,
        vocabulary=vocabulary,
    )


def _session_ref(prompt: Encoded, params: SamplingParams) -> SessionRef | None:
    if prompt.session is None:
        return None
    if params.generated != 1:
        raise InvalidRequestError(
            f"a session continues after one output: n and best_of must be 1, got {params.generated}", param="n"
        )
    return SessionRef(id=prompt.session.id, turn=prompt.session.turns, keeps_output=params.generates)


def error_of(finish: Finish) -> EngineError:
    """Of a finish whose reason is error."""
    assert finish.reason is FinishReason.ERROR, f"{finish} is no failure"
    message = finish.error or "the request failed"
    match finish.code:
        case InvalidRequestError.code:
            return InvalidRequestError(message, param=finish.param)
        case SessionLostError.code:
            return SessionLostError(message)
        case SessionError.code:
            return SessionError(message)
        case QueueFullError.code:
            return QueueFullError(message)
    return RequestFailedError(message, reason=finish.code or "", retryable=finish.retryable)


NO_TEXT = WireSamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""One token is generated to learn that the prompt is computed; it is not returned."""


@dataclass(kw_only=True, slots=True)
class EmbeddingAnswer:
    """Belongs to one thread."""

    request_id: str
    prompt: Encoded
    requests: tuple[GenerateRequest, ...]
    """One."""
    finish: Finish | None = None
    embedding: bytes | None = None

    @property
    def finished(self) -> bool:
        return self.finish is not None

    @property
    def failure(self) -> Finish | None:
        """The finish, when it is an error."""
        return self.finish if self.finish is not None and self.finish.reason is FinishReason.ERROR else None

    def take(self, output: TokenOutput) -> None:
        """What one step brought."""
        self.embedding = output.embedding or self.embedding
        self.finish = output.finish or self.finish

    def output(self) -> EmbeddingRequestOutput:
        """Once it has finished. Raises the error that it ended with."""
        assert self.finish is not None, f"request {self.request_id} is still computed"
        if self.failure is not None:
            raise error_of(self.failure)
        if self.embedding is None:
            raise RequestFailedError("the embedding was aborted", reason=self.finish.reason.value, retryable=True)
        return EmbeddingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=EmbeddingOutput(embedding=np.frombuffer(self.embedding, dtype="<f4").tolist()),
            finished=True,
        )


def make_embedding_answer(request_id: str, prompt: Encoded, params: PoolingParams) -> EmbeddingAnswer:
    """Ready to be asked."""
    request = GenerateRequest(
        rid=request_id,
        input_ids=prompt.token_ids,
        sampling=NO_TEXT,
        pooling=params,
        cache_salt=prompt.cache_salt,
        adapter=prompt.adapter,
    )
    return EmbeddingAnswer(request_id=request_id, prompt=prompt, requests=(request,))


class Pending(Protocol):
    """One prompt on its way through the engine. Belongs to one thread."""

    @property
    def request_id(self) -> str: ...

    @property
    def requests(self) -> tuple[GenerateRequest, ...]:
        """What the engine is asked."""
        ...

    @property
    def finished(self) -> bool: ...

    @property
    def failure(self) -> Finish | None:
        """The first error that a request ended with."""
        ...

    def take(self, output: TokenOutput) -> None:
        """What one step brought for one of `requests`."""
        ...
