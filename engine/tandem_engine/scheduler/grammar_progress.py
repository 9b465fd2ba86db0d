"""Where one request stands in its grammar.

The matcher has seen the first `followed` output tokens of its request, never its prompt. Settlement takes it along
with each run of new tokens; whoever needs a mask first lets it catch up with tokens that came another way: those of
a resumed attempt, and the first token of a handoff. Retraction changes nothing: output tokens stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tandem_engine.errors import InvalidRequestError
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.sampling.grammar.backend import CompiledGrammar, Matcher
from tandem_engine.scheduler.stop import Cut

GRAMMAR_ENDED = Finish(reason=FinishReason.STOP, by_grammar=True)


@dataclass(kw_only=True, slots=True, eq=False)
class GrammarProgress:
    """Scheduler thread only."""

    compiled: CompiledGrammar
    matcher: Matcher
    followed: int = 0

    @classmethod
    def start(cls, compiled: CompiledGrammar) -> Self:
        """Nothing of the output seen so far."""
        return cls(compiled=compiled, matcher=compiled.matcher())

    def start_over(self, outputs: Sequence[int]) -> None:
        """Follow `outputs` with a new matcher: this one went along drafts into a state that it cannot leave."""
        self.matcher, self.followed = self.compiled.matcher(), 0
        self.catch_up(outputs)

    def catch_up(self, outputs: Sequence[int]) -> None:
        """Follow the settled `outputs` to their end. Raises `InvalidRequestError` when they break the grammar."""
        if self.followed == len(outputs):
            return
        self.followed += self.matcher.accept(outputs[self.followed :])
        if self.followed < len(outputs):
            raise InvalidRequestError(
                f"output token {self.followed} (id {outputs[self.followed]}) does not fit the grammar"
                if not self.matcher.ended
                else f"the grammar ends after {self.followed} output tokens, {len(outputs)} were given",
                param="resume_ids",
            )

    def cut(self, run: Sequence[int], cut: Cut) -> Cut:
        """Follow `run` as far as `cut` keeps it, and end the output where the grammar ends.

        A grammar that is satisfied and allows nothing more ends the output as `stop`, whatever `min_tokens` and
        `ignore_eos` say, and also at the last token that `max_tokens` allows. Raises `InvalidRequestError` for a
        token that does not fit, as the mask left none that other constraints of the request would allow, and for one
        that fits but leads to where the grammar is too large to be followed.
        """
        kept = self.matcher.accept(run[: cut.keep])
        self.followed += kept
        if self.matcher.ended:
            stopped = kept == cut.keep and cut.finish is not None and cut.finish.reason is FinishReason.STOP
            return cut if stopped else Cut(keep=kept, finish=GRAMMAR_ENDED)
        if kept < cut.keep:
            if self.matcher.problem is not None:
                raise self.not_followed()
            raise InvalidRequestError(
                f"after {self.followed} output tokens no token satisfies both the grammar and the request's other "
                "constraints on tokens (min_tokens, bad_words, allowed_token_ids)",
                param="grammar",
            )
        return cut

    def not_followed(self) -> InvalidRequestError:
        """The end of a request whose matcher has a `problem`."""
        reason = f"the grammar cannot be followed after {self.followed} output tokens: {self.matcher.problem}"
        return InvalidRequestError(reason, param="grammar")
