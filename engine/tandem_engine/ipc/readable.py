"""Waiting on the event loop until a ZMQ socket may have something to read.

A ZMQ socket's descriptor is no stream's: it tells that *something* has happened since the socket was last used, once,
and every use of the socket, a send as well, takes that word away (zmq_getsockopt(3), ZMQ_FD). So

    1. whoever reads, reads until nothing is there, and only then waits
    2. the descriptor has a word, or the socket was used by others: the waiter wakes up and looks again
    3. nobody waits: the word is taken away unheard, or the loop would be told the same for ever. Whoever reads next
       begins with looking
"""

import asyncio

import zmq


class SocketReadable:
    """One waiter at a time. Belongs to the event loop of the first wait."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._descriptor = socket.fileno()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until there may be something to read. Nothing may have been there a moment ago."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._told)
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def used(self) -> None:
        """The socket was used, which may have taken the descriptor's word away."""
        self._wake()

    def close(self) -> None:
        """Before the socket is closed: nobody waits any more. Idempotent."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._loop = None
        if self._waiter is not None:
            self._waiter.cancel()

    def _told(self) -> None:
        if self._waiter is None:
            self._socket.get(zmq.EVENTS)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
