"""Packed slices in the transfer thread: a ring with one slot, larger pushes, lost peers, layers in turn."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import pytest
import torch

from tandem_engine.base.errors import TransferError
from tandem_engine.base.names import PageId
from tandem_engine.disaggregation import packed_pages
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl.layout import Descriptors
from tandem_engine.disaggregation.nixl.queues import Command, Connect, Forget, Outbox, StartPush, Stop, Wake
from tandem_engine.disaggregation.nixl.thread import TransferThread
from tandem_engine.disaggregation.nixl.transport import region_of
from tandem_engine.disaggregation.packed_pages import SLOT_WAIT_S, PackedPages, unpack, words_of
from tandem_engine.disaggregation.ranks.slices import head_slices
from tandem_engine.disaggregation.transport import HeadPart, Push, PushDone, PushFailed, PushKey, TransportEvent
from tandem_engine.memory.pool import KvPool
from tandem_engine.messages.transfer import Hello
from tandem_testing.disagg_network import make_peer
from tandem_testing.nixl_hello import hello_like
from tandem_testing.scheduler_builders import ManualClock

LAYERS, HEADS, PAGES = 3, 4, 6
SOURCE = tuple(PageId(page) for page in (4, 1, 6, 2, 3))
TARGET = tuple(PageId(page) for page in (1, 2, 3, 6, 5))
THERE = make_peer("there")


def pool_of(heads: int, *, head_dim: int = 4) -> KvPool:
    pool = KvPool(
        num_pages=PAGES + 1, num_layers=LAYERS, num_kv_heads=heads, head_dim=head_dim, page_size=4,
        dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    pool.data.copy_(torch.arange(pool.data.numel()).view(pool.data.shape) % 251)
    return pool


@dataclass
class Mover:
    """NIXL whose WRITEs are over after so many looks, and move bytes then."""

    looks: int = 1
    stopped: str = ""
    """A peer whose WRITEs never end."""
    registered: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    """Ranges of each."""
    open: int = 0
    most_open: int = 0

    def register(self, address: int, size: int) -> None:
        self.registered.append(size)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Every peer is there."""

    def remove_peer(self, name: str) -> None:
        """Nothing is left of it."""

    def write(self, peer: str, descriptors: Descriptors, device: str) -> list[object]:
        self.writes.append(len(descriptors.source))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return [math.inf if peer == self.stopped else self.looks, descriptors]

    def progress(self, write: list[object]) -> bool:
        write[0] -= 1
        if write[0] > 0:
            return False
        source, target = (side.tolist() for side in write[1])
        for (here, size, _), (there, room, _) in zip(source, target, strict=True):
            assert size == room
            ctypes.memmove(there, here, size)
        return True

    def release(self, write: object) -> None:
        self.open -= 1

    def attend(self) -> None:
        """Nobody else writes."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Turns:
    """Commands one by one, then as many turns as it takes."""

    commands: list[Command | Callable[[], object]]
    turns: int = 40

    def get(self, timeout: float) -> Command:
        if self.commands:
            command = self.commands.pop(0)
            if not callable(command):
                return command
            command()
            return Wake()
        self.turns -= 1
        return Wake() if self.turns > 0 else Stop()


def run(
    agent: Mover,
    here: KvPool,
    there: KvPool,
    commands: list[Command | Callable[[], object]],
    *,
    slot_pages: int,
    heads: int,
    clock: ManualClock | None = None,
) -> list[TransportEvent]:
    """What becomes of `commands` with a ring of one slot, of so many pages with `heads` of all layers."""
    outbox, region = Outbox(), region_of(here)
    packed = PackedPages.of(here, register=agent.register)
    packed.slots = 1
    packed.slot_bytes = slot_pages * packed.slice_bytes(range(LAYERS), range(heads))
    TransferThread(
        agent=agent,
        digester=PageDigester(here),
        region=region,
        packed=packed,
        clock=clock or ManualClock(),
        inbox=Turns([Connect(hello_of(there)), *commands]),
        outbox=outbox,
    ).run()
    assert agent.open == 0, "every write was given back"
    assert packed._free == [0] or packed._ring is None, "and the slot"
    events = outbox.take()
    outbox.close()
    return events


def hello_of(there: KvPool) -> Hello:
    target = region_of(there)
    return msgspec.structs.replace(hello_like(target, THERE), pool_address=target.address)


def push_of(heads: HeadPart, *, first: int = 0, pages: slice = slice(None), **more: object) -> Push:
    source, target = SOURCE[pages], TARGET[pages]
    key = PushKey(room=f"0/1>0/2|room{first}", generation=1, first=first, count=len(source))
    return Push(key=key, peer=THERE.incarnation, source=source, target=target, heads=heads, packed=True, **more)


@pytest.mark.parametrize("slot_pages", [1, 2, 9])
def test_push_goes_through_a_ring_of_one_slot(slot_pages):
    """Some pages at a time where the slot is smaller."""
    agent, here, there = Mover(), pool_of(HEADS), pool_of(2)
    part = HeadPart(range(2, 4), range(2))
    events = run(agent, here, there, [StartPush(push_of(part))], slot_pages=slot_pages, heads=2)
    assert [type(event) for event in events] == [PushDone]
    assert torch.equal(there.data[list(TARGET)], here.data[list(SOURCE)][:, :, :, 2:4])
    assert len(agent.registered) == 1
    assert agent.writes == {1: [1] * 5, 2: [1, 2, 1], 9: [3]}[slot_pages], "pages 1 to 3 there are neighbours"


def test_two_pushes_share_the_only_slot_in_turn():
    agent, here, there = Mover(looks=3), pool_of(HEADS), pool_of(1)
    parts = [HeadPart(range(1), range(1)), HeadPart(range(3, 4), range(1))]
    pushes = [push_of(parts[0], pages=slice(0, 2)), push_of(parts[1], first=2, pages=slice(2, 5))]
    events = run(agent, here, there, [StartPush(push) for push in pushes], slot_pages=3, heads=1)
    assert [type(event) for event in events] == [PushDone] * 2
    assert agent.most_open == 1
    for part, pages in zip(parts, (slice(0, 2), slice(2, 5)), strict=True):
        sent = here.data[list(SOURCE[pages])][:, :, :, part.source.start : part.source.stop]
        assert torch.equal(there.data[list(TARGET[pages])], sent)


def test_slot_of_a_lost_peer_is_free_again():
    agent, here, there = Mover(looks=1000), pool_of(HEADS), pool_of(2)
    part = HeadPart(range(2), range(2))
    commands = [StartPush(push_of(part)), StartPush(push_of(part, first=5)), Forget(THERE.incarnation)]
    events = run(agent, here, there, commands, slot_pages=9, heads=2)
    assert [type(event) for event in events] == [PushFailed] * 2


@pytest.mark.parametrize(
    "refusal", [TransferError("no memory"), torch.OutOfMemoryError(), RuntimeError("can't allocate")]
)
def test_slices_go_by_ranges_to_the_same_place_without_a_ring(refusal, monkeypatch, caplog):
    """Else no push to such a peer would succeed on a card that is full."""
    agent, here, there = Mover(), pool_of(HEADS), pool_of(4)

    def refuse(address: int, size: int) -> None:
        raise refusal

    monkeypatch.setattr(agent, "register", refuse)
    steps = Steps(1)
    part = HeadPart(range(1, 3), range(2, 4))
    pushes = [replace(push_of(part, pages=slice(0, 2)), progress=steps), push_of(part, first=2, pages=slice(2, 5))]
    commands = [*(StartPush(push) for push in pushes), Wake(), partial(steps.reach, 3)]
    packed = there.data.clone()
    events = run(agent, here, there, commands, slot_pages=9, heads=2)
    assert [type(event) for event in events] == [PushDone] * 2
    for page, source in zip(TARGET, SOURCE, strict=True):
        run_of_heads = packed[page].flatten()[packed[page].numel() // 2 :]
        run_of_heads.copy_(here.data[source][:, :, 1:3].flatten())
    assert torch.equal(there.data, packed), "nothing else is written"
    assert caplog.text.count("to pack slices in") == 1


def test_stopped_peer_with_all_slots_does_not_hold_up_others():  # [peer-error-contained]
    """A peer that stands still has its WRITEs for as long as `STUCK_S`."""
    agent, here, there = Mover(stopped=THERE.incarnation), pool_of(HEADS), pool_of(2)
    clock, part, healthy = ManualClock(), HeadPart(range(2), range(2)), make_peer("healthy")
    commands = [
        Connect(msgspec.structs.replace(hello_of(there), sender=healthy)),
        StartPush(push_of(part, pages=slice(1, 5))),
        StartPush(replace(push_of(part, first=5, pages=slice(0, 1)), peer=healthy.incarnation)),
        Wake(),
        lambda: setattr(clock, "time", SLOT_WAIT_S),
    ]
    events = run(agent, here, there, commands, slot_pages=9, heads=2, clock=clock)
    assert [type(event) for event in events] == [PushDone, PushFailed]
    assert torch.equal(there.data[TARGET[0]], here.data[SOURCE[0]][:, :, :2])


def test_packed_slice_is_not_written_after_its_grant_expired(monkeypatch):  # [grant-expiry]
    """A device may be packing it for long."""
    agent, here, there = Mover(), pool_of(HEADS), pool_of(2)
    clock, filled = ManualClock(), []
    monkeypatch.setattr(packed_pages.Arrived, "query", lambda _: bool(filled))
    push = replace(push_of(HeadPart(range(2), range(2))), start_before=1.0)
    commands = [StartPush(push), Wake(), lambda: setattr(clock, "time", 1.0), partial(filled.append, True)]
    (event,) = run(agent, here, there, commands, slot_pages=9, heads=2, clock=clock)
    assert isinstance(event, PushFailed)
    assert event.reason == "the grant expired"
    assert agent.writes == []


def test_slot_is_free_again_after_a_copy_that_failed(monkeypatch):
    agent, here, there = Mover(), pool_of(HEADS), pool_of(2)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "index_select", full)
    (event,) = run(agent, here, there, [StartPush(push_of(HeadPart(range(2), range(2))))], slot_pages=9, heads=2)
    assert isinstance(event, PushDone), "by ranges"
    assert torch.equal(there.data[list(TARGET)], here.data[list(SOURCE)][:, :, :, :2])


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (3, 2), (2, 3), (6, 1)])
def test_layers_in_turn_make_pages_whole_once_unpacked(senders, receivers):
    """Also where no number of heads divides the other: 6 heads on 2 and on 3 ranks."""
    whole = pool_of(6)
    senders_pools, receivers_pools = ([pool_of(6 // n) for _ in range(n)] for n in (senders, receivers))
    for pool, heads in zip(senders_pools, whole.data.chunk(senders, dim=3), strict=True):
        pool.data.copy_(heads)
    slices = head_slices(6, senders=senders, receivers=receivers)
    for one in slices:
        steps = Steps(1)
        push = replace(push_of(one.part), progress=steps)
        here, there = senders_pools[one.sender], receivers_pools[one.receiver]
        commands = [StartPush(push), Wake(), partial(steps.reach, 2), Wake(), partial(steps.reach, 3)]
        agent = Mover()
        (event,) = run(agent, here, there, commands, slot_pages=2, heads=len(one.part.source))
        assert isinstance(event, PushDone), event
    for rank, (pool, heads) in enumerate(zip(receivers_pools, whole.data.chunk(receivers, dim=3), strict=True)):
        parts = [one.part.target for one in slices if one.receiver == rank]
        if len(parts) > 1:
            unpack(words_of(pool), TARGET, pool.layout, parts)
        assert torch.equal(pool.data[list(TARGET)], heads[list(SOURCE)])


@dataclass
class Steps:
    """Implements what a push asks of `KvProgress`."""

    layers: int

    def on_end(self, then: object) -> None:
        """The test takes a turn by itself."""

    def reach(self, layers: int) -> None:
        self.layers = layers
