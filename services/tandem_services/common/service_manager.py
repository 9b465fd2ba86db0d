"""Notifies the service manager that started this process: systemd, with `Type=notify`.

    STATUS, EXTEND_TIMEOUT_USEC    while the processes start
    READY                          everything serves
    STATUS                         a process has ended or was restarted
    STOPPING                       the end has begun

The protocol is that of sd_notify(3): one datagram per message to the socket that NOTIFY_SOCKET names. Without that
variable nothing is sent.
"""

import logging
import socket
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

MAX_STATUS = 500
"""Characters that `systemctl status` shows in one line."""

SEND_TIMEOUT_S = 5.0
"""A manager that does not read must not stop this process."""


@dataclass(kw_only=True, slots=True)
class ServiceManager:
    """`address`: value of NOTIFY_SOCKET, a path, or an abstract name after @; None: no service manager listens."""

    address: str | None
    _failed: bool = field(default=False, init=False)

    def starting(self, status: str, *, extend_s: float) -> None:
        """The start continues. The manager waits `extend_s` seconds for the next message."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(extend_s * 1e6)}", _status(status))

    def ready(self, status: str) -> None:
        self._send("READY=1", _status(status))

    def status(self, text: str) -> None:
        self._send(_status(text))

    def stopping(self) -> None:
        self._send("STOPPING=1", _status("stopping"))

    def _send(self, *lines: str) -> None:
        if self.address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(SEND_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(), _path(self.address))
        except OSError as error:
            # What serves is of more use than what the manager shows of it.
            if not self._failed:
                logger.warning("cannot notify the service manager at %s: %s", self.address, error)
            self._failed = True


def _status(text: str) -> str:
    """In one line: a second one would be a message of its own."""
    return f"STATUS={' '.join(text.split())[:MAX_STATUS]}"


def _path(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address
