"""Ports for processes that are about to be started."""

import random

from tandem_engine.addresses import LOOPBACK, AddressError
from tandem_services.common.errors import StartupError
from tandem_services.common.listening import bound_socket

PORTS = range(20_000, 32_000)
"""Below the range that Linux gives to outgoing connections and to sockets bound to port 0 (32768 and up): a port
from there may be taken between finding it free and listening on it."""
TRIES = 100

_given: set[int] = set()


def free_port(host: str = LOOPBACK) -> int:
    """A port of `host` that nobody uses now, and that this process has not been given before: those that it starts
    may not listen yet. Raises `StartupError` when none is found.
    """
    for port in random.sample(PORTS, TRIES):
        if port in _given:
            continue
        try:
            bound_socket(host, port, reuse=False).close()
        except AddressError as error:
            raise StartupError(f"--host {host}: {error}") from error
        except OSError:
            continue
        _given.add(port)
        return port
    raise StartupError(f"found no free port on {host} in {TRIES} tries between {PORTS.start} and {PORTS.stop}")
