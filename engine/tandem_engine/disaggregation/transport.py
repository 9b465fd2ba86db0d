"""KV transport contract: moves whole pages from this process's pool into granted pages of a peer.

One thread owns the library behind it. These methods are called by the scheduler thread, only enqueue, and never block.
Outcomes come back as events from `poll`. Implementations: `nixl` (real, CPU and GPU) and `fake` (tests only: faults,
delays, reordering).

`transport_between` infers what carries KV between two processes. NIXL reports its backend, UCX, and not the transport
that UCX has selected for a peer. Each side names in its `Hello` the transports that its process could use and its
machine, and UCX takes the best that both can, so the result is what UCX should use.

    both on one machine, KV in device memory    cuda_ipc if both can
    both on one machine, KV in host memory      shm if both can
    else                                        rdma if both can, then tcp if both can
    a machine that is not known                 unknown
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from tandem_engine.base.names import DigestKind, LinkTransport, PageId
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.memory.pool import PageLayout
from tandem_engine.memory.state_pool import slot_room
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import STATES, Hello


class PagePool(Protocol):
    """The memory that a transport reads and peers write: `KvPool`, or a test's own."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def layout(self) -> PageLayout:
        """What the bytes of a page are."""
        ...

    @property
    def address(self) -> int:
        """Of page 0; page i starts `i * page_bytes` later."""
        ...

    def bytes_view(self) -> torch.Tensor:
        """The bytes of all pages: uint8 [num_pages, page_bytes], a view."""
        ...


MIN_RATE = 10e6
"""Bytes per second. Whatever waits for bytes to arrive waits for at least as long as they take at this rate."""


class StateSlots(PagePool, Protocol):
    """The states of sequences: a page is one slot, of all layers that keep states."""

    @property
    def name(self) -> str:
        """What the bytes of a slot are, for people and for comparison."""
        ...

    @property
    def key_heads(self) -> int:
        """That a slot has; 0 where ranks do not divide states."""
        ...

    @property
    def head_blocks(self) -> tuple[int, ...]:
        """Bytes of one of them in each run of heads of a slot (`StateSpec.head_blocks`)."""
        ...


class HeadStates(NamedTuple):
    """States that ranks divide by heads."""

    heads: int
    """Of the model."""
    head_bytes: int
    """In a slot."""

    def slot_bytes(self, ranks: int) -> int:
        """Of each of `ranks`; 0 where they cannot divide the heads evenly."""
        return 0 if self.heads % ranks else slot_room(self.head_bytes * (self.heads // ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class PushKey:
    """Identifies one push. (room, generation) alone determines which transfer an event concerns."""

    room: str
    generation: int
    first: int
    """Index, within the grant, of the first pushed page."""
    count: int
    group: int = 0
    """Of layers: pages, or states (`messages.transfer.STATES`)."""


class HeadPart(NamedTuple):
    """Some of a page's KV heads, where they lie in the writer's page and where in the receiver's. As many of both."""

    source: range
    target: range


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """WRITE local `source[i]` to the peer's `target[i]`."""

    key: PushKey
    peer: str
    """Incarnation of the receiver."""
    source: tuple[PageId, ...]
    target: tuple[PageId, ...]
    digest: DigestKind = DigestKind.SAMPLED
    """Of the source pages, for `PushDone`."""
    tail: int = 0
    """Slots in use of the last page, or 0 when it is full: what lies in the others proves nothing."""
    start_before: float = math.inf
    """Monotonic time. A push that has not been started by then fails instead of writing [grant-expiry]."""
    progress: KvProgress | None = None
    """Of the step that computes these pages: each layer is written when the step has. The push fails with the step.
    None when the pages are settled."""
    least_layers: int = 1
    """With `progress`: write so many layers at once, or all that are left."""
    heads: HeadPart | None = None
    """Of each page these heads alone, which the digests are of, too. None: whole pages, which both sides have alike."""
    packed: bool = False
    """`heads` of a page arrive as one run of bytes, which the receiver unpacks (`packed_pages`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PushDone:
    """Sender side: the bytes are in the receiver's memory and the sender may reuse its pages. The receiver is not
    notified; that is for the sender's next message to do. Digests are of the source pages."""

    key: PushKey
    digests: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PushFailed:
    """Sender side: nothing more of this push will be written."""

    key: PushKey
    reason: str
    peer_lost: bool
    """The whole peer is gone, not this push alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestOrder:
    """Receiver side: digest `pages`, which a peer has written."""

    room: str
    generation: int
    pages: tuple[PageId, ...]
    kind: DigestKind
    tail: int
    """As in `Push`."""
    writers: int = 1
    """Ranks of the peer: what each of them has written is digested by itself."""
    packed: bool = False
    """The peer's ranks have written their heads as `Push.packed` has it, and pages are, or were, to be unpacked."""
    unpack: tuple[range, ...] = ()
    """Heads of the slices that each page has to be unpacked from before anything is digested; () if it need not be."""
    heads: range | None = None
    """Of each page these heads alone. None: whole pages."""
    states: tuple[PageId, ...] = ()
    """Slots of states; their digests follow those of pages."""
    state_heads: range | None = None
    """Of each slot these heads alone. None: whole slots."""

    @property
    def group(self) -> int:
        """`STATES` for an order of some heads of states, which has no pages."""
        return 0 if self.state_heads is None else STATES


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """Receiver side: answer to `digest`."""

    room: str
    generation: int
    digests: tuple[int, ...]
    group: int = 0
    """Of the order."""


TransportEvent = PushDone | PushFailed | Digests


class KvTransport(Protocol):
    """Whole-page WRITEs, known to have arrived when they are done."""

    def hello(self) -> Hello:
        """What peers need to write into this pool."""
        ...

    def rename(self, me: Peer) -> None:
        """This incarnation's KV is of another model now; where the pool lies stays what it was."""
        ...

    def connect(self, hello: Hello) -> None:
        """Learn a peer. The same incarnation twice is a no-op (nixl #2109)."""
        ...

    def forget(self, incarnation: str) -> None:
        """Drop a peer's agent and mappings; its outstanding pushes fail with `peer_lost`."""
        ...

    def packs(self, peer: str) -> bool:
        """Whether slices that go to `peer`, which is connected, are packed, so that it has to know."""
        ...

    def push(self, push: Push) -> None:
        """Start one push. Exactly one `PushDone` or `PushFailed` follows."""
        ...

    def digest(self, order: DigestOrder) -> None:
        """Compute the digests of local pages; one `Digests` follows."""
        ...

    def expect(self, transfers: int) -> None:
        """How many granted transfers are open now: writes of peers may need this side's attention to progress."""
        ...

    def poll(self) -> list[TransportEvent]:
        """Events since the last call, never blocking."""
        ...

    @property
    def alone(self) -> bool:
        """Whether `poll` answers for this process alone, so that it may be called at any time: no other rank has to
        call it in the same moment."""
        ...

    @property
    def errors(self) -> int:
        """Unexpected errors of this rank since start. Each has failed what it concerned; of those that repeat
        themselves, the log has one a second."""
        ...

    def fileno(self) -> int:
        """Readable when `poll` has something: lets the scheduler sleep while idle."""
        ...

    def close(self) -> None:
        """Stop the thread and deregister memory. Idempotent."""
        ...


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
