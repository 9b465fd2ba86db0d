"""The embedding of one prompt, gathered over as many steps as its computation takes.

    positions   0 ······· start ─────── next ─────── stop
                          │ summed      │ wanted     │
    last   [prompt_len − 1, prompt_len)      mean   [0, prompt_len)      cls   [0, 1)

`next` only grows, by what has settled, and never goes back: a request that is put back and computed again asks for
the rest alone. Until all are there, the prefix cache must not hide the token at `next`; so `last` may use any
cached prefix, and `mean` only what it has summed itself.

A request for an embedding is an ordinary one that may generate one token. That token is dropped: it is how the
scheduler learns that the prompt is done.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tandem_engine.errors import InvalidRequestError
from tandem_engine.forward.pooled import PooledSum
from tandem_engine.messages.pooling import Pooling, PoolingParams
from tandem_engine.messages.requests import GenerateRequest


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
