"""One prompt on its way through the engine: its choices as requests, and what came of them.

1. asked      a `GenerateRequest` per choice, in one group so that they share their prompt
2. growing    each output of the engine goes to the choice that it names
3. finished   every choice has ended; of those that `best_of` generated the best are kept
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem_engine.errors import InvalidRequestError
from tandem_engine.library.completion import Completion, mean_ranked, token_scores
from tandem_engine.library.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenScores
from tandem_engine.library.prompts import Encoded
from tandem_engine.library.sampling_params import SamplingParams
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob, TokenOutput
from tandem_engine.messages.requests import GenerateRequest, SessionRef
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_engine.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What an answer has to know of the engine."""

    text: TextTokenizer | None
    max_request_tokens: int
    """Longest prompt + max_tokens."""


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
            # While they grow nobody knows which will be kept.
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
