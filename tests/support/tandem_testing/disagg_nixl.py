"""NIXL transports over small CPU pools, and peers in processes of their own that can be killed or stopped."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.nixl.transport import NixlTransport
from tandem_engine.disaggregation.transport import Push, PushDone, PushKey, TransportEvent
from tandem_engine.memory.pool import KvPool
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import Hello
from tandem_testing.disagg_network import make_peer

TIMEOUT_S = 90.0
"""Seconds after which a test gives up waiting; nothing should take a tenth of it."""

Event = TypeVar("Event")


def make_pool(*, num_pages: int = 65, fill: int = 0, head_dim: int = 16) -> KvPool:
    pool = KvPool(
        num_pages=num_pages,
        num_layers=2,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=16,
        dtype=torch.float32,
        device="cpu",
    )
    pool.data.fill_(fill)
    return pool


@dataclass(kw_only=True)
class Node:
    """A transport, its pool and every event it has reported."""

    pool: KvPool
    transport: NixlTransport
    events: list[TransportEvent] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.transport.hello().sender.incarnation

    def wait_for(self, kind: type[Event], count: int = 1) -> list[Event]:
        """Poll until `count` events of a kind have come."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self.events += self.transport.poll()
            found = [event for event in self.events if isinstance(event, kind)]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"{len(found)} of {count} {kind.__name__}, got {self.events}"
            time.sleep(0.001)


@contextmanager
def nixl_node(
    worker_id: str, number: int = 1, *, endpoint: str = "", fill: int = 0, num_pages: int = 65, head_dim: int = 16
) -> Iterator[Node]:
    """`endpoint`: where its engine would listen for peers."""
    pool = make_pool(fill=fill, num_pages=num_pages, head_dim=head_dim)
    me = make_peer(worker_id, number)
    me = msgspec.structs.replace(me, endpoint=endpoint or me.endpoint)
    node = Node(pool=pool, transport=NixlTransport(me=me, pool=pool, clock=MonotonicClock()))
    try:
        yield node
    finally:
        node.transport.close()


def make_push(
    peer: str, source: tuple[int, ...], target: tuple[int, ...], *, room: str = "room", first: int = 0, **more: object
) -> Push:
    return Push(
        key=PushKey(room=room, generation=1, first=first, count=len(source)),
        peer=peer,
        source=tuple(PageId(page) for page in source),
        target=tuple(PageId(page) for page in target),
        **more,
    )


@dataclass(kw_only=True)
class RemoteReceiver:
    """A receiver in another process, which listens for writes until it is killed."""

    process: multiprocessing.process.BaseProcess
    hello: Hello

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@contextmanager
def remote_receiver(worker_id: str) -> Iterator[RemoteReceiver]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(worker_id, there), daemon=True)
    process.start()
    try:
        assert here.poll(TIMEOUT_S * 3), "the receiver did not start"
        yield RemoteReceiver(process=process, hello=msgspec.msgpack.decode(here.recv_bytes(), type=Hello))
    finally:
        process.kill()
        process.join()


def _receive(worker_id: str, parent: Connection) -> None:
    with nixl_node(worker_id) as node:
        node.transport.expect(1)
        parent.send_bytes(msgspec.msgpack.encode(node.transport.hello()))
        parent.poll(None)


@dataclass(kw_only=True)
class RemoteWriter:
    """A writer in another process, which listens for peers as an engine does, and fills all pages on demand."""

    process: multiprocessing.process.BaseProcess
    peer: Peer
    line: Connection

    def write_everything(self, first: int) -> None:
        """Begin to write every page but the first; `wait` for the end. `first` numbers the pushes."""
        self.line.send(first)

    def wait(self) -> None:
        assert self.line.poll(TIMEOUT_S), "the write did not end"
        self.line.recv()

    def stop(self) -> None:
        """Returns when it has stopped."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + TIMEOUT_S
        while Path(f"/proc/{self.process.pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "it did not stop"

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def remote_writer(worker_id: str, receiver: Node) -> Iterator[RemoteWriter]:
    """Its pages are as many and as large as those of `receiver`, and full of ones."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    shape = (receiver.pool.num_pages, receiver.pool.data.shape[-1])
    process = context.Process(target=_write, args=(worker_id, *shape, there), daemon=True)
    process.start()
    try:
        here.send_bytes(msgspec.msgpack.encode(receiver.transport.hello()))
        assert here.poll(TIMEOUT_S * 3), "the writer did not start"
        port = here.recv()
        peer = msgspec.structs.replace(make_peer(worker_id), endpoint=f"tcp://127.0.0.1:{port}")
        yield RemoteWriter(process=process, peer=peer, line=here)
    finally:
        process.kill()
        process.join()


def _write(worker_id: str, num_pages: int, head_dim: int, parent: Connection) -> None:
    hello = msgspec.msgpack.decode(parent.recv_bytes(), type=Hello)
    pages = (*range(1, num_pages),)
    with (
        nixl_node(worker_id, fill=1, num_pages=num_pages, head_dim=head_dim) as node,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        node.transport.connect(hello)
        # The first write connects.
        node.transport.push(make_push(hello.sender.incarnation, (1,), (1,), room="connect"))
        node.wait_for(PushDone)
        parent.send(listener.getsockname()[1])
        while True:
            first = parent.recv()
            node.transport.push(make_push(hello.sender.incarnation, pages, pages, first=first))
            node.wait_for(PushDone, len(node.events) + 1)
            parent.send(None)
