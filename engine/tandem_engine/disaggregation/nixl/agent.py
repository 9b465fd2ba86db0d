"""NIXL behind a typed interface, and a watch on the network interfaces below it. The only module that imports `nixl`.

    1. start       named after the incarnation, so that peers see a restarted worker as a new agent; the whole pool, and
                   that of states, is registered once
    2. add_peer    once per peer incarnation (nixl #2109), from the metadata in its `Hello`
    3. write       a WRITE; `progress` until it is done, which is when it has arrived
    4. remove_peer, close
    5. cut off     once a network interface is lost or replaced, nothing enters UCX any more (`Interfaces`): writes
                   fail, those of peers stall, and NIXL is not used again until the process ends

NIXL's progress thread would occupy a core, so it is off: `progress` and `attend` make progress. A fabric that copies
memory or has RDMA needs nothing of the receiving side; over TCP it must call `attend` regularly, or the write does not
complete. The agent is not thread-safe: one thread calls everything after the constructor. NIXL releases the GIL during
a transfer, so a large write blocks only that thread.

UCX reads the routing table once per process and remembers interfaces by index. An interface that is removed and
restored, as when a pod's network is recreated, has another index, and UCX considers every peer unreachable. Its own
connections fail with an error. A connection from a peer without an endpoint makes it follow a configuration that was
never set, and the process crashes (`ucp_ep_set_lanes_failed` of UCX 1.23). So nothing may enter UCX after that, and the
process should be replaced by a new one once the interface is back (`thread`):

    same ──── an interface is lost or replaced ────▶ lost, for good ◀──── it is there again, as another one: `back`

The watched interfaces are the one with this engine's address and those in UCX_NET_DEVICES. Others appear and vanish on
hosts of other pods, and UCX would use them as well, so `own_devices` excludes them.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_engine.base import environment
from tandem_engine.base.addresses import Address, ip_of
from tandem_engine.base.errors import TransferError, TransportUnavailableError
from tandem_engine.disaggregation.nixl.layout import Descriptors, Region
from tandem_engine.disaggregation.transport import INFINIBAND

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev", "shm")
"""Where UCX makes memory that processes share."""

SIOCGIFADDR = 0x8915
"""Of <linux/sockios.h>; takes a `struct ifreq`."""

NAME_BYTES = 16
REQUEST_BYTES = 40

ADDRESS = slice(20, 24)
"""Of an IPv4 address in the answer."""

IPV6_ADDRESSES = Path("/proc/net/if_inet6")
INTERFACES = Path("/sys/class/net")


REGISTERING = (INFINIBAND, Path("/dev/xpmem"), Path("/dev/knem"))
"""Of what registers memory of the host with a device or the kernel."""


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
    """UCX_NET_DEVICES for a process without the variable: the interface with this engine's own address, and RDMA.

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


def ucx_memory(device: str, registering: Iterable[Path] = REGISTERING) -> dict[str, str]:
    """Variables of UCX: no hooks in functions of the C library where it has no use for them.

    UCX watches what a process unmaps, because it keeps registrations of memory. For that it patches functions such as
    `munmap`, and at each it waits for threads that may be inside: 0.4 s of a core at each start. Shared memory and TCP
    register nothing.

    `device`: of the pool, as NIXL names it. `registering`: paths that are there with RDMA, xpmem or knem.
    """
    if device == "DRAM" and not any(path.exists() for path in registering):
        return {"UCX_MEM_EVENTS": "n"}
    return {}


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


def _remedy() -> str:
    """For a backend that has not started."""
    if os.access(SHARED_MEMORY, os.W_OK):
        return "check UCX_TLS, or serve with --transport none"
    return f"{SHARED_MEMORY} cannot be written: mount a tmpfs there, or set UCX_TLS=^posix"


@dataclass(frozen=True, slots=True)
class Write:
    """A WRITE in progress. Give it back with `NixlAgent.release` when it is done or given up."""

    handle: Any


