"""One growing output: tokens from the engine, text and finish for the caller.

One cut decides everything [one-cut]: the token that completes a stop string is the last one in ids, logprobs
and text alike. Tokens are taken by position, each once.
"""

from collections.abc import Iterator, Sequence

from tandem_engine.library.outputs import CompletionOutput, Logprob, TokenScores
from tandem_engine.library.sampling_params import SamplingParams
from tandem_engine.messages import sampling as wire
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob, TokenOutput
from tandem_engine.tokenizer.output_text import OutputText
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
