"""Sampling parameters of a request. The gateway checks them, and the engine again."""

from collections.abc import Iterable, Sized
from operator import attrgetter

import msgspec

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.messages.grammar import GrammarSpec

FIELD = "thinking_token_budget"
"""What clients call it."""

MAX_MARKER_TOKENS = 16
MAX_BUDGET = 2**31 - 1


class ReasoningBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """After `tokens` tokens of reasoning the rest of the end marker is forced, and the answer follows."""

    tokens: int
    """Those of the end marker are not among them, nor is a begin marker that the model writes itself."""
    begin: tuple[int, ...]
    """Token ids of the marker by which an output begins to reason."""
    end: tuple[int, ...]
    """Token ids of the marker behind the reasoning."""
    opened: bool = False
    """The prompt ends inside the reasoning."""
    ended_by: tuple[int, ...] = ()
    """Tokens that end the reasoning without `end`, each of which begins what follows it, such as a tool call."""

    def check(self, *, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the limit and the value seen."""
        if not 0 <= self.tokens <= MAX_BUDGET:
            raise InvalidRequestError(f"{FIELD} must be between 0 and {MAX_BUDGET}, got {self.tokens}", param=FIELD)
        for name, marker in (("begin", self.begin), ("end", self.end)):
            if not 1 <= len(marker) <= MAX_MARKER_TOKENS:
                raise InvalidRequestError(
                    f"{FIELD}: the {name} marker must have 1 to {MAX_MARKER_TOKENS} tokens, it has {len(marker)}",
                    param=FIELD,
                )
            if not 0 <= min(marker) <= max(marker) < vocab_size:
                raise InvalidRequestError(
                    f"{FIELD}: the {name} marker has a token id outside 0 to {vocab_size - 1}", param=FIELD
                )
        if len(self.ended_by) > MAX_MARKER_TOKENS:
            raise InvalidRequestError(
                f"{FIELD}: at most {MAX_MARKER_TOKENS} tokens end the reasoning, got {len(self.ended_by)}", param=FIELD
            )
        if not all(0 <= token < vocab_size for token in self.ended_by):
            raise InvalidRequestError(
                f"{FIELD}: a token that ends the reasoning is outside 0 to {vocab_size - 1}", param=FIELD
            )


MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20

MAX_PROMPT_LOGPROBS = 2**18
"""Logprobs of one prompt: its tokens times the alternatives of each and one. They travel in one message."""

MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("temperature", 0.0, 2.0),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("seed", -(2**63), 2**63 - 1),
    ("logprob_start", 0, 2**31 - 1),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
"""Numbers that every request has: both ends are allowed."""
_ranged = attrgetter(*[name for name, _, _ in _RANGES])

GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: dividing logits by less overflows float32."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters with vLLM's names and meanings."""

    max_tokens: int
    """Upper bound on output tokens, those of a resumed attempt included."""
    min_tokens: int = 0
    """Stop ids and stop strings are suppressed until this many output tokens exist."""
    temperature: float = 1.0
    top_k: int = 0
    """0 (or −1 at the API) keeps the whole vocabulary."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Noise is a pure function of (seed, position); the gateway draws one when the client gives none."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. n: logprob of the sampled token and of the n most likely."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose logprobs are reported instead of those of the most likely; only with `logprobs`."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprob_start: int = 0
    """First prompt token that `prompt_logprobs` is wanted for. What predicts it and the rest is computed, whatever
    the prefix cache has [logprobs-past-cache]."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens once for each time they occur in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that occur in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing else may be sampled; () allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not occur in the output; one of a single id forbids that token. What the prompt
    ends with is no part of a sequence, as in vLLM."""
    grammar: GrammarSpec | None = None
    reasoning_budget: ReasoningBudget | None = None
    """With a `grammar` too, that begins behind the reasoning."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def penalized(self) -> bool:
        """Whether its logits depend on how often tokens occurred."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def recalls_tokens(self) -> bool:
        """Whether its logits depend on the tokens before, beside through the model."""
        return self.penalized or any(len(word) > 1 for word in self.bad_words)

    @property
    def edits_logits(self) -> bool:
        """Whether it changes its logits in every step. Stop ids below min_tokens are another matter."""
        return bool(self.penalized or self.logit_bias or self.allowed_token_ids or self.bad_words)

    @property
    def masked(self) -> bool:
        """Whether masks say which tokens may come next: those of a grammar, or of a reasoning budget."""
        return self.grammar is not None or self.reasoning_budget is not None

    def without_prompt_logprobs(self) -> "SamplingParams":
        """The same for a caller that has those of the prompt already."""
        return msgspec.structs.replace(self, prompt_logprobs=None, logprob_start=0)

    def check(self, *, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the field, the limit and the value seen."""
        for (name, low, high), value in zip(_RANGES, _ranged(self), strict=True):
            # `not (low <= value <= high)` also refuses NaN.
            if not low <= value <= high:
                raise _outside(name, value, low, high)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.logprob_token_ids:
            self._check_logprob_ids(vocab_size)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.logprob_start and self.prompt_logprobs is None:
            raise InvalidRequestError("logprob_start is only allowed with prompt_logprobs", param="logprob_start")
        if not 0.0 < self.repetition_penalty <= 2.0:
            raise InvalidRequestError(
                f"repetition_penalty must be above 0 and at most 2, got {self.repetition_penalty}",
                param="repetition_penalty",
            )
        if self.stop or self.stop_token_ids:
            self._check_stops(vocab_size)
        if self.logit_bias or self.allowed_token_ids or self.bad_words:
            self._check_token_lists(vocab_size)
        if self.grammar is not None:
            self.grammar.check()
        if self.reasoning_budget is not None:
            self.reasoning_budget.check(vocab_size=vocab_size)
            self._check_markers(self.reasoning_budget)

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise `InvalidRequestError` when logprobs are wanted that this prompt does not have, or too many
        [logprobs-bounded]."""
        if self.prompt_logprobs is None:
            return
        if self.logprob_start >= prompt_tokens:
            raise InvalidRequestError(
                f"logprob_start must be below the prompt's {prompt_tokens} tokens, got {self.logprob_start}",
                param="logprob_start",
            )
        wanted = (prompt_tokens - self.logprob_start) * (1 + self.prompt_logprobs)
        if wanted > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"prompt_logprobs={self.prompt_logprobs} for {prompt_tokens - self.logprob_start} tokens is {wanted} "
                f"logprobs, the limit is {MAX_PROMPT_LOGPROBS}; ask for fewer, or start later with logprob_start",
                param="prompt_logprobs",
            )

    def _check_logprob_ids(self, vocab_size: int) -> None:
        _at_most("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        _check_ids("logprob_token_ids", self.logprob_token_ids, vocab_size)
        if self.logprobs is None:
            raise InvalidRequestError("logprob_token_ids is only allowed with logprobs", param="logprob_token_ids")

    def _check_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop"
            )
        for text in self.stop:
            if not text or len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise InvalidRequestError(f"each stop string must have 1 to {MAX_STOP_BYTES} bytes", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
                param="stop_token_ids",
            )
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)

    def _check_token_lists(self, vocab_size: int) -> None:
        _at_most("logit_bias", self.logit_bias, MAX_LOGIT_BIASES)
        _check_ids("logit_bias", [token for token, _ in self.logit_bias], vocab_size)
        for _, bias in self.logit_bias:
            _within("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequestError("logit_bias names a token more than once", param="logit_bias")
        _at_most("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _at_most("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError(
                    f"each of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens, one has {len(word)}",
                    param="bad_words",
                )
            _check_ids("bad_words", word, vocab_size)
        if self.allowed_token_ids:
            self._check_against_allowed({*self.allowed_token_ids})

    def _check_markers(self, budget: ReasoningBudget) -> None:
        """No rule may forbid what has to be forced."""
        end = {*budget.end}
        if self.allowed_token_ids and not end <= {*self.allowed_token_ids}:
            raise InvalidRequestError(
                f"allowed_token_ids must have the tokens that end the reasoning, {sorted(end)}, together with {FIELD}",
                param="allowed_token_ids",
            )
        forbidden = next((word for word in self.bad_words if word[-1] in end), None)
        if forbidden is not None:
            raise InvalidRequestError(
                f"bad_words forbids token {forbidden[-1]}, which ends the reasoning, together with {FIELD}",
                param="bad_words",
            )
        if self.min_tokens and not end.isdisjoint(self.stop_token_ids):
            raise InvalidRequestError(
                f"stop_token_ids has a token that ends the reasoning: not together with min_tokens and {FIELD}",
                param="stop_token_ids",
            )

    def _check_against_allowed(self, allowed: set[int]) -> None:
        lost = next((token for token, bias in self.logit_bias if bias > 0 and token not in allowed), None)
        if lost is not None:
            raise InvalidRequestError(
                f"logit_bias favors token {lost}, which allowed_token_ids does not have", param="allowed_token_ids"
            )
        if allowed <= {word[0] for word in self.bad_words if len(word) == 1}:
            raise InvalidRequestError("bad_words forbids every one of allowed_token_ids", param="allowed_token_ids")
        if allowed <= {token for token, bias in self.logit_bias if bias == -MAX_LOGIT_BIAS}:
            raise InvalidRequestError(
                f"logit_bias bans every one of allowed_token_ids by {-MAX_LOGIT_BIAS}", param="allowed_token_ids"
            )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        _within(name, token, 0, vocab_size - 1)


def _at_most(name: str, values: Sized, limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequestError(f"{name} takes at most {limit} entries, got {len(values)}", param=name)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _outside(name, value, low, high)


def _outside(name: str, value: float, low: float, high: float) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", param=name)
