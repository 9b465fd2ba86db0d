"""`KvTransport` over NIXL: cuda_ipc or RDMA between GPUs, shared memory or TCP between CPUs.

This half runs on the scheduler thread and only exchanges messages with `TransferThread`.
"""

import queue
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from tandem_engine.base.clock import Clock
from tandem_engine.base.environment import read_environment
from tandem_engine.base.names import DigestKind
from tandem_engine.disaggregation.digest import PageDigester, answer
from tandem_engine.disaggregation.nixl.agent import Interfaces, NixlAgent, own_devices, ucx_memory, ucx_network, watched
from tandem_engine.disaggregation.nixl.layout import Region, warm_up
from tandem_engine.disaggregation.nixl.queues import Command, Connect, Expect, Forget, Outbox, StartPush, Stop
from tandem_engine.disaggregation.nixl.thread import TransferThread
from tandem_engine.disaggregation.packed_pages import PackedPages
from tandem_engine.disaggregation.transport import (
    DigestOrder,
    PagePool,
    Push,
    StateSlots,
    TransportEvent,
    machine_name,
    rdma_is_up,
    rdma_ports,
    usable_transports,
)
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import GroupPool, Hello

CLOSE_TIMEOUT = 5.0
"""Seconds for the thread to finish the write it is in."""

SHORT_BYTES = 64 << 20
"""Pages in main memory of so many bytes have sampled digests in less time than it takes to wake another thread."""


class NixlTransport:
    """Registers `pool` and serves it to peers under the name of this incarnation."""

    def __init__(
        self,
        *,
        me: Peer,
        pool: PagePool,
        clock: Clock,
        states: StateSlots | None = None,
        leave: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`leave` is called, on another thread and more than once, with the reason why this process should make way
        for a new one. `states`: of layers that keep them, on the device of `pool`.

        Raises `TransportUnavailableError` when NIXL is not installed or cannot start here.
        """
        warm_up()
        self._region = region_of(pool)
        environment = read_environment()
        net_devices = environment.ucx_net_devices or own_devices(me.endpoint, rdma_ports())
        interfaces = Interfaces(watched(me.endpoint, net_devices))
        further = () if states is None else (region_of_states(states),)
        variables = ucx_network(me.endpoint, net_devices) | ucx_memory(self._region.device)
        agent = NixlAgent(me.incarnation, self._region, interfaces, variables=variables, further=further)
        self._hello = Hello(
            sender=me,
            nixl_metadata=agent.metadata,
            pool_address=self._region.address,
            page_bytes=self._region.page_bytes,
            num_pages=self._region.num_pages,
            heads=self._region.heads,
            device=self._region.device,
            device_id=self._region.device_id,
            machine=machine_name(),
            transports=usable_transports(environment.ucx_tls, device=self._region.device, rdma=rdma_is_up()),
            groups=UNSET if states is None else (group_pool(states),),
            unpacks=True,
        )
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._outbox = Outbox()
        self._expected = 0
        self._closed = False
        self._digester = PageDigester(
            pool, states=None if states is None else PageDigester(states, head_blocks=states.head_blocks)
        )
        thread = TransferThread(
            agent=agent,
            digester=self._digester,
            region=self._region,
            packed=PackedPages.of(pool, register=agent.register),
            further=further,
            clock=clock,
            inbox=self._inbox,
            outbox=self._outbox,
            interfaces=interfaces,
            leave=leave,
        )
        self._errors = thread.errors
        self._thread = thread.start()

    def hello(self) -> Hello:
        return self._hello

    def rename(self, me: Peer) -> None:
        """This incarnation has KV of another model now; where it lies is the same."""
        self._hello = msgspec.structs.replace(self._hello, sender=me)

    def connect(self, hello: Hello) -> None:
        self._inbox.put(Connect(hello))

    def forget(self, incarnation: str) -> None:
        self._inbox.put(Forget(incarnation))

    def packs(self, peer: str) -> bool:  # noqa: ARG002 - whole pages, or what a push says
        return False

    def push(self, push: Push) -> None:
        self._inbox.put(StartPush(push))

    def digest(self, order: DigestOrder) -> None:
        sampled = order.kind is DigestKind.SAMPLED and not order.states
        short = len(order.pages) * self._region.page_bytes <= SHORT_BYTES
        if sampled and short and self._region.device == "DRAM" and not order.packed:
            self._outbox.put(answer(order, self._digester.begin_order(order)))
        else:
            self._inbox.put(order)

    def expect(self, transfers: int) -> None:
        if transfers != self._expected:
            self._expected = transfers
            self._inbox.put(Expect(transfers))

    def poll(self) -> list[TransportEvent]:
        return self._outbox.take()

    @property
    def alone(self) -> bool:
        return True

    @property
    def errors(self) -> int:
        return self._errors.count

    def fileno(self) -> int:
        return self._outbox.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._inbox.put(Stop())
        self._thread.join(CLOSE_TIMEOUT)
        if not self._thread.is_alive():
            self._outbox.close()


def group_pool(states: StateSlots) -> GroupPool:
    """Where they lie, for peers."""
    return GroupPool(
        address=states.address, slot_bytes=states.page_bytes, num_slots=states.num_pages, layout=states.name
    )


def region_of(pool: PagePool) -> Region:
    """Where a pool lies, in NIXL's terms."""
    device = pool.bytes_view().device
    kind = "VRAM" if device.type == "cuda" else "DRAM"
    layout = pool.layout
    return Region(
        pool.address,
        pool.page_bytes,
        pool.num_pages,
        kind,
        device.index or 0,
        layers=layout.layers,
        heads=layout.heads,
        parts=layout.parts,
    )


def region_of_states(states: StateSlots) -> Region:
    """Where states lie, and their heads."""
    return region_of(states)._replace(heads=states.key_heads or 1, blocks=states.head_blocks)
