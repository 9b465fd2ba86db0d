"""Sampling parameters of library callers: friendly types and defaults, and their conversion to the wire's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.messages import sampling as wire
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.messages.sampling import FIELD, ReasoningBudget
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer

MAX_CHOICES = 128

_PROMPT_END_TOKENS = 32
"""Enough to hold a reasoning marker and the blanks behind it, whatever the tokenizer."""

_SEEDS = 1 << 64
_LOWEST_SEED = -(1 << 63)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters with vLLM's names, meanings and defaults.

    Checked when a request is made of them: `InvalidRequestError` names the field, the limit and the value.
    """

    n: int = 1
    """Outputs per prompt. The prompt is computed once for all."""
    best_of: int | None = None
    """Generate so many and return the `n` with the highest mean logprob."""
    max_tokens: int | None = 16
    """Most output tokens; None for all that the context has room for. 0 computes and caches the prompt alone."""
    min_tokens: int = 0
    """EOS, stop ids and stop strings count only after so many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Equal seeds give equal outputs, whatever else runs; None draws one. Choice i has seed + i."""
    stop: str | Sequence[str] = ()
    """Texts that end the output, and are not part of it."""
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Logprobs of the sampled token and of the so many likeliest."""
    logprob_token_ids: Sequence[int] = ()
    """Tokens whose logprobs are wanted instead of those of the likeliest; only with `logprobs`."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] = ()
    """Nothing else is sampled; () allows all."""
    bad_words: Sequence[str] = ()
    """Words that do not occur in the output."""
    grammar: GrammarSpec | None = None
    """What the output has to look like."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; then its end is forced and the answer follows, in the `grammar` if there is one."""
    reasoning_markers: tuple[str, str] = ("<think>", "</think>")
    """What reasoning stands between. Only with `thinking_token_budget`."""

    @property
    def generated(self) -> int:
        """Outputs that are computed per prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def generates(self) -> bool:
        """False: the prompt is computed and cached, and the output stays empty."""
        return self.max_tokens != 0

    def check_counts(self) -> None:
        """Raise `InvalidRequestError` for an `n`, `best_of` or `min_tokens` that cannot be."""
        if not self.generates and self.min_tokens:
            raise InvalidRequestError(
                f"min_tokens must be 0 with max_tokens 0, got {self.min_tokens}", param="min_tokens"
            )
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequestError(f"n must be between 1 and {MAX_CHOICES}, got {self.n}", param="n")
        if not self.n <= self.generated <= MAX_CHOICES:
            raise InvalidRequestError(
                f"best_of must be between n={self.n} and {MAX_CHOICES}, got {self.best_of}", param="best_of"
            )

    def of_choice(
        self, index: int, *, seed: int, room: int, text: TextTokenizer | None, prompt: Sequence[int]
    ) -> wire.SamplingParams:
        """The engine's parameters for choice `index`.

        Args:
            seed: of choice 0.
            room: tokens that the context has left after the prompt.
            text: needed for `bad_words` and `thinking_token_budget` alone.
            prompt: its token ids.
        """
        logprobs = 0 if self.logprobs is None and self.generated > self.n else self.logprobs
        return wire.SamplingParams(
            max_tokens=self._max_tokens(room),
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0) if self.top_k == -1 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=(seed + index - _LOWEST_SEED) % _SEEDS + _LOWEST_SEED,
            stop_token_ids=tuple(self.stop_token_ids),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids),
            # They are the same for every choice.
            prompt_logprobs=self.prompt_logprobs if index == 0 else None,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            allowed_token_ids=tuple(self.allowed_token_ids),
            bad_words=_bad_words(self.bad_words, text),
            grammar=self.grammar,
            reasoning_budget=self._budget(prompt, text),
        )

    def _max_tokens(self, room: int) -> int:
        if self.max_tokens is None:
            return max(1, room)
        # The engine is done with a prompt when it has sampled a token, which is dropped.
        return self.max_tokens if self.generates else 1

    def _budget(self, prompt: Sequence[int], text: TextTokenizer | None) -> ReasoningBudget | None:
        if self.thinking_token_budget is None:
            return None
        if text is None:
            raise InvalidRequestError(f"{FIELD} needs a tokenizer and this model has none", param=FIELD)
        begin, end = (tuple(text.encode(marker, add_special_tokens=False)) for marker in self.reasoning_markers)
        prompt_end = text.vocabulary.decode(prompt[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        opened = prompt_end.rstrip().endswith(self.reasoning_markers[0])
        return ReasoningBudget(tokens=self.thinking_token_budget, begin=begin, end=end, opened=opened)


def _bad_words(words: Sequence[str], text: TextTokenizer | None) -> tuple[tuple[int, ...], ...]:
    """A word's tokens at the start of a text, and after a space where those differ."""
    if not words:
        return ()
    if text is None:
        raise InvalidRequestError("bad_words need a tokenizer and this model has none", param="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise InvalidRequestError("each of bad_words must have a character that is no space", param="bad_words")
        first, spaced = (tuple(text.encode(each, add_special_tokens=False)) for each in (bare, f" {bare}"))
        sequences[first] = None
        if spaced[-len(first) :] != first:
            sequences[spaced] = None
    return tuple(sequences)
