"""Orders the output of one choice into a sequence without gaps, in whatever order and however often parts arrive.

Prefill and decode worker both send the first token, on two connections, and a retry starts where the last attempt
ended. A position is accepted once, and only after all positions before it [position-once]: no token is missing or
duplicated.

Requested prompt logprobs precede the first token. Only the prefill worker sends them, so earlier tokens of the decode
worker wait for them as for a missing position.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

from tandem_engine.messages.outputs import Finish, TokenLogprob, TokenOutput

MAX_WAITING_OUTPUTS = 256
"""Outputs that may wait for an earlier one. Only the first token can be late, so more means one was lost."""


class Accepted(NamedTuple):
    """New tokens in order. `logprobs` is empty when the request had none."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish: Finish | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """With the first tokens, when they were awaited."""
    embedding: bytes | None = None
    """With the finish of a request for one."""


Consume: TypeAlias = Callable[[Accepted], Awaitable[bool]]
"""Takes new tokens of a choice. True: it needs no more."""


class SequenceGapError(Exception):
    """An output was lost: later ones pile up after a missing position."""


class TokenSequence:
    """Accepts outputs from position `start` on."""

    __slots__ = ("_next", "_waiting", "awaits_prompt")

    def __init__(self, start: int, *, awaits_prompt: bool = False) -> None:
        self._next = start
        self.awaits_prompt = awaits_prompt
        """No prompt logprobs have come yet, and nothing is accepted without them."""
        self._waiting: dict[int, TokenOutput] = {}

    @property
    def has_gap(self) -> bool:
        return bool(self._waiting)

    def accept_next(self, output: TokenOutput) -> bool:
        """Accept all tokens of `output` if they follow directly on those accepted so far. False, and nothing accepted,
        if not."""
        if output.index != self._next or self._waiting or self.awaits_prompt:
            return False
        self._next += len(output.token_ids)
        return True

    def accept(self, output: TokenOutput, into: Accepted) -> Accepted:
        """`into` with what `output` adds, and what had been waiting for it. Raises `SequenceGapError`."""
        if self.awaits_prompt and output.prompt_logprobs is not None:
            self.awaits_prompt = False
            into = into._replace(prompt_logprobs=output.prompt_logprobs)
        if self.awaits_prompt or output.index > self._next:
            self._keep_for_later(output)
            return into
        into = self._append(output, into)
        while self._waiting and into.finish is None:
            ready = next((index for index in self._waiting if index <= self._next), None)
            if ready is None:
                break
            into = self._append(self._waiting.pop(ready), into)
        return into

    def _append(self, output: TokenOutput, into: Accepted) -> Accepted:
        end = output.index + len(output.token_ids)
        if end < self._next:
            return into
        known = self._next - output.index
        if not (known or into.token_ids or into.embedding) and output.logprobs is None:
            # As nearly all are: alone, and new.
            self._next = end
            return Accepted([*output.token_ids], into.logprobs, output.finish, into.prompt_logprobs, output.embedding)
        into.token_ids.extend(output.token_ids[known:])
        if output.logprobs is not None:
            into.logprobs.extend(output.logprobs[known:])
        self._next = end
        if output.embedding is not None:
            into = into._replace(embedding=output.embedding)
        return into if output.finish is None else into._replace(finish=output.finish)

    def _keep_for_later(self, output: TokenOutput) -> None:
        if len(self._waiting) >= MAX_WAITING_OUTPUTS:
            raise SequenceGapError(f"{len(self._waiting)} outputs wait for position {self._next}")
        longest = self._waiting.get(output.index)
        if longest is None or len(output.token_ids) >= len(longest.token_ids):
            self._waiting[output.index] = output
