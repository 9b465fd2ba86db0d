"""Sleep until any channel or file descriptor has something to read."""

from collections.abc import Iterable

import zmq


class Poller:
    """Waits on ZMQ sockets and plain file descriptors together."""

    def __init__(self, sockets: "Iterable[zmq.Socket[bytes]]", descriptors: Iterable[int] = ()) -> None:
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        for descriptor in descriptors:
            self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """True when something became readable within `seconds`."""
        return bool(self._poller.poll(int(seconds * 1000)))
