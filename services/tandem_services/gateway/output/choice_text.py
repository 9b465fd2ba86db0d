"""From the tokens of one choice to its text, counts and finish.

One cut decides everything [one-cut]: the token that completes a stop string is the last one in text, logprobs
and usage alike. Here the earliest event wins [earliest-stop]: a stop string inside a piece that also carries the
engine's finish ends the choice as `stop`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.tokenizer.output_text import OutputText
from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.gateway.output.parts import CallBegin, Content, Part
from tandem_services.gateway.output.reader import PLAIN, OutputReading
from tandem_services.gateway.output.token_sequence import Accepted


class ScoredToken(NamedTuple):
    """A token with its logprobs and where its text begins in the output, in characters."""

    token_id: int
    logprob: TokenLogprob
    offset: int


class ChoiceFinish(NamedTuple):
    """How a choice ended, in OpenAI's words."""

    reason: str
    """stop, tool_calls or length."""
    stop: int | str | None
    """The stop string or stop id that ended it."""


class ChoicePiece(msgspec.Struct, frozen=True):
    """What one choice adds to the answer. There is one for nearly every token: it must cost little to make."""

    index: int
    text: str
    tokens: int
    """Output tokens of the choice so far."""
    scored: list[ScoredToken]
    finish: ChoiceFinish | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """With the first piece, when they were requested."""
    parts: tuple[Part, ...] = ()
    """What `text`, and text held back before it, is read as."""
    reasoning_tokens: int = 0
    """Of `tokens`, those of the reasoning and of the markers before it."""
    token_ids: Sequence[int] = ()
    """The tokens since the previous piece, when the response contains them."""


class ChoiceText:
    """Turns the accepted tokens of choice `index` into pieces of its answer."""

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        sampling: SamplingParams,
        *,
        skip_special_tokens: bool,
        keep_stop: bool,
        reading: OutputReading = PLAIN,
        returns_ids: bool = False,
        interval: int = 1,
    ) -> None:
        """`interval`: tokens that pieces after the first have together, except the last."""
        self.index = index
        self._keep_stop = keep_stop
        self._tells_ids = returns_ids
        self._interval = interval
        self._held = ""
        """Text of tokens that wait for the interval to be full."""
        self._written = 0
        """Tokens up to the newest piece."""
        self._output = OutputText(
            vocabulary,
            sampling,
            skip_special_tokens=skip_special_tokens,
            keep_stop=keep_stop,
            visible=reading.visible,
        )
        self._reader = None if reading.is_plain else reading.new_reader()
        self.is_plain = (
            reading.is_plain
            and interval == 1
            and not (returns_ids or sampling.stop)
            and sampling.logprobs is None
            and sampling.prompt_logprobs is None
        )
        """All pieces before the last are nothing but the text of their tokens."""
        self._parts: list[Part] = []
        self._called = False
        self._reasoning_tokens = 0
        self._divided = 0
        """Tokens up to the newest one of the answer or of the reasoning; markers belong to what follows them."""
        self.tokens = 0
        """Of the output so far."""
        self._unsent: list[ScoredToken] = []
        self._unsent_ids: list[int] = []
        self._prompt: tuple[TokenLogprob | None, ...] | None = None

    def absorb(self, accepted: Accepted) -> ChoicePiece | None:
        """The next piece, or None while all new text is held back. Nothing follows a piece with a finish."""
        text, self._held = self._held, ""
        self._prompt = accepted.prompt_logprobs or self._prompt
        finish, reads = accepted.finish, self._reader is not None
        shown = len(accepted.token_ids) if finish is None else len(accepted.token_ids) - self._hidden_tokens(finish)
        for position, token_id in enumerate(accepted.token_ids):
            self.tokens += 1
            if self._tells_ids:
                self._unsent_ids.append(token_id)
            if accepted.logprobs:
                self._unsent.append(ScoredToken(token_id, accepted.logprobs[position], self._output.characters))
            if position >= shown:
                continue
            piece, matched = self._output.push(token_id)
            text += piece
            if reads:
                self._read(piece)
            if matched is not None:
                return self._end(text, ChoiceFinish("stop", matched))
        if finish is not None:
            return self._last_piece(text, finish)
        if (self._parts if reads else text) and self._is_due():
            return self._piece(text, None)
        self._held = text
        return None

    def absorb_plain(self, token_ids: Sequence[int]) -> str:
        """As `absorb` of tokens alone, of a plain choice: the text of the next piece, "" without one."""
        self.tokens += len(token_ids)
        self._written = self.tokens
        return self._output.push_plain(token_ids)

    def _hidden_tokens(self, finish: Finish) -> int:
        """A stop token ends the output and is not part of its text; it counts all the same."""
        if finish.reason is not FinishReason.STOP or self._keep_stop:
            return 0
        return 0 if finish.by_grammar or isinstance(finish.matched_stop, str) else 1

    def _last_piece(self, text: str, finish: Finish) -> ChoicePiece:
        rest, matched = self._output.flush()
        self._read(rest)
        if matched is not None:
            return self._end(text + rest, ChoiceFinish("stop", matched))
        return self._end(text + rest, ChoiceFinish(finish.reason.value, finish.matched_stop))

    def _is_due(self) -> bool:
        return not self._written or self.tokens - self._written >= self._interval

    def _read(self, text: str) -> None:
        """One token's text: reasoning is counted by the token, however many come at once."""
        if self._reader is None:
            return
        parts = self._reader.feed(text)
        self._called |= any(isinstance(part, CallBegin) for part in parts)
        self._parts += parts
        if self._reader.reasons:
            self._reasoning_tokens += self.tokens - self._divided
        if self._reader.reasons or parts:
            self._divided = self.tokens

    def _end(self, text: str, finish: ChoiceFinish) -> ChoicePiece:
        if self._reader is not None:
            self._parts += self._reader.finish()
        if self._called and finish.reason == FinishReason.STOP.value:
            finish = finish._replace(reason="tool_calls")
        return self._piece(text, finish)

    def _piece(self, text: str, finish: ChoiceFinish | None) -> ChoicePiece:
        scored, self._unsent = self._unsent, []
        ids, self._unsent_ids = self._unsent_ids, []
        prompt, self._prompt = self._prompt, None
        parts, self._parts = self._parts, []
        self._written = self.tokens
        if self._reader is None and text:
            parts = [Content(text)]
        return ChoicePiece(
            self.index, text, self.tokens, scored, finish, prompt, tuple(parts), self._reasoning_tokens, ids
        )
