"""Wait for a condition with a deadline.

A condition that takes long to read, as the state of a whole fleet, is read less often: a wait for processes to start
must leave them the cores.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

POLL_S = 0.02
MAX_POLL_S = 0.5
REST = 4
"""Times as long as the last look took."""
T = TypeVar("T")


class _Looks:
    """The looks of one wait: until when, and the rest between two of them."""

    def __init__(self, timeout_s: float) -> None:
        self._since = time.monotonic()
        self._deadline = self._since + timeout_s

    @property
    def late(self) -> bool:
        return time.monotonic() >= self._deadline

    def rest(self) -> None:
        time.sleep(self._rest_s())
        self._since = time.monotonic()

    async def rest_async(self) -> None:
        await asyncio.sleep(self._rest_s())
        self._since = time.monotonic()

    def _rest_s(self) -> float:
        took = time.monotonic() - self._since
        return min(max(POLL_S, REST * took), MAX_POLL_S)


def wait_for(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = str) -> None:
    """Poll `condition`. Raises `AssertionError` with `explain()` when it is not true in time."""
    looks = _Looks(timeout_s)
    while not condition():
        assert not looks.late, f"not within {timeout_s:g} s: {explain()}"
        looks.rest()


def wait_equal(read: Callable[[], T], expected: T, timeout_s: float, explain: Callable[[], str] = str) -> None:
    """Poll `read` until it returns `expected`. Raises `AssertionError` with the last value and `explain()`."""
    looks = _Looks(timeout_s)
    while (value := read()) != expected:
        assert not looks.late, f"{value!r}, not {expected!r} within {timeout_s:g} s: {explain()}"
        looks.rest()


async def until(
    condition: Callable[[], Awaitable[bool] | bool], timeout_s: float, what: str, explain: Callable[[], object] = str
) -> None:
    """Poll a plain or an async condition. Raises `AssertionError` with `what` and `explain()` when it is late."""
    looks = _Looks(timeout_s)
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert not looks.late, f"not within {timeout_s:g} s: {what} {explain()}"
        await looks.rest_async()
