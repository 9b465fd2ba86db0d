"""What a grammar library has to do, whichever it is.

    GrammarBackend ──compile──▶ CompiledGrammar ──matcher──▶ Matcher, one per output

    compile    any thread of the compiler, may block; bounded in time and memory by the implementation
    matcher    scheduler thread, cheap: compiled grammars are shared, matchers are not
    Matcher    one thread at a time: the scheduler's

A matcher is a function of the tokens it has accepted, so it can be rebuilt anywhere by replaying them: after a
resumption, a handoff, or never, since retraction does not touch it.
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
        """Why this output cannot go on: no token fits, or a step's limit was hit. Found by `fill`; final."""
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
        """Let go of processes; `compile` calls under way fail. Idempotent."""
        ...
