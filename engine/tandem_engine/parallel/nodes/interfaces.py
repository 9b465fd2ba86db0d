"""Network interfaces by address: NCCL wants the name of the one it may use."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from tandem_engine.addresses import ip_of
from tandem_engine.errors import ConfigError

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""
IPV6_TABLE = Path("/proc/net/if_inet6")


def interface_of(host: str) -> str:
    """Name of the interface of this machine with the address `host`. Raises `ConfigError` when none has it."""
    address = _address(host)
    found = _by_ipv6(address) if address.version == 6 else _by_ipv4(address)
    if found is None:
        raise ConfigError(f"--host {host} is no address of this machine's interfaces; name one that other nodes reach")
    return found


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    given = ip_of(host)
    if given is not None:
        return given
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be resolved: {error}") from error


def _by_ipv4(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            if answer[20:24] == address.packed:
                return name
    return None


def _by_ipv6(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    try:
        rows = [line.split() for line in IPV6_TABLE.read_text("ascii").splitlines()]
    except OSError:
        return None
    return next((row[-1] for row in rows if bytes.fromhex(row[0]) == address.packed), None)
