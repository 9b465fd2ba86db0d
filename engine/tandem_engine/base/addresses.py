"""Addresses of sockets: one type for every host and port that Tandem makes or reads.

    Address.parse("[::1]:9101")            HOST:PORT, as flags and `tandem ctl` take it
    Address.of_endpoint("tcp://[::1]:9")   a ZMQ endpoint, as the registry and messages have it
    address.endpoint, address.url("/live") the same address as a ZMQ endpoint and as an http:// URL
    str(address)                           HOST:PORT, as grpc, Envoy and error messages have it

An IPv6 address stands in brackets wherever a port follows it, and without brackets everywhere else: in flags such as
`--host`, in calls of the operating system, and in `Address.host`. No other module joins or splits hosts and ports
(`tests/test_address_layout.py`).
"""

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

ENDPOINT_SCHEME = "tcp://"
LOOPBACK, LOOPBACK_V6 = "127.0.0.1", "::1"

EVERY_ADDRESS = "::"
"""As `--host`: every IPv6 and IPv4 address of this machine."""

WILDCARDS = frozenset({"", EVERY_ADDRESS, "0.0.0.0"})  # noqa: S104  compared, not bound
MAX_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")
_ZONE = re.compile(r"[A-Za-z0-9._~-]{1,32}")
_PORT = re.compile(r"[0-9]{1,5}")


class AddressError(ValueError):
    """A text that is not an address. The message says what is wrong and how an address is written."""


@dataclass(frozen=True, order=True, slots=True)
class Address:
    """One host and one port. Raises `AddressError` for a host or a port that cannot be one."""

    host: str
    """A name, an IPv4 address, or an IPv6 address without brackets, possibly with a zone: fe80::1%eth0."""
    port: int
    """0 to 65535."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", bare_host(self.host))
        if not 0 <= self.port <= MAX_PORT:
            raise AddressError(f"port {self.port} is not between 0 and {MAX_PORT}")

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read HOST:PORT. An IPv6 address must be in brackets: without them the port cannot be distinguished."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not _PORT.fullmatch(port):
            raise AddressError(f"{text[:200]!r} is not HOST:PORT, such as 10.0.0.7:8000 or [fd00::7]:8000")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise AddressError(
                f"{text[:200]!r} is ambiguous: write an IPv6 address in brackets, such as [fd00::7]:8000"
            )
        return cls(host, int(port))

    @classmethod
    def of_endpoint(cls, endpoint: str) -> "Address":
        """Read a ZMQ endpoint: tcp://HOST:PORT."""
        if not endpoint.startswith(ENDPOINT_SCHEME):
            raise AddressError(f"{endpoint[:200]!r} is not {ENDPOINT_SCHEME}HOST:PORT")
        return cls.parse(endpoint.removeprefix(ENDPOINT_SCHEME))

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def endpoint(self) -> str:
        """For ZMQ: tcp://HOST:PORT."""
        return f"{ENDPOINT_SCHEME}{self}"

    def url(self, path: str = "", *, scheme: str = "http") -> str:
        """A URL; `path` begins with a slash. The % before a zone is escaped (RFC 6874)."""
        host = bracketed(self.host).replace("%", "%25")
        return f"{scheme}://{host}:{self.port}{path}"


def bare_host(text: str) -> str:
    """`text` without brackets, where it is an IPv6 address. Raises `AddressError` for what cannot be a host."""
    if text in WILDCARDS:
        return text
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else None
    literal = text if inner is None else inner
    if ":" in literal and _is_ipv6(literal):
        return literal
    if inner is not None or ":" in text or not _NAME.fullmatch(text):
        raise AddressError(f"{text[:200]!r} is not a host name or an IP address, such as 10.0.0.7 or fd00::7")
    return text


def bracketed(host: str) -> str:
    """`host` as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def ip_of(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address that `host` is, with or without brackets; None for a name. IPv4 within IPv6 becomes IPv4."""
    try:
        address = ip_address(bare_host(host))
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine alone, or the name localhost. False for what is no address."""
    address = ip_of(host)
    return host == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for all addresses of this machine. Other machines cannot connect to it by that name."""
    address = ip_of(host)
    return host in WILDCARDS or (address is not None and address.is_unspecified)


def is_ipv6(host: str) -> bool:
    """Whether `host` is an IPv6 address, and so needs an IPv6 socket."""
    return ":" in host


def loopback_beside(host: str) -> str:
    """The loopback address for processes that work with one at `host` on the same machine.

    IPv6 beside an IPv6 address, so that nothing needs IPv4; IPv4 otherwise, as machines that listen at all of their
    addresses may have no IPv6 loopback.
    """
    return LOOPBACK_V6 if is_ipv6(host) and not is_wildcard(host) else LOOPBACK


def reachable_here(host: str) -> str:
    """An address by which this machine reaches a socket that is bound to `host`."""
    if not is_wildcard(host):
        return host
    return LOOPBACK_V6 if is_ipv6(host) else LOOPBACK


def family_of(host: str) -> socket.AddressFamily:
    """Of a socket that is bound to `host`."""
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def _is_ipv6(literal: str) -> bool:
    address, percent, zone = literal.partition("%")
    try:
        IPv6Address(address)
    except ValueError:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None
