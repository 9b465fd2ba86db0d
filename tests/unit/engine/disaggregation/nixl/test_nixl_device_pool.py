"""A transfer never touches pages on a device from the host: it moves their addresses, and others read the bytes."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation import digest
from tandem_engine.disaggregation.nixl import transport as nixl_transport
from tandem_engine.disaggregation.nixl.transport import NixlTransport
from tandem_engine.disaggregation.transport import DigestOrder, Digests, Push, PushDone, PushKey
from tandem_engine.memory.pool import PageLayout
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import Hello
from tandem_testing.waiting import wait_for

PAGE_BYTES, ADDRESS = 4096, 1 << 40


class OnGpu(torch.Tensor):
    """Reports that it is on a GPU, and has no bytes that could be read."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)


class DevicePool:
    """A `PagePool` without a byte."""

    num_pages, page_bytes, address = 8, PAGE_BYTES, ADDRESS
    layout = PageLayout(layers=2, heads=2, slots=4, row_bytes=128)

    def bytes_view(self) -> torch.Tensor:
        return torch.Tensor._make_subclass(OnGpu, torch.empty(8, PAGE_BYTES, dtype=torch.uint8, device="meta"))


@dataclass
class Made:
    """Digests that a device has made."""

    digests: np.ndarray

    def ready(self) -> bool:
        return True

    def take(self) -> tuple[int, ...]:
        return tuple(self.digests.tolist())


class Agent:
    """Takes writes down, all of which are done at once."""

    written: list[tuple[list[list[int]], str]]
    threads: list[tuple[str, int]]
    """That were given a GPU, and which."""
    metadata = b"agent"

    def __init__(self, name: str, region: object) -> None:
        self.written, self.threads = [], []

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Every peer is accepted."""

    def write(self, peer: str, descriptors, device: str) -> object:
        self.written.append((descriptors.source.tolist(), device))
        return object()

    def progress(self, write: object) -> bool:
        return True

    def release(self, write: object) -> None:
        """Nothing to release."""

    def remove_peer(self, name: str) -> None:
        """Nothing to forget."""

    def attend(self) -> None:
        """No other peer writes."""

    def register(self, address: int, size: int) -> None:
        raise AssertionError("whole pages are not packed")

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def agent(monkeypatch) -> list[Agent]:
    made: list[Agent] = []

    def make(name: str, region: object, _: object, *, variables: dict[str, str], further: tuple[()]) -> Agent:
        assert further == ()
        made.append(Agent(name, region))
        return made[-1]

    def by_kernels(words: torch.Tensor, layout: PageLayout):
        assert words.device == torch.device("cuda", 1)
        return lambda kind, pages, keys, tail, heads: Made(keys)  # noqa: ARG005

    def use(index: int) -> None:
        for each in made:
            each.threads.append((threading.current_thread().name, index))

    monkeypatch.setattr(torch.cuda, "set_device", use)
    monkeypatch.setattr(nixl_transport, "NixlAgent", make)
    monkeypatch.setattr(digest, "makers_on_device", by_kernels)
    return made


def peer(name: str) -> Peer:
    return Peer(worker_id=name, incarnation=f"{name}@1", endpoint="tcp://127.0.0.1:1", compat_hash="h")


def test_device_pages_are_written_and_digested_on_the_device(agent):
    transport = NixlTransport(me=peer("here"), pool=DevicePool(), clock=MonotonicClock())
    hello = transport.hello()
    assert (hello.device, hello.device_id, hello.pool_address) == ("VRAM", 1, ADDRESS)
    transport.connect(
        Hello(
            sender=peer("there"), nixl_metadata=b"", pool_address=1 << 41, page_bytes=PAGE_BYTES, num_pages=8, heads=2,
            device="VRAM", device_id=0, machine=hello.machine, transports=hello.transports,
        )
    )  # fmt: skip
    key = PushKey(room="room", generation=1, first=0, count=2)
    transport.push(Push(key=key, peer="there@1", source=(PageId(3), PageId(4)), target=(PageId(1), PageId(2))))
    transport.digest(DigestOrder(room="room", generation=1, pages=(PageId(5),), kind=DigestKind.SAMPLED, tail=0))
    events = []
    wait_for(lambda: events.extend(transport.poll()) or len(events) == 2, 30.0)
    transport.close()
    assert {type(event) for event in events} == {PushDone, Digests}
    assert agent[0].threads == [("nixl", 1)], "its kernels and copies are for the GPU of the pool"
    assert agent[0].written == [([[ADDRESS + 3 * PAGE_BYTES, 2 * PAGE_BYTES, 1]], "VRAM")]