class NixlAgent:
    """One nixl_agent with the UCX backend."""

    def __init__(
        self,
        name: str,
        region: Region,
        interfaces: Interfaces,
        *,
        variables: Mapping[str, str] | None = None,
        further: Sequence[Region] = (),
    ) -> None:
        """`variables`: of UCX (`ucx_network`, `ucx_memory`); those that the user has set count instead. `further`:
        regions of other groups of layers, on the same device.

        Raises `TransportUnavailableError` when NIXL is not installed or cannot start here.
        """
        # Both libraries log every start and every lost peer on the terminal; what matters is logged here.
        environment.set_default("UCX_LOG_LEVEL", "fatal")
        environment.set_default("NIXL_LOG_LEVEL", "FATAL")
        try:
            import nixl._api as api
            import nixl._bindings as bindings
        except ImportError as error:
            raise TransportUnavailableError(
                f"NIXL cannot be loaded ({error}); `pip install nixl`, or serve with --transport none"
            ) from error
        self._errors = _error_types(bindings)
        self._region = region
        self._interfaces = interfaces
        try:
            with environment.defaults_while(variables or {}):
                config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
                self._agent = api.nixl_agent(name, config)
            self._registered = [
                self._agent.register_memory(
                    [
                        (each.address, each.num_pages * each.page_bytes, each.device_id, "")
                        for each in (region, *further)
                    ],
                    region.device,
                )
            ]
            self.metadata: bytes = self._agent.get_agent_metadata()
        except self._errors as error:
            raise TransportUnavailableError(
                f"NIXL cannot start with the UCX backend on {region.device}: {error}; {_remedy()}"
            ) from error

    def register(self, address: int, size: int) -> None:
        """Memory on the device of the pool to write from. Peers that were met before need not know it."""
        self._enter()
        memory = [(address, size, self._region.device_id, "")]
        try:
            self._registered.append(self._agent.register_memory(memory, self._region.device))
        except self._errors as error:
            raise TransferError(f"{size} bytes to pack slices in cannot be registered: {error}") from error

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Learn a peer and connect to it. Raises `TransferError` when its metadata is not its own or unusable."""
        self._enter()
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransferError(f"metadata of {name} refused: {error}") from error
        if loaded not in (name, name.encode()):
            # By the name that NIXL has given, which may be no text: others wrote it.
            self._remove(loaded)
            raise TransferError(f"metadata of {name} belongs to agent {loaded!r}")

    def remove_peer(self, name: str) -> None:
        """Drop a peer and its mappings. Unknown names are ignored."""
        if self._interfaces.same():
            self._remove(name)

    def _remove(self, name: str | bytes) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            logger.debug("cannot remove peer %r: %s", name, error)

    def write(self, peer: str, descriptors: Descriptors, device: str) -> Write:
        """Start a WRITE into a peer's pool on `device`. Raises `TransferError` when the peer is lost.

        Where the fabric is a memory copy (same host), most of the copying happens inside this call.
        """
        self._enter()
        handle = None
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(descriptors.source, self._region.device),
                self._agent.get_xfer_descs(descriptors.target, device),
                peer,
            )
            state = self._agent.transfer(handle)
        except Exception as error:
            if handle is not None:
                self.release(Write(handle))
            if not isinstance(error, self._errors):
                raise
            raise TransferError(f"WRITE to {peer} failed: {error}") from error
        if state == "ERR":
            self.release(Write(handle))
            raise TransferError(f"WRITE to {peer} failed")
        return Write(handle)

    def progress(self, write: Write) -> bool:
        """Whether the write is done. Raises `TransferError` when it never will be; release it then, too."""
        self._enter()
        try:
            state = self._agent.check_xfer_state(write.handle)
        except self._errors as error:
            raise TransferError(f"WRITE failed: {error}") from error
        if state == "ERR":
            raise TransferError("WRITE failed")
        return bool(state == "DONE")

    def release(self, write: Write) -> None:
        """Give the handle back, cancelling the write if it is still in progress."""
        if not self._interfaces.same():
            return
        try:
            self._agent.release_xfer_handle(write.handle)
        except self._errors as error:
            # The binding keeps the handle and tries again when the agent goes.
            logger.warning("cannot release a cancelled WRITE: %s", error)

    def attend(self) -> None:
        """Let writes and connections of peers progress. No writer notifies; what comes all the same is dropped."""
        if not self._interfaces.same():
            return
        try:
            self._agent.get_new_notifs()
        except self._errors as error:
            logger.warning("cannot serve peers: %s", error)

    def close(self) -> None:
        """Deregister the pool. The agent's sockets go with it."""
        if not self._interfaces.same():
            return
        try:
            for registered in self._registered:
                self._agent.deregister_memory(registered)
        except self._errors as error:
            logger.warning("cannot deregister KV memory: %s", error)
        finally:
            del self._agent

    def _enter(self) -> None:
        """Raises `TransferError` once nothing may enter UCX any more."""
        if not self._interfaces.same():
            raise TransferError(self._interfaces.lost)


def _error_types(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's exceptions. They share no base class of their own."""
    return (
        bindings.nixlBackendError,
        bindings.nixlCancelledError,
        bindings.nixlInvalidParamError,
        bindings.nixlMismatchError,
        bindings.nixlNotAllowedError,
        bindings.nixlNotFoundError,
        bindings.nixlNotPostedError,
        bindings.nixlNotSupportedError,
        bindings.nixlRemoteDisconnectError,
        bindings.nixlRepostActiveError,
        bindings.nixlUnknownError,
        # Of the Python half, when no plug-in is found.
        RuntimeError,
    )
