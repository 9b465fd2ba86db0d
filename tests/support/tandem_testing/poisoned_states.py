"""States and pages of NaN: whatever is read before it is written makes a request compute NaN.

For engines that compute and copy in the scheduler's thread: elsewhere a queued copy may still read what is free.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from torch import Tensor

from tandem_engine.engine import Engine
from tandem_engine.memory.kv_memory import KvMemory

POISON = 0xFF


@contextmanager
def poisoned_states(*engines: Engine) -> Iterator[None]:
    """In this context every row that one of `engines` gives to a request has such a state."""
    with pytest.MonkeyPatch.context() as patch:
        for engine in engines:
            _poison(patch, engine.memory.rows, "alloc", _states_of(engine))
        yield


@contextmanager
def poisoned_memory(*engines: Engine) -> Iterator[None]:
    """As `poisoned_states`, and the same of pages and anchors on the device and of pages in host memory."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(
                poisoned(engine.memory, pages=engine._parts.pool.bytes_view(), states=_states_of(engine))
            )
        yield


@contextmanager
def poisoned(memory: KvMemory, *, pages: Tensor, states: Tensor | None = None) -> Iterator[None]:
    """Whatever `memory` gives out of `pages`, `states` and its host memory is filled first."""
    with pytest.MonkeyPatch.context() as patch:
        _poison(patch, memory.allocator, "alloc", pages)
        if states is not None:
            _poison(patch, memory.rows, "alloc", states)
        if states is not None and memory.anchors is not None:
            _poison(patch, memory.anchors, "take", states)
        if memory.host is not None:
            _poison(patch, memory.host.tier.pages, "_take", memory.host.pool.bytes_view())
        yield


def _states_of(engine: Engine) -> Tensor:
    states = engine._parts.pools.states
    assert states is not None, "a model without states"
    return states.bytes_view()


def _poison(patch: pytest.MonkeyPatch, owner: object, name: str, memory: Tensor) -> None:
    """Have method `name` of `owner` fill what it gives of `memory`."""
    take: Callable[..., int | Sequence[int] | None] = getattr(owner, name)

    def filled(*args: Any, **options: Any) -> int | Sequence[int] | None:
        taken = take(*args, **options)
        for each in () if taken is None else [taken] if isinstance(taken, int) else taken:
            memory[each].fill_(POISON)
        return taken

    patch.setattr(owner, name, filled)
