"""Listening sockets of HTTP servers, bound before anything else is started."""

import ipaddress
import socket

from tandem_services.common.errors import StartupError

BACKLOG = 2048


def listen(host: str, port: int, *, flags: str = "--host or --port") -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises `StartupError` naming `flags` when the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it: a token must not wait for the acknowledgement of the last one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port} ({error}): choose another {flags}") from error
    listener.listen(BACKLOG)
    return listener


def is_loopback(address: str) -> bool:
    """Whether an IP address is this machine's own; False for what is no address. IPv4 within IPv6 counts."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of this machine, which nobody else can connect to by that name."""
    return host in {"", "0.0.0.0", "::"}  # noqa: S104  compared, not bound


def http_url(host: str, port: int) -> str:
    """http:// address; IPv6 in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
