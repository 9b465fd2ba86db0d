"""Rows with a state of NaN: a request that reads its row before it writes it computes NaN.

For engines that compute and copy in the scheduler's thread: elsewhere a queued copy may still read a row that is free.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem_engine.base.names import ReqPoolIdx
from tandem_engine.engine import Engine


@contextmanager
def poisoned_states(*engines: Engine) -> Iterator[None]:
    """In this context every row that one of `engines` gives to a request has such a state."""
    with pytest.MonkeyPatch.context() as patch:
        for engine in engines:
            _poison(engine, patch)
        yield


def _poison(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    states, rows = engine._parts.pools.states, engine.memory.rows
    assert states is not None, "a model without states"
    alloc, slots = rows.alloc, states.bytes_view()

    def poisoned() -> ReqPoolIdx | None:
        row = alloc()
        if row is not None:
            slots[row].fill_(0xFF)
        return row

    patch.setattr(rows, "alloc", poisoned)
