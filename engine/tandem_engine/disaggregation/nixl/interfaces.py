"""The network interfaces that UCX stands on, and whether they are still the ones that it has met.

UCX reads the routing table once per process and remembers it by the index of each interface. An interface that is
taken away and given back, as when a pod's network is made anew, has another index: from then on UCX takes every peer
for unreachable. Its own connections are refused, which is an error like any other. But when a peer connects that it has
no endpoint for, it follows the configuration that the new endpoint never got, and the process ends by a fault
(`ucp_ep_set_lanes_failed` of UCX 1.23). So nothing may enter UCX once an interface is gone (`agent`), and a process
whose interface has come back as another one should make way for a new one (`thread`).

    same ──── an interface is gone or another ────▶ lost, for good ◀──── it is there again, as another one: `back`

Watched are the interface with this engine's own address and those that UCX_NET_DEVICES names. Others may come and go,
as they do on the host of other pods: UCX would use them all the same, and one that is there for a moment as soon as any
other, so it is given none of them (`own_devices`).
"""

import fcntl
import logging
import socket
from collections.abc import Iterable
from pathlib import Path

from tandem_engine.addresses import Address, ip_of

logger = logging.getLogger(__name__)

SIOCGIFADDR = 0x8915
"""Of <linux/sockios.h>; takes a `struct ifreq`."""
NAME_BYTES = 16
REQUEST_BYTES = 40
ADDRESS = slice(20, 24)
"""Of an IPv4 address in the answer."""
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
INTERFACES = Path("/sys/class/net")


class Interfaces:
    """Those of `names` that are there now. Cheap to ask: microseconds for each."""

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self._first = {name: index for name in sorted(names) if (index := _index(name))}
        self.lost = ""
        """One clause once one of them is not what it was; never "" again."""

    def same(self) -> bool:
        """Whether all of them have been what they were, in every look until now."""
        if not self.lost:
            changed = next((name for name, index in self._first.items() if _index(name) != index), "")
            if changed:
                self.lost = f"network interface {changed} was removed or recreated"
                logger.error("%s: this process transfers no more KV", self.lost)
        return not self.lost

    @property
    def back(self) -> bool:
        """Whether all of them are there again, though not the same."""
        return bool(self.lost) and all(map(_index, self._first))


def own_devices(endpoint: str, rdma_ports: Iterable[str], folder: Path = INTERFACES) -> str:
    """UCX_NET_DEVICES for a process that nobody has told: the interface with this engine's own address, and RDMA.

    "all" where none has it, as on a further node of an engine or behind a name, and where it is a bridge, which UCX
    leaves out.

    `endpoint`: of this engine, as peers know it, e.g. tcp://10.0.0.7:5601. `rdma_ports`: e.g. mlx5_0:1.
    """
    own = _with_address(Address.of_endpoint(endpoint).host)
    if not own or (folder / own / "bridge").is_dir():
        return "all"
    return ",".join((own, *rdma_ports))


def ucx_network(endpoint: str, net_devices: str) -> dict[str, str]:
    """Variables of UCX: the interfaces that it may use, and the family of addresses that it takes first.

    An interface may have addresses of both families. UCX takes IPv4 first, which peers need not reach where they reach
    this engine by an IPv6 address.

    `endpoint`: of this engine, as peers know it, e.g. tcp://[fd00::7]:5601. `net_devices`: for UCX_NET_DEVICES.
    """
    address = ip_of(Address.of_endpoint(endpoint).host)
    ipv6_first = address is not None and address.version == 6
    return {"UCX_NET_DEVICES": net_devices} | ({"UCX_TCP_AF_PRIO": "inet6,inet"} if ipv6_first else {})


def watched(endpoint: str, net_devices: str) -> frozenset[str]:
    """Names to watch.

    `endpoint`: of this engine, as peers know it, e.g. tcp://10.0.0.7:5601.
    `net_devices`: UCX_NET_DEVICES, a list of interfaces or of devices with ports ("mlx5_0:1"), or `all`, or `^` and
    those to leave out.
    """
    named = () if net_devices.startswith("^") else (part.partition(":")[0].strip() for part in net_devices.split(","))
    there = {name for _, name in socket.if_nameindex()}
    return frozenset(there & {*named, _with_address(Address.of_endpoint(endpoint).host)})


def _with_address(host: str) -> str:
    """The interface whose (first) address `host` is; "" when none has it, or it is a name."""
    address = ip_of(host)
    if address is None:
        return ""
    if address.version == 6:
        # A link-local address may be on several interfaces: its zone names the one.
        return address.scope_id or _with_ipv6(address.packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _ipv4(any_socket, name) == address.packed), "")


def _with_ipv6(digits: str) -> str:
    try:
        rows = [line.split() for line in IPV6_ADDRESSES.read_text("ascii").splitlines()]
    except OSError:
        return ""
    return next((row[-1] for row in rows if row[0] == digits), "")


def _ipv4(any_socket: socket.socket, name: str) -> bytes:
    """b"" without one."""
    request = name.encode()[: NAME_BYTES - 1].ljust(REQUEST_BYTES, b"\0")
    try:
        return fcntl.ioctl(any_socket, SIOCGIFADDR, request)[ADDRESS]
    except OSError:
        return b""


def _index(name: str) -> int:
    """0: there is no such interface now."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0
