"""Groups by torch.distributed: gloo between CPU ranks, NCCL between GPU ranks.

Process groups are made directly and not through `init_process_group`, which would keep them in globals of the process:
an engine owns its groups, and a process may hold ranks of several engines, or several ranks of one.

Where all ranks run on one machine, gloo is bound to the loopback device and the store is a file that only this user can
read, so a group cannot be reached from outside [private-channels]. Between nodes gloo is bound to the address by which
the nodes reach each other, and the store serves ranks of this engine alone (`parallel.node_store`).

Gloo accepts the first connection that has the number of a pair as its other end. So once a group between nodes is
formed, each pair proves that both ends have a secret from the store, which only ranks of this engine can read
(`require_proofs`). NCCL requires such a secret by itself: the magic of its unique id.
"""

import fcntl
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from tandem_engine.base.addresses import LOOPBACK, ip_of, is_ipv6
from tandem_engine.base.environment import set_default
from tandem_engine.base.errors import ConfigError, RankLostError
from tandem_engine.parallel.group import FirstFailure, Parallel, use_device

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


PROOF_BYTES = 32

PROOF_KEY = "proof"
"""In the store of the meeting."""

Exchange = Callable[[Tensor, Tensor], None]
"""(output, input), both [ranks, PROOF_BYTES] uint8: row r of the input goes to rank r, and row r of the output is
from rank r."""


def require_proofs(store: Store, exchange: Exchange, *, rank: int, size: int) -> None:
    """Exchange proofs with every rank. `store` is that of this meeting alone.

    Raises `RankLostError` when a connection leads to a process that does not know the secret.
    """
    if rank == 0:
        store.set(PROOF_KEY, secrets.token_hex(PROOF_BYTES))
    secret = bytes(store.get(PROOF_KEY))
    mine = torch.stack([_tensor(proof(secret, sender=rank, receiver=other)) for other in range(size)])
    theirs = torch.zeros_like(mine)
    exchange(theirs, mine)
    for other in range(size):
        expected = proof(secret, sender=other, receiver=rank)
        if not secrets.compare_digest(theirs[other].numpy().tobytes(), expected):
            raise RankLostError(f"rank {rank} of {size} connected to a process that is not rank {other}")


def proof(secret: bytes, *, sender: int, receiver: int) -> bytes:
    """What rank `sender` shows to rank `receiver`: [PROOF_BYTES]."""
    return blake2b(f"{sender}>{receiver}".encode(), key=secret[:64], digest_size=PROOF_BYTES).digest()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


NO_TIMEOUT_S = 365 * 24 * 3600.0
"""An engine may have nothing to do for days; the scheduler's ranks notice each other's end by their connections."""

POLL_S = 0.002
"""Between looks for ranks that have come. Ranks come to a meeting within a step of each other."""


