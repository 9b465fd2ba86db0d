"""An engine on a thread of its own that does not run ahead of the test that watches it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem_engine import AsyncLLM
from tandem_engine.engine import Engine


@asynccontextmanager
async def unhurried(llm: AsyncLLM) -> AsyncIterator[None]:
    """Within it the engine of `llm` rests after each step until the next call, or until its longest sleep is
    over: an output of a few hundred tokens outlasts whatever holds its reader up, and is cut off where it should be.
    """
    engine: Engine = await asyncio.wrap_future(llm._thread.call(lambda engine: engine))
    step = engine.step

    def one_step() -> bool:
        step()
        return False  # as if there were nothing to do at once

    engine.step = one_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]
