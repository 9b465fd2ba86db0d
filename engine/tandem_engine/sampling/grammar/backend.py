"""The interface of a grammar library.

    GrammarBackend ──compile──▶ CompiledGrammar ──matcher──▶ Matcher, one per output

    compile    any thread of the compiler, may block; bounded in time and memory by the implementation
    matcher    scheduler thread, cheap: compiled grammars are shared, matchers are not
    Matcher    one thread at a time: the scheduler's

A matcher is a function of the tokens it has accepted, so it can be rebuilt anywhere by replaying them, as after a
resumption or a handoff. Retraction does not affect it.

`masks_for_run` gives the masks for a run of drafts. Verification samples after each draft, as if there were none.
Position i has the mask that follows the first i drafts, so the matcher advances along the run and rolls back: only
settlement advances it for good.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tandem_engine.messages.grammar import GrammarSpec

Bits: TypeAlias = npt.NDArray[np.int32]
"""Packed token masks: bit t % 32 of word t // 32 says whether token t may come next."""


class Matcher(Protocol):
    """Where one output stands in its grammar. Prompt tokens are never shown to it."""

    @property
    def ended(self) -> bool:
        """The grammar is satisfied and nothing may follow: its last token or an EOS was accepted."""
        ...

    @property
    def problem(self) -> str | None:
        """Why this output cannot continue: no token fits, or a step's limit was hit. Found by `fill`; final."""
        ...

    def accept(self, tokens: Sequence[int]) -> int:
        """Advance over `tokens` up to the first that does not fit, or to the end; returns how many were taken."""
        ...

    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` accepted ones, an end that they brought included."""
        ...

    def fill(self, row: Bits) -> None:
        """Write which tokens may come next to `row` [words]. Look at `ended` and `problem` afterwards."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that any number of outputs can follow."""

    @property
    def words(self) -> int:
        """Length of a mask in int32 words: the vocabulary, rounded up."""
        ...

    def matcher(self) -> Matcher:
        """A matcher that has seen nothing."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Called by several threads at once.

        Raises:
            InvalidRequestError: the grammar is wrong, matches nothing, or costs more than a limit, which is named.
            EngineError: it could not be compiled for a reason of ours; another attempt may work.
        """
        ...

    def close(self) -> None:
        """Release processes; `compile` calls in progress fail. Idempotent."""
        ...


def masks_for_run(matcher: Matcher, draft_tokens: Sequence[int], bits: Bits) -> int:
    """Write the masks of a run behind what `matcher` has accepted.

    Args:
        matcher: is left as it was, unless it comes back with a `problem`: then it is of no use any more.
        draft_tokens: k drafts.
        bits: [k + 1, words], row i for the token after the first i drafts.

    Returns:
        How many rows were written. The drafts behind them cannot be accepted: the one before does not fit, or ended
        the output, or led to a problem. Rows from there on are left alone; a verifier goes by positions and never by
        what a row looks like [mask-per-row]. 0 when the problem is with the first position, where no draft is involved.
    """
    matcher.fill(bits[0])
    accepted = 0
    for token in draft_tokens:
        if matcher.problem is not None or matcher.ended or not matcher.accept((token,)):
            break
        accepted += 1
        if not matcher.ended:
            matcher.fill(bits[accepted])
    written = accepted + (matcher.problem is None and not (accepted and matcher.ended))
    if matcher.problem is None:
        matcher.rollback(accepted)
    return written
