"""What carries KV between two processes, as far as it can be told.

NIXL names its backend, UCX, and not the transport that UCX has chosen for a peer, so it is inferred: each side says
in its `Hello` which transports its process could use and which machine it is on, and UCX takes the best that both
can. An answer is therefore what UCX should use. Where nothing can be inferred it is `UNKNOWN`, never a guess.

    both on one machine, KV in device memory    cuda_ipc if both can
    both on one machine, KV in host memory      shm if both can
    else                                        rdma if both can, then tcp if both can
    a machine that is not known                 unknown
"""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from tandem_engine.messages.transfer import Hello
from tandem_engine.names import LinkTransport

_SHARED = frozenset({"shm", "sm", "posix", "sysv", "cma", "knem", "xpmem"})
UCX_NAMES: Mapping[LinkTransport, frozenset[str]] = {
    LinkTransport.TCP: frozenset({"tcp"}),
    LinkTransport.RDMA: frozenset(
        {"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "dc", "dc_x"}
    )
    | {"dc_mlx5", "gga", "gga_mlx5"},
    LinkTransport.SHM: _SHARED,
    LinkTransport.CUDA_IPC: frozenset({"cuda", "cuda_ipc"}),
}
"""Entries of UCX_TLS that allow each."""

SPEED = (LinkTransport.TCP, LinkTransport.RDMA, LinkTransport.SHM, LinkTransport.CUDA_IPC)
"""The slowest first."""

INFINIBAND = Path("/sys/class/infiniband")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = (Path("/proc/self/ns/ipc"), Path("/proc/self/ns/pid"))
"""Processes in different ones share no memory, whatever machine they are on."""


def usable_transports(ucx_tls: str, *, device: str, rdma: bool) -> tuple[LinkTransport, ...]:
    """Those that this process could use. `ucx_tls` is the variable of UCX; `device` is DRAM or VRAM."""
    allowed = {transport for transport, names in UCX_NAMES.items() if _allows(ucx_tls, names)}
    if not rdma:
        allowed.discard(LinkTransport.RDMA)
    if device != "VRAM":
        allowed.discard(LinkTransport.CUDA_IPC)
    return tuple(transport for transport in SPEED if transport in allowed)


def rdma_is_up(folder: Path = INFINIBAND) -> bool:
    """Whether this process sees an RDMA port that is active."""
    try:
        return any("ACTIVE" in state.read_text() for state in folder.glob("*/ports/*/state"))
    except OSError:
        return False


def rdma_ports(folder: Path = INFINIBAND) -> tuple[str, ...]:
    """All of this machine that this process sees, as UCX names them, e.g. mlx5_0:1."""
    return tuple(sorted(f"{port.parent.parent.name}:{port.name}" for port in folder.glob("*/ports/*")))


def machine_name() -> str:
    """The same for processes that can share memory, and for no others; "" when the kernel does not tell."""
    try:
        parts = [BOOT_ID.read_text().strip(), *(str(namespace.readlink()) for namespace in NAMESPACES)]
    except OSError:
        return ""
    return blake2b("|".join(parts).encode(), digest_size=8).hexdigest()


def transport_between(here: Hello, there: Hello) -> LinkTransport:
    """See the module docstring."""
    both = {*here.transports} & {*there.transports}
    if not (here.machine and there.machine):
        return LinkTransport.UNKNOWN
    local = {("VRAM", "VRAM"): LinkTransport.CUDA_IPC, ("DRAM", "DRAM"): LinkTransport.SHM}
    nearest = local.get((here.device, there.device))
    if here.machine == there.machine and nearest in both:
        return nearest
    return next((each for each in (LinkTransport.RDMA, LinkTransport.TCP) if each in both), LinkTransport.UNKNOWN)


def condition_of(transport: LinkTransport, expected: LinkTransport | None) -> str:
    """One clause for an operator when `transport` is known to be slower than what was expected, else ""."""
    if expected is None or transport is LinkTransport.UNKNOWN or SPEED.index(transport) >= SPEED.index(expected):
        return ""
    return f"expected {expected}, got {transport}"


def _allows(ucx_tls: str, names: frozenset[str]) -> bool:
    """UCX_TLS is a list of transports, or `^` and a list of those to leave out."""
    listed = {name.strip() for name in ucx_tls.removeprefix("^").split(",")}
    if ucx_tls.startswith("^"):
        return not names & listed
    return "all" in listed or bool(names & listed)
