"""Compiled grammars that are kept, and refusals that are remembered.

Two lists, each bounded and least recently used first to go: however many wrong grammars come, they push out none
that works. In memory alone; nothing is written anywhere.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

from tandem_engine.errors import InvalidRequestError
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.sampling.grammar.backend import CompiledGrammar

T = TypeVar("T")


class GrammarCache:
    """Keyed by the whole specification. One thread."""

    def __init__(self, size: int) -> None:
        """`size`: grammars kept, and as many refusals."""
        self._compiled: _Recent[CompiledGrammar] = _Recent(size)
        self._refused: _Recent[InvalidRequestError] = _Recent(size)

    def __len__(self) -> int:
        return len(self._compiled) + len(self._refused)

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """The compiled grammar, None if it is not here. Raises `InvalidRequestError` if it was refused before."""
        refusal = self._refused.get(spec)
        if refusal is not None:
            raise InvalidRequestError(str(refusal), param=refusal.param)
        return self._compiled.get(spec)

    def keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        self._compiled.put(spec, compiled)

    def keep_refusal(self, spec: GrammarSpec, refusal: InvalidRequestError) -> None:
        # Its traceback would keep the frames it went through.
        self._refused.put(spec, refusal.with_traceback(None))


class _Recent(Generic[T]):
    """The `size` most recently used entries."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[GrammarSpec, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, spec: GrammarSpec) -> T | None:
        entry = self._entries.get(spec)
        if entry is not None:
            self._entries.move_to_end(spec)
        return entry

    def put(self, spec: GrammarSpec, entry: T) -> None:
        self._entries[spec] = entry
        self._entries.move_to_end(spec)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
