"""The asyncio versions of `channels`, for gateways and worker services.

`SocketReadable` waits on the event loop until a ZMQ socket may have something to read. A ZMQ socket's descriptor is not
a stream's: it becomes readable once when *something* has happened since the socket was last used, and every use of the
socket, including a send, clears it (zmq_getsockopt(3), ZMQ_FD). So

    1. a reader reads until nothing is left, and only then waits
    2. when the descriptor is readable, or something is there after others have used the socket, the waiter wakes up and
       reads again
    3. without a waiter the descriptor is cleared, or the event loop would be notified forever. The next reader begins
       by reading
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from tandem_engine.base.errors import WireError
from tandem_engine.ipc.channels import MAX_PER_RECEIVE, In, IpcContext, Out, configure, connect
from tandem_engine.messages.codec import Codec

_SOMETHING = int(zmq.POLLIN)


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
            self._loop.add_reader(self._descriptor, self._notified)
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def used(self) -> None:
        """The socket was used, which may have taken the descriptor's word away."""
        # To wake a waiter that finds nothing costs more than the question.
        if self._waiter is not None and int(self._socket.get(zmq.EVENTS)) & _SOMETHING:
            self._wake()

    def close(self) -> None:
        """Before the socket is closed: ends all waits. Idempotent."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._loop = None
        if self._waiter is not None:
            self._waiter.cancel()

    def _notified(self) -> None:
        if self._waiter is None:
            self._socket.get(zmq.EVENTS)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""What a client's socket reports when there is no engine at its other end, or none of this deployment."""


class AsyncPairServer(Generic[In, Out]):
    """Asyncio PAIR that binds; the worker service's end of the control channel."""

    def __init__(self, context: IpcContext, endpoint: str, *, inbound: object, outbound: object) -> None:
        self._inbound: Codec[In] = Codec(inbound)
        self._outbound: Codec[Out] = Codec(outbound)
        self.socket = context.async_socket(zmq.PAIR)
        configure(self.socket)
        self.socket.bind(endpoint)

    async def receive(self) -> In:
        return self._inbound.decode(await self.socket.recv())

    async def send(self, message: Out) -> None:
        await self.socket.send(self._outbound.encode(message))

    def close(self) -> None:
        self.socket.close()


class AsyncDealerChannel(Generic[In, Out]):
    """Asyncio client end; a gateway has one per engine.

    `disconnected` completes when the engine's socket goes away (FIN or RST milliseconds after SIGKILL,
    heartbeat time-out after SIGSTOP) or no process listens there any more, which is the fastest sign of a dead
    worker: one that is registered has bound its socket before.

    What streams over it comes through here message by message, so it waits for its socket itself: pyzmq's asyncio
    sockets cost more per message than all that a gateway does with one.

    Raises `WireError` for an endpoint that cannot be one, because it came from the registry, and when the process may
    open no more sockets.
    """

    def __init__(self, context: IpcContext, endpoint: str, *, inbound: object, outbound: object) -> None:
        self._inbound: Codec[In] = Codec(inbound)
        self._outbound: Codec[Out] = Codec(outbound)
        self.socket, self._monitor = _open_watched(context)
        context.adopt(self._monitor)
        self._readable = SocketReadable(self.socket)
        self._monitor_readable = SocketReadable(self._monitor)
        self._taken = 0
        try:
            connect(self.socket, endpoint)
        except WireError:
            self.close()
            raise

    async def receive(self) -> In:
        """Raises `WireError` for an undecodable message. One receiver at a time."""
        while True:
            if self._taken >= MAX_PER_RECEIVE:
                # Other tasks run first, however many messages are there. No message is held across the wait: a reader
                # of `waiting` would miss it.
                self._taken = 0
                await asyncio.sleep(0)
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._taken = 0
                await self._readable.wait()
                continue
            self._taken += 1
            return self._inbound.decode(data)

    async def readable(self) -> None:
        """Until something may be `waiting`. Nothing was a moment ago."""
        await self._readable.wait()

    def waiting(self) -> Iterator[In]:
        """What has arrived and was not received yet. Never waits; raises like `receive`."""
        with suppress(zmq.Again):
            while True:
                yield self._inbound.decode(self.socket.recv(zmq.NOBLOCK))

    def send(self, message: Out) -> bool:
        """False when the queue to the engine is full. Never waits."""
        try:
            self.socket.send(self._outbound.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._readable.used()
            return False
        except zmq.ZMQError:
            return False
        self._readable.used()
        return True

    async def disconnected(self) -> None:
        """Return when the connection has been lost or refused. Messages received before are `waiting`."""
        while True:
            try:
                parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                await self._monitor_readable.wait()
            else:
                return

    def close(self, *, linger_s: float = 0.0) -> None:
        """Messages that were sent have up to `linger_s` to leave."""
        self._readable.close()
        self._monitor_readable.close()
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=int(linger_s * 1000))


def _open_watched(context: IpcContext) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    """A client's socket and its monitor. Raises `WireError` when there are no descriptors left."""
    try:
        socket = context.socket(zmq.DEALER)
    except zmq.ZMQError as error:
        raise _no_sockets_left(error) from error
    try:
        configure(socket)
        context.secure_client(socket)
        return socket, socket.get_monitor_socket(LOST_EVENTS)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise _no_sockets_left(error) from error


def _no_sockets_left(error: zmq.ZMQError) -> WireError:
    return WireError(f"cannot open a socket: {error}. Raise the hard limit of open files of this process (ulimit -Hn)")
