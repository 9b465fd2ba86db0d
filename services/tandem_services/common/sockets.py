"""Listening sockets of HTTP servers, bound before anything else starts."""

import random
import socket

from tandem_engine.base.addresses import EVERY_ADDRESS, LOOPBACK, Address, AddressError, bare_host, family_of
from tandem_services.common.errors import StartupError

BACKLOG = 2048


def listen(host: str, port: int, *, flags: str = "--host or --port", shared: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one. `shared`: one of several for the port, among which the kernel
    distributes connections.

    `host`: an address of this machine; 0.0.0.0 for all of its IPv4 addresses; :: for those of both families, which
    are those of IPv4 where the kernel has no IPv6.

    Raises `StartupError` naming `flags` when the address is taken or not ours.
    """
    try:
        address = Address(host, port)
        listener = bound_socket(host, port, shared=shared)
    except AddressError as error:
        raise StartupError(f"cannot listen: {error}; choose another {flags}") from error
    except OSError as error:
        raise StartupError(f"cannot listen on {address} ({error}): choose another {flags}") from error
    # Accepted connections inherit it: a token must not wait for the acknowledgement of the last one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.listen(BACKLOG)
    return listener


def bound_socket(host: str, port: int, *, reuse: bool = True, shared: bool = False) -> socket.socket:
    """A TCP socket bound to `host`, which is as for `listen`. Raises `OSError` or `AddressError`."""
    host = bare_host(host)
    if host in ("", EVERY_ADDRESS):
        host = EVERY_ADDRESS if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  as the user has asked
    bound = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if host == EVERY_ADDRESS:
            # Both families, whatever the default of this machine (net.ipv6.bindv6only) is.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


PORTS = range(20_000, 32_000)
"""Below the range that Linux gives to outgoing connections and to sockets bound to port 0 (32768 and up): a port
from there may be taken between finding it free and listening on it."""

TRIES = 100
_given: set[int] = set()


def free_port(host: str = LOOPBACK) -> int:
    """A port of `host` that is free now, and that this process has not been given before: those that it starts
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
