"""The clock of an event loop, which a test sets forward instead of waiting for a timer.

`asyncio.sleep`, `asyncio.timeout` and `call_later` go by it. What is due by then is done in the loop's next turns; a
thread that gets no processor for seconds changes nothing. The product's own clocks (`tandem_engine.base.clock`) stay
right.
"""

import asyncio
from collections.abc import Callable

TURNS = 20
"""Of the loop, in which each woken task sets its next timer."""


def set_forward(seconds: float) -> None:
    """Timers of the running loop that would run out within so many seconds run out now."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def set_forward_until(condition: Callable[[], bool], *, step_s: float, steps: int) -> None:
    """Let so many steps of time pass, each at once, until `condition` is true. Raises `AssertionError` if it is not."""
    for _ in range(steps):
        set_forward(step_s)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if condition():
            return
    raise AssertionError(f"not after {steps} times {step_s:g} s")
