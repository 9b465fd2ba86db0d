"""Logprobs of one prompt, gathered over as many steps as its computation takes [logprobs-through-chunks].

    positions   0 ······· start ─────── next ─────── stop = prompt_len
                          │ collected   │ wanted     │
    a step that computes tokens [a, b) yields positions [a + 1, b + 1): each token predicts the one after it

`next` only grows, by what has settled, and never goes back: a request that is put back and computed again asks for
the rest alone. Until all are there, the prefix cache must not hide the token before `next` [logprobs-past-cache].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.messages.outputs import TokenLogprob
from tandem_engine.messages.sampling import SamplingParams


@dataclass(kw_only=True, slots=True)
class PromptLogprobs:
    """Owned by a request that wants them and whose prompt is computed here."""

    start: int
    stop: int
    top: int
    """Alternatives wanted with each."""
    collected: list[TokenLogprob | None] = field(default_factory=list)
    """Of positions [start, next)."""

    @staticmethod
    def wanted_by(sampling: SamplingParams, prompt_len: int) -> "PromptLogprobs | None":
        """An empty collection, None when nothing is wanted. Nothing predicts position 0: its entry is None."""
        if sampling.prompt_logprobs is None:
            return None
        return PromptLogprobs(
            start=sampling.logprob_start,
            stop=prompt_len,
            top=sampling.prompt_logprobs,
            collected=[] if sampling.logprob_start else [None],
        )

    @property
    def next(self) -> int:
        """First position that is missing."""
        return self.start + len(self.collected)

    @property
    def begun(self) -> bool:
        """Whether a model has scored anything."""
        return self.next > max(self.start, 1)

    @property
    def complete(self) -> bool:
        return self.next >= self.stop

    @property
    def longest_match(self) -> int | None:
        """Cached tokens that may be used; None for any number."""
        return None if self.complete else self.next - 1

    def positions(self, start: int, stop: int) -> range:
        """What a step that computes tokens [start, stop) yields. Empty when it is not wanted."""
        return range(max(start + 1, self.next), min(stop + 1, self.stop))

    def take(self, first: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Add those of positions [first, first + len(logprobs))."""
        assert first == self.next, f"prompt logprobs from position {first}, {self.next} is next"
        assert first + len(logprobs) <= self.stop, f"{len(logprobs)} from {first} pass the end at {self.stop}"
        self.collected += logprobs
