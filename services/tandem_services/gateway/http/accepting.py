"""Takes connections one by one, and stops while the process has hardly any file descriptors left.

uvloop and asyncio take all connections that wait at once. In a process without a free descriptor they close those that
they cannot hold: the client's connection is reset. Connections that are not taken wait in the kernel, unharmed.

Taking one connection costs 50 µs more here than in uvloop. So this is used only where the limit of open files is less
than the connections that a gateway takes and those that can wait for it (`needs_acceptor`).

The kernel gives a new socket the lowest free number. So a number near the limit says that few are free, without a count
of what else the process has open.
"""

import asyncio
import errno
import logging
import math
import os
import resource
import socket
from collections.abc import Callable

from tandem_services.common.sockets import BACKLOG
from tandem_services.gateway.limits import MAX_CONNECTIONS

RESERVED_DESCRIPTORS = 64
"""Left for connections to workers and Redis, files and threads; at most a quarter of the limit."""

TAKEN_AT_ONCE = 64
"""Connections per turn of the event loop."""

PAUSE_S = 0.05
"""Until the next try when descriptors are short."""

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger(__name__)


def most_descriptors() -> int:
    """The number at and above which a new socket's descriptor is too high."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - min(RESERVED_DESCRIPTORS, limit // 4)


def needs_acceptor() -> bool:
    """Whether connections can use up the descriptors: those that are bounded, and as many as the kernel queues."""
    return most_descriptors() < MAX_CONNECTIONS + BACKLOG


class Acceptor:
    """Gives the connections of listening sockets to protocols. Belongs to one event loop."""

    def __init__(
        self,
        listeners: list[socket.socket],
        protocol: Callable[[], asyncio.Protocol],
        *,
        end_idle: Callable[[], bool] = lambda: False,
        most: int | None = None,
    ) -> None:
        """`end_idle`: close a connection that waits for its next request, and return whether there was one.

        `most`: as `most_descriptors`, which is the default.
        """
        self._listeners = listeners
        self._protocol = protocol
        self._end_idle = end_idle
        self._most = most_descriptors() if most is None else most
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._connecting: set[asyncio.Task[object]] = set()
        self.pauses = 0
        """Times that a listener was left alone for a while."""

    def start(self) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
            self._watch(listener)

    def close(self) -> None:
        """Take no further connections. Does not close the listening sockets. Idempotent."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
        for timer in self._paused.values():
            timer.cancel()
        self._paused.clear()
        self._listeners = []

    def _watch(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listener, self._take, listener)

    def _take(self, listener: socket.socket) -> None:
        for _ in range(TAKEN_AT_ONCE):
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                self._pause(listener)
                return
            connection.setblocking(False)
            number = connection.fileno()
            self._connect(connection)
            if number >= self._most:
                self._pause(listener)
                return

    def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[object]) -> None:
        self._connecting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a connection ended before it was set up: %r", error)

    def _pause(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(listener)
        if not self.pauses:
            logger.warning(
                "few file descriptors are left (limit %d): new connections wait until others end; raise the hard limit "
                "(ulimit -Hn, LimitNOFILE=) or add gateways",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
        self.pauses += 1
        self._wait(listener)

    def _wait(self, listener: socket.socket) -> None:
        # An idle connection that was ended has freed its descriptor by the next turn.
        delay = 0 if self._end_idle() else PAUSE_S
        self._paused[listener] = asyncio.get_running_loop().call_later(delay, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        del self._paused[listener]
        if _lowest_free(listener) < self._most:
            self._watch(listener)
        else:
            self._wait(listener)


def _lowest_free(listener: socket.socket) -> float:
    """The number that the next descriptor would have; infinite where there is none."""
    try:
        number = os.dup(listener.fileno())
    except OSError:
        return math.inf
    os.close(number)
    return number
