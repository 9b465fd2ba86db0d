"""Wait for a condition with a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

POLL_S = 0.02
T = TypeVar("T")


def wait_for(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = str) -> None:
    """Poll `condition`. Raises `AssertionError` with `explain()` when it is not true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {explain()}"
        time.sleep(POLL_S)


def wait_equal(read: Callable[[], T], expected: T, timeout_s: float, explain: Callable[[], str] = str) -> None:
    """Poll `read` until it returns `expected`. Raises `AssertionError` with the last value and `explain()`."""
    deadline = time.monotonic() + timeout_s
    while (value := read()) != expected:
        assert time.monotonic() < deadline, f"{value!r}, not {expected!r} within {timeout_s:g} s: {explain()}"
        time.sleep(POLL_S)


async def until(
    condition: Callable[[], Awaitable[bool] | bool], timeout_s: float, what: str, explain: Callable[[], object] = str
) -> None:
    """Poll a plain or an async condition. Raises `AssertionError` with `what` and `explain()` when it is late."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what} {explain()}"
        await asyncio.sleep(POLL_S)
