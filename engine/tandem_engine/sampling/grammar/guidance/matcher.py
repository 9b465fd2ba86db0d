"""llguidance's matcher behind ours.

llguidance knows two ends. After a token behind which its grammar allows nothing it stops at once; where the
output may end or go on, it allows EOS and stops when that was accepted. It also stops, with an error, when a step
hits a limit or no token fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from tandem_engine.sampling.grammar.backend import Bits, Matcher


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceGrammar:
    """Implements `CompiledGrammar`: a matcher that is only ever copied."""

    prototype: LLMatcher
    words: int

    def matcher(self) -> Matcher:
        return GuidanceMatcher(self.prototype.deep_copy())


class GuidanceMatcher:
    """Implements `Matcher`."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def problem(self) -> str | None:
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else None

    def accept(self, tokens: Sequence[int]) -> int:
        return self._matcher.try_consume_tokens([*tokens])

    def rollback(self, tokens: int) -> None:
        if tokens:
            done = self._matcher.rollback(tokens)
            assert done, f"rollback of {tokens} tokens: {self._matcher.get_error()}"

    def fill(self, row: Bits) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
