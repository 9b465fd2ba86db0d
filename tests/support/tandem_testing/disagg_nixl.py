"""NIXL transports over small CPU pools, and a receiver in a process of its own that can be killed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec
import torch

from tandem_engine.clock import MonotonicClock
from tandem_engine.disaggregation.nixl.transport import NixlTransport
from tandem_engine.disaggregation.transport import Push, PushKey, TransportEvent
from tandem_engine.memory.pool import KvPool
from tandem_engine.messages.transfer import Hello
from tandem_engine.names import PageId
from tandem_testing.disagg_network import make_peer

PATIENCE = 20.0
"""Seconds after which a test gives up waiting; nothing should take a tenth of it."""

Event = TypeVar("Event")


def make_pool(*, num_pages: int = 65, fill: int = 0) -> KvPool:
    pool = KvPool(
        num_pages=num_pages,
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
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
        deadline = time.monotonic() + PATIENCE
        while True:
            self.events += self.transport.poll()
            found = [event for event in self.events if isinstance(event, kind)]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"{len(found)} of {count} {kind.__name__}, got {self.events}"
            time.sleep(0.001)


@contextmanager
def nixl_node(worker_id: str, number: int = 1, *, fill: int = 0) -> Iterator[Node]:
    pool = make_pool(fill=fill)
    node = Node(pool=pool, transport=NixlTransport(me=make_peer(worker_id, number), pool=pool, clock=MonotonicClock()))
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
        assert here.poll(PATIENCE * 3), "the receiver did not start"
        yield RemoteReceiver(process=process, hello=msgspec.msgpack.decode(here.recv_bytes(), type=Hello))
    finally:
        process.kill()
        process.join()


def _receive(worker_id: str, parent: Connection) -> None:
    with nixl_node(worker_id) as node:
        node.transport.expect(1)
        parent.send_bytes(msgspec.msgpack.encode(node.transport.hello()))
        parent.poll(None)
