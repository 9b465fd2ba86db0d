"""Grammars for the scheduler: compiled by threads next to its loop, and cached.

    find     a grammar that is compiled already, or was rejected before     scheduler thread, at once
    compile  a future; a thread of the pool calls the backend               bounded by the backend's limits
    keep     the result, for the next request                               scheduler thread

When a future is done `fileno` becomes readable until the next `acknowledge`, so an idle loop need not poll for it.

`GrammarCache` has compiled grammars and rejections in two lists, each bounded and with the least recently used dropped
first: invalid grammars, however many, evict no valid one. It is in memory alone.
"""

import os
from collections import OrderedDict
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.thread_pools import started_pool
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.sampling.grammar.backend import CompiledGrammar, GrammarBackend

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


WORKERS = 2
"""Grammars compiled at a time: one that takes its whole limit does not hold up all others."""


class Grammars(Protocol):
    """What a scheduler asks about grammars. Its thread only."""

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """Raises `InvalidRequestError` for a grammar that is known to be wrong, or for all of them."""
        ...

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Raises nothing; the future may hold what `GrammarBackend.compile` raises."""
        ...

    def keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        """Remember a grammar."""
        ...

    def keep_refusal(self, spec: GrammarSpec, refusal: InvalidRequestError) -> None:
        """Remember that there is none."""
        ...

    def acknowledge(self) -> None:
        """Futures that are done by now have been seen, or will be in this turn."""
        ...


class NoGrammars:
    """Implements `Grammars` for an engine that has none: says why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        raise InvalidRequestError(f"{spec.kind} output is not available: {self._reason}", param="grammar")

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        raise AssertionError(f"a grammar of kind {spec.kind} was accepted by an engine without grammars")

    def keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        """Nothing is ever compiled."""

    def keep_refusal(self, spec: GrammarSpec, refusal: InvalidRequestError) -> None:
        """Everything is refused anyway."""

    def acknowledge(self) -> None:
        """Nothing is ever done."""

    def fileno(self) -> int | None:
        """Nothing is ever done."""
        return None

    def close(self) -> None:
        """Nothing runs."""


class GrammarCompiler:
    """Implements `Grammars` with a pool of threads around a backend."""

    def __init__(self, backend: GrammarBackend, *, cache_size: int) -> None:
        self._backend = backend
        self._cache = GrammarCache(cache_size)
        self._threads = started_pool(WORKERS, name="grammar")
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)
        self._woken = False
        self._closed = False

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        return self._cache.find(spec)

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        future = self._threads.submit(self._backend.compile, spec)
        future.add_done_callback(self._wake)
        return future

    def keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        self._cache.keep(spec, compiled)

    def keep_refusal(self, spec: GrammarSpec, refusal: InvalidRequestError) -> None:
        self._cache.keep_refusal(spec, refusal)

    def acknowledge(self) -> None:
        if not self._woken:
            return
        self._woken = False
        try:
            os.read(self._readable, 4096)
        except BlockingIOError:
            # An earlier call has read what this wake-up wrote.
            return

    def fileno(self) -> int:
        """Readable when a future has ended, other than by `cancel`, since the last `acknowledge`."""
        return self._readable

    def close(self) -> None:
        """Give up what is being compiled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._backend.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        os.close(self._readable)
        os.close(self._writable)

    def _wake(self, done: Future[CompiledGrammar]) -> None:
        if done.cancelled():
            return
        try:
            os.write(self._writable, b"\0")
        except BlockingIOError:
            # The pipe is full of unread wake-ups: the loop will check.
            return
        finally:
            # After the write: a flag without a byte costs one read, a byte without a flag would wake without end.
            self._woken = True
