"""Ports for processes that are about to be started."""

import random
import socket

from tandem_services.common.errors import StartupError

PORTS = range(20_000, 32_000)
"""Below the range that Linux gives to outgoing connections and to sockets bound to port 0 (32768 and up): a port
from there may be taken between finding it free and listening on it."""
TRIES = 100

_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody uses now, and that this process has not been given before: those that it starts
    may not listen yet. Raises `StartupError` when none is found.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(PORTS, TRIES):
        if port in _given:
            continue
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise StartupError(f"found no free port on {host} in {TRIES} tries between {PORTS.start} and {PORTS.stop}")
