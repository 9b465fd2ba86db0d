"""Results of a prompt that takes several steps to compute: its embedding, and its logprobs.

    positions   0 ······· start ─────── next ─────── stop
                          │ collected   │ wanted     │

    embedding   last   [prompt_len − 1, prompt_len)      mean   [0, prompt_len)      cls   [0, 1)
    logprobs    stop = prompt_len. A step that computes tokens [a, b) yields positions [a + 1, b + 1): each token
                predicts the one after it [logprobs-through-chunks]

`next` only grows, by completed steps: a request that is put back and recomputed collects only the rest. Until all
positions are there, the prefix cache must not skip computing what the next one needs: the token at `next` for an
embedding, the token before it for logprobs [logprobs-past-cache]. So `last` may use any cached prefix, and `mean` only
the part that it has summed.

A request for an embedding is an ordinary one that may generate one token. The token is dropped: it signals to the
scheduler that the prompt is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.forward.results import PooledSum
from tandem_engine.messages.outputs import TokenLogprob
from tandem_engine.messages.requests import GenerateRequest, Pooling, PoolingParams
from tandem_engine.messages.sampling import SamplingParams


@dataclass(kw_only=True, slots=True)
class PooledPrompt:
    """Owned by a request for an embedding."""

    params: PoolingParams
    start: int
    stop: int
    next: int
    """First position that is missing."""
    total: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    """[hidden_size] sum over [start, next)."""

    @staticmethod
    def wanted_by(params: PoolingParams | None, prompt_len: int) -> "PooledPrompt | None":
        """An empty sum, None when no embedding is wanted."""
        if params is None:
            return None
        start = prompt_len - 1 if params.pooling is Pooling.LAST else 0
        stop = 1 if params.pooling is Pooling.CLS else prompt_len
        return PooledPrompt(params=params, start=start, stop=stop, next=start)

    @property
    def begun(self) -> bool:
        """Whether a hidden state is in the sum."""
        return self.next > self.start

    @property
    def complete(self) -> bool:
        return self.next >= self.stop

    @property
    def longest_match(self) -> int | None:
        """Cached tokens that may be used; None for any number."""
        return None if self.complete else self.next

    def positions(self, start: int, stop: int) -> range:
        """Which of the tokens [start, stop) of a step are wanted."""
        return range(max(start, self.next), min(stop, self.stop))

    def take(self, pooled: PooledSum) -> None:
        """Add the sum over positions [pooled.first, pooled.first + pooled.count)."""
        assert pooled.first == self.next, f"hidden states from position {pooled.first}, {self.next} is next"
        self.total = self.total + pooled.total.numpy()
        self.next += pooled.count

    def embedding(self) -> bytes:
        """The vector as little-endian float32. Only when complete."""
        assert self.complete, f"an embedding without the hidden states from position {self.next}"
        vector = (self.total / (self.stop - self.start))[: self.params.dimensions]
        if self.params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), float(np.finfo(np.float32).tiny))
        return vector.astype("<f4").tobytes()


def check_pooling(message: GenerateRequest, *, hidden_size: int) -> None:
    """Raise `InvalidRequestError` for a request for an embedding that cannot be one."""
    if message.pooling is None:
        return
    message.pooling.check(hidden_size=hidden_size)
    if message.sampling.max_tokens != 1 or message.resume_ids:
        raise InvalidRequestError("a request for an embedding has max_tokens 1 and no resume_ids", param="pooling")
    if message.session is not None:
        raise InvalidRequestError("an embedding is computed from one prompt and continues no session", param="session")
    if message.handoff is not None:
        raise InvalidRequestError("an embedding is computed by one worker alone, without a handoff", param="handoff")


@dataclass(kw_only=True, slots=True)
class PromptLogprobs:
    """Owned by a request with prompt logprobs whose prompt is computed here."""

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