class Collectives(Protocol):
    """What torch's process groups have in common. Each call starts a collective, and `Work.wait` completes it."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions = ..., /) -> dist.Work: ...

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> dist.Work: ...

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> dist.Work: ...


class TorchGroup:
    """Implements `TpGroup` over one torch process group at a time."""

    def __init__(self, form: Callable[[int], Collectives], *, rank: int, size: int, can_meet_again: bool) -> None:
        """Meet the other ranks.

        Args:
            form: makes the `ProcessGroupGloo` or `ProcessGroupNCCL` of the n-th meeting, which no other group uses.
        """
        self.rank = rank
        self.size = size
        self.can_meet_again = can_meet_again
        self._form = form
        self._meetings = 1
        self._collectives: Collectives | None = form(self._meetings)
        self._minimum = dist.AllreduceOptions()
        self._minimum.reduceOp = cast("dist.ReduceOp", dist.ReduceOp.MIN)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self._complete(lambda group: group.allreduce([tensor]))
        return tensor

    def least(self, tensor: Tensor) -> Tensor:
        self._complete(lambda group: group.allreduce([tensor], self._minimum))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        rows, width = tensor.shape
        gathered = tensor.new_empty((self.size * rows, width))
        if rows:
            self._complete(lambda group: group._allgather_base(gathered, tensor))
        return gathered.view(self.size, rows, width).transpose(0, 1).reshape(rows, self.size * width)

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._complete(lambda group: group.broadcast([tensor], dist.BroadcastOptions()))
        return tensor

    def leave(self) -> None:
        # The last reference: torch closes the connections.
        self._collectives = None

    def meet_again(self) -> None:
        if self._collectives is None:
            self._meetings += 1
            self._collectives = self._form(self._meetings)

    def _complete(self, start: Callable[[Collectives], dist.Work]) -> None:
        assert self._collectives is not None, "a collective on a group that was left"
        try:
            start(self._collectives).wait()
        except RuntimeError as error:
            # Torch has no narrower type for a peer that closed its connection, or never came.
            # Its first sentence says what happened, the others give advice.
            reason = str(error).partition(". ")[0] or type(error).__name__
        else:
            return
        # Not chained: the traceback of torch's error would keep the connections open after `leave`.
        raise RankLostError(f"rank {self.rank} of {self.size} failed to exchange data: {reason}")


def join_ranks(
    store: Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    failure: FirstFailure | None = None,
    host: str | None = None,
) -> Parallel:
    """Meet the other ranks and form both groups. Blocks until all have come.

    Args:
        store: shared by all ranks, and by no other engine.
        timeout_s: how long a rank waits for the others, here and in each collective of a forward.
        failure: this rank's, which ends a wait for others early; None makes a new one.
        host: address of this node by which those of other nodes reach it; None when all ranks are on one machine.

    Raises:
        ConfigError: there is no backend for `device`.
        RankLostError: another rank did not come in time.
    """
    failure = failure or FirstFailure()
    on_host = torch.device("cpu")
    place = Place(store=store, rank=rank, size=size, failure=failure, host=host)
    return Parallel(
        forward=_group(place, "forward", device=device, timeout_s=timeout_s),
        # The scheduler agrees on things that the host knows, whatever computes the forward.
        schedule=_group(place, "schedule", device=on_host, timeout_s=NO_TIMEOUT_S, arrival_s=timeout_s),
        failure=failure,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank meets the others."""

    store: Store
    rank: int
    size: int
    failure: FirstFailure
    host: str | None = None
    """See `join_ranks`."""

    def await_others(self, meeting: str, timeout_s: float) -> None:
        """Return when every rank has come to `meeting`. Raises `RankLostError` when one does not."""
        deadline = time.monotonic() + timeout_s
        self.store.set(f"{meeting}/{self.rank}", "1")
        all_ranks = [f"{meeting}/{rank}" for rank in range(self.size)]
        while not self.store.check(all_ranks):
            self.failure.raise_if_any()
            if time.monotonic() > deadline:
                raise RankLostError(
                    f"rank {self.rank} of {self.size} did not meet the others within {timeout_s:g} s; "
                    "raise --dist-timeout"
                )
            time.sleep(POLL_S)


def _group(
    place: Place, name: str, *, device: torch.device, timeout_s: float, arrival_s: float | None = None
) -> TorchGroup:
    """`timeout_s` bounds a collective, `arrival_s` the others' coming, as long if None."""
    make = _maker(device, place.host)

    def form(meeting: int) -> Collectives:
        label = f"{name}-{meeting}"
        arrival = arrival_s or timeout_s
        place.await_others(label, arrival)
        store = PrefixStore(label, place.store)
        try:
            made = make(store, place.rank, place.size, timedelta(seconds=timeout_s))
            if place.host is not None and device.type == "cpu":
                require_proofs(store, _exchange(made, arrival), rank=place.rank, size=place.size)
        except RuntimeError as error:
            raise RankLostError(f"rank {place.rank} of {place.size} did not meet the others: {error}") from error
        # Torch's stubs do not know the methods of its process groups, and a build without NCCL not even the class.
        return cast("Collectives", made)

    return TorchGroup(form, rank=place.rank, size=place.size, can_meet_again=device.type == "cpu")


def _exchange(made: object, timeout_s: float) -> Callable[[Tensor, Tensor], None]:
    def exchange(output: Tensor, rows: Tensor) -> None:
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        # As for `Collectives`: the stubs do not know it.
        made.alltoall_base(output, rows, [], [], options).wait()  # type: ignore[attr-defined]

    return exchange


def _maker(device: torch.device, host: str | None) -> Callable[[Store, int, int, timedelta], object]:
    match device.type:
        case "cpu":
            return partial(_make_gloo, host or LOOPBACK)
        case "cuda":
            if not dist.is_nccl_available():
                raise ConfigError("--tensor-parallel-size above 1 on --device cuda needs a build of torch with NCCL")
            return partial(_make_nccl, device, host)
    raise ConfigError(f"--tensor-parallel-size above 1 works on --device cpu and cuda, got {device.type}")


def _make_gloo(host: str, store: Store, rank: int, size: int, timeout: timedelta) -> object:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _make_nccl(
    device: torch.device, host: str | None, store: Store, rank: int, size: int, timeout: timedelta
) -> object:
    if host is not None:
        # Else NCCL may listen on another network of the machine.
        set_default("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")
        if is_ipv6(host):
            set_default("NCCL_SOCKET_FAMILY", "AF_INET6")
    use_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
