"""How a request wants its tokens chosen. Checked at the gateway and again by the engine."""

import msgspec

from tandem_engine.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
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

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    def check(self, *, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the field, the limit and the value seen."""
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
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
        for token in self.stop_token_ids:
            _within("stop_token_ids", token, 0, vocab_size - 1)


def _within(name: str, value: float, low: float, high: float) -> None:
    # `not (low <= value <= high)` also refuses NaN.
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", param=name)
