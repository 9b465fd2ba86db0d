"""The socket of a service manager, which records what processes notify it of."""

import socket
from pathlib import Path


class NotifySocket:
    """Close it at the end. `address` goes into NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.setblocking(False)
        self._messages: list[dict[str, str]] = []

    def messages(self) -> list[dict[str, str]]:
        """All so far, each as its variables."""
        while True:
            try:
                message = self._socket.recv(65536).decode()
            except BlockingIOError:
                return [*self._messages]
            self._messages.append(dict(line.split("=", 1) for line in message.split("\n")))

    def close(self) -> None:
        self._socket.close()
