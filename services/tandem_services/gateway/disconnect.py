"""Work that ends when its client goes away.

Starlette cancels nothing when a client disconnects, so every request is run beside a watcher of its
connection. Cancelling the work runs its `finally` blocks, which abort the request on every worker.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


async def run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What `work` returns at its end. Raises `ClientGoneError`, after `work` was cancelled, when the client goes first.

    The request body must have been read: what `receive` yields next is the disconnect.
    """
    job = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((job, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientGoneError
        return job.result()
    finally:
        watcher.cancel()
        if not job.done():
            job.cancel()
            await asyncio.wait((job,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
