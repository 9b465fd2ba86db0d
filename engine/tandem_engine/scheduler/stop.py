"""Where an output ends.

One function cuts a run of new tokens at its first end; ordinary decoding is a run of length one. The cut applies to
ids, logprobs, text and usage [one-cut], and the earliest position in the run wins whatever its reason [earliest-stop].

At one position the order is: EOS, stop ids, stop strings, then length. So a stop string that completes with the last
allowed token ends the output as `stop` and is cut from the text; it would reach the client if length had precedence.

A token that ends the output belongs to it: it is streamed and counted. The detokenizer cuts the text at
`Finish.matched_stop`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Limits that admission checks and tokens that end an output."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    context_length: int
    """Longest prompt + output of one request, in tokens."""
    hidden_size: int = 0
    """Size of embeddings; 0 when the model gives none."""
    adapter_slots: Mapping[bytes, int] = field(default_factory=dict)
    """Of the adapters that are loaded, by digest. It may change between two steps."""


DecodeText: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids → text. Called with a short window of output tokens, never with a whole output."""

CONTEXT_TOKENS = 4
"""Tokens decoded ahead of a stop-string window: a window may start inside a character."""


class Cut(NamedTuple):
    """`keep` tokens of the run belong to the output; `finish` is set if the last of them ends it."""

    keep: int
    finish: Finish | None


class PlainEnd(NamedTuple):
    """When a request ends that ends by a single token or by its length alone, as most do."""

    token_ids: frozenset[int]
    """Tokens that may end it; min_tokens is not looked at."""
    limit: int
    """Output tokens at which its length ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Stop conditions of every request on this engine."""

    model: ModelFacts
    decode_text: DecodeText | None = None

    def cut_at_stop(
        self, sampling: SamplingParams, *, prompt_len: int, outputs: Sequence[int], run: Sequence[int]
    ) -> Cut:
        """Cut `run`, the tokens sampled after `outputs`, after the first token that ends the output."""
        for keep, token in enumerate(run, start=1):
            finish = self._end_at(sampling, prompt_len, len(outputs) + keep, token)
            if sampling.stop and (finish is None or finish.reason is FinishReason.LENGTH):
                finish = self._stop_string(sampling, outputs, run[:keep]) or finish
            if finish is not None:
                return Cut(keep=keep, finish=finish)
        return Cut(keep=len(run), finish=None)

    def plain_end(self, sampling: SamplingParams, *, prompt_len: int) -> PlainEnd | None:
        """The ends that need no text: a token that is none of them is not cut. None with stop strings."""
        if sampling.stop:
            return None
        eos = frozenset[int]() if sampling.ignore_eos else self.model.eos_token_ids
        return PlainEnd(
            token_ids=eos.union(sampling.stop_token_ids),
            limit=min(sampling.max_tokens, self.model.context_length - prompt_len),
        )

    def suppressed(self, sampling: SamplingParams, generated: int) -> tuple[int, ...]:
        """Ids that may not be sampled after `generated` output tokens: those that stop, below min_tokens."""
        if generated >= sampling.min_tokens:
            return ()
        eos = () if sampling.ignore_eos else self.model.eos_token_ids
        return tuple(sorted({*eos, *sampling.stop_token_ids}))

    def _end_at(self, sampling: SamplingParams, prompt_len: int, generated: int, token: int) -> Finish | None:
        """End by the `generated`-th output token alone."""
        if generated > sampling.min_tokens:
            if token in self.model.eos_token_ids and not sampling.ignore_eos:
                return Finish(reason=FinishReason.STOP)
            if token in sampling.stop_token_ids:
                return Finish(reason=FinishReason.STOP, matched_stop=token)
        if generated >= sampling.max_tokens or prompt_len + generated >= self.model.context_length:
            return Finish(reason=FinishReason.LENGTH)
        return None

    def _stop_string(self, sampling: SamplingParams, outputs: Sequence[int], run: Sequence[int]) -> Finish | None:
        """End by a stop string that the last token of `run` completes.

        Every token but the last of `run` was checked before, so the window need not be longer than the
        longest stop string, at no less than one byte per token, and the run [stop-window].
        """
        if len(outputs) + len(run) <= sampling.min_tokens:
            return None
        assert self.decode_text is not None, "admission refuses stop strings without a tokenizer"
        longest = max(len(text.encode("utf-8", "surrogatepass")) for text in sampling.stop)
        width = longest + len(run) + CONTEXT_TOKENS
        window = [*outputs[-width:], *run][-width:]
        text = self.decode_text(window)
        matches = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        if not matches:
            return None
        seen = len(self.decode_text(window[:-1]).rstrip("\N{REPLACEMENT CHARACTER}"))
        fresh = [(at, stop) for at, stop in matches if text.rfind(stop) + len(stop) > seen]
        return Finish(reason=FinishReason.STOP, matched_stop=min(fresh)[1]) if fresh else None
