"""Digests that a device makes: begun during the last WRITE of a push, fetched when they are ready, in few pieces."""

import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec
import pytest
import torch

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest import Making, PageDigester
from tandem_engine.disaggregation.nixl.layout import Descriptors, Region
from tandem_engine.disaggregation.nixl.queues import Command, Connect, Forget, Outbox, StartPush, Stop
from tandem_engine.disaggregation.nixl.thread import FIRST_PAUSE, MAX_PAUSE, PAUSE_SHARE, TransferThread
from tandem_engine.disaggregation.nixl.transport import group_pool, region_of
from tandem_engine.disaggregation.prefill import ON_DEVICE
from tandem_engine.disaggregation.transport import (
    DigestOrder,
    Digests,
    PagePool,
    Push,
    PushDone,
    PushFailed,
    PushKey,
    TransportEvent,
)
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.memory.state_pool import StatePool, StateSpec
from tandem_engine.messages.transfer import STATES
from tandem_testing.digest_pools import digest_pool
from tandem_testing.disagg_network import make_peer
from tandem_testing.nixl_hello import hello_like
from tandem_testing.scheduler_builders import ManualClock

THERE = make_peer("there")
POOL = digest_pool(num_pages=8)
PAGES = (PageId(1), PageId(2))
TURN_S = 1e-3
BROKEN = RuntimeError("an illegal memory access was encountered")
STATE_SPEC = StateSpec(layers=3, history=3, channels=10, heads=2, key_size=4, value_size=3, dtype=torch.bfloat16)
STATE_POOL = StatePool(STATE_SPEC, rows=4, device="cpu")
STATE_POOL.bytes_view()[2] = 7
ROW = PageId(2)
REGION = Region(POOL.address, POOL.page_bytes, POOL.num_pages, "DRAM", 0, layers=POOL.layout.layers)


@dataclass(kw_only=True)
class Device:
    """Makes digests, which are ready `looks` looks after they were begun; or it is broken, or takes none."""

    looks: int
    broken: bool = False
    full: bool = False
    begun: int = 0


@dataclass(kw_only=True)
class OnDevice:
    made: Making
    device: Device
    looks: int

    def ready(self) -> bool:
        if self.device.broken:
            raise BROKEN
        self.looks -= 1
        return self.looks < 0

    def take(self) -> tuple[int, ...]:
        assert self.looks < 0, "the host waits for the device"
        return self.made.take()


class DeviceDigester(PageDigester):
    """Has its digests made by `device`."""

    def __init__(
        self, pool: PagePool, device: Device, happened: list[str], *, states: PageDigester | None = None
    ) -> None:
        super().__init__(pool, states=states)
        self.in_background, self._device, self._happened = True, device, happened

    def begin(self, pages: Sequence[PageId], **place: object) -> Making:
        self._happened.append("digest")
        if self._device.full:
            raise MemoryError
        self._device.begun += 1
        held = [page if page < POOL.num_pages else PageId(1) for page in pages]
        return OnDevice(made=super().begin(held, **place), device=self._device, looks=self._device.looks)


@dataclass(kw_only=True)
class Nixl:
    """NIXL whose WRITEs are done at the look `ends_at` after each, and the inbox of its thread: a command a turn."""

    turns: Iterator[Command | None]
    ends_at: int
    clock: ManualClock = field(default_factory=ManualClock)
    outbox: Outbox = field(default_factory=Outbox)
    happened: list[str] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    ranges: list[int] = field(default_factory=list)
    """Of each WRITE."""
    events: list[TransportEvent] = field(default_factory=list)
    _looks: int = 0

    def get(self, timeout: float) -> Command:
        self.clock.time += TURN_S
        self.waited.append(timeout)
        self._listen()
        command = next(self.turns, Stop())
        if command is None:
            raise queue.Empty
        return command

    def _listen(self) -> None:
        for event in self.outbox.take():
            self.happened.append(type(event).__name__)
            self.events.append(event)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Every peer is known."""

    def write(self, peer: str, descriptors: Descriptors, device: str) -> object:
        self.happened.append("write")
        self.ranges.append(len(descriptors.source))
        self._looks = 0
        return object()

    def progress(self, write: object) -> bool:
        self._looks += 1
        return self._looks >= self.ends_at

    def release(self, write: object) -> None:
        self._listen()
        self.happened.append("over" if self._looks >= self.ends_at else "given up")

    def remove_peer(self, name: str) -> None:
        self._listen()
        self.happened.append("remove")

    def attend(self) -> None:
        """No peer writes."""

    def close(self) -> None:
        self._listen()


def push(room: str = "room", **fields: object) -> Push:
    key = PushKey(room=room, generation=1, first=0, count=2)
    return replace(Push(key=key, peer=THERE.incarnation, source=PAGES, target=(PageId(3), PageId(4))), **fields)


def order(room: str = "room") -> DigestOrder:
    return DigestOrder(room=room, generation=1, pages=PAGES, kind=DigestKind.SAMPLED, tail=0)


def state_push(room: str = "room") -> Push:
    """Of one state, which counts as one layer, however many layers pages have."""
    return push(
        key=PushKey(room=room, generation=1, first=0, count=1, group=STATES), source=(ROW,), target=(PageId(3),)
    )


def proof(room: str) -> tuple[int, ...]:
    return PageDigester(POOL).begin(PAGES, room=room, generation=1, first=0).take()


def state_proof(room: str) -> tuple[int, ...]:
    place = {"room": room, "generation": 1, "first": 0, "group": STATES}
    return PageDigester(STATE_POOL).begin((ROW,), kind=DigestKind.FULL, **place).take()


def ran(
    turns: Iterable[Command | None],
    device: Device,
    *,
    ends_at: int = 1,
    region: Region = REGION,
    of_states: Device | None = None,
) -> Nixl:
    """All that happened when these came in turn, after the peer had been met. `of_states`: layers keep states, too."""
    hello, further = hello_like(region, THERE), ()
    if of_states is not None:
        hello, further = msgspec.structs.replace(hello, groups=(group_pool(STATE_POOL),)), (region_of(STATE_POOL),)
    nixl = Nixl(turns=chain([Connect(hello)], turns), ends_at=ends_at)
    states = None if of_states is None else DeviceDigester(STATE_POOL, of_states, nixl.happened)
    TransferThread(
        agent=nixl,
        digester=DeviceDigester(POOL, device, nixl.happened, states=states),
        region=region,
        further=further,
        clock=nixl.clock,
        inbox=nixl,
        outbox=nixl.outbox,
    ).run()
    nixl.outbox.close()
    if nixl.happened[-1] == "remove":
        nixl.happened.pop()  # as the thread ends
    return nixl


@pytest.mark.parametrize(("write_ends", "digest_ends"), [(1, 0), (1, 3), (4, 0), (4, 4)])
def test_push_ends_with_its_write_and_its_digests(write_ends, digest_ends):
    nixl = ran([StartPush(push()), *[None] * 6], Device(looks=digest_ends), ends_at=write_ends)
    assert nixl.happened == ["write", "digest", "over", "PushDone"]
    assert nixl.events == [PushDone(key=push().key, digests=proof("room"), seconds=nixl.events[0].seconds)]


def test_push_by_layers_is_digested_with_its_last_layers():
    progress, device = KvProgress(ManualClock()), Device(looks=1)

    def turns() -> Iterator[Command | None]:
        yield StartPush(push(progress=progress))
        for layer in range(REGION.layers):
            assert device.begun == 0, "layers are digested that are not written"
            progress.wrote(layer)
            yield None
        yield from [None] * 3

    nixl = ran(turns(), device)
    assert nixl.happened == [*["write", "over"] * (REGION.layers - 1), "write", "digest", "over", "PushDone"]
    assert nixl.events[0].digests == proof("room")


def test_lost_peer_takes_pushes_along_that_are_digested():  # [late-write]
    nixl = ran([StartPush(push()), None, Forget(THERE.incarnation), None], Device(looks=9))
    assert nixl.happened == ["write", "digest", "over", "remove", "PushFailed"]
    assert nixl.events[0].peer_lost


def test_order_is_answered_when_its_digests_are_ready():
    """The push after it does not wait for them."""
    nixl = ran([order("received"), StartPush(push("sent")), *[None] * 6], Device(looks=4))
    assert nixl.happened == ["digest", "write", "digest", "over", "Digests", "PushDone"]
    assert nixl.events[0] == Digests(room="received", generation=1, digests=proof("received"))
    assert nixl.events[1].digests == proof("sent")


def test_failed_device_proves_no_page():  # [verified-pages]
    """Each order and each push has its end, and no WRITE is under way by then."""
    nixl = ran([order("received"), StartPush(push("sent")), None], Device(looks=0, broken=True), ends_at=2)
    assert nixl.events[0] == Digests(room="received", generation=1, digests=(0, 0))
    reason = "its pages could not be digested"
    assert nixl.events[1] == PushFailed(key=push("sent").key, reason=reason, peer_lost=False)
    assert nixl.happened.index("over") < nixl.happened.index("PushFailed")


def test_digests_that_cannot_begin_end_a_push_after_its_write():  # [late-write]
    device = Device(looks=0, full=True)
    nixl = ran([StartPush(push()), *[None] * 3], device, ends_at=3)
    assert [each for each in nixl.happened if each != "digest"] == ["write", "over", "PushFailed"]
    assert nixl.happened.index("over") < nixl.happened.index("PushFailed")


@pytest.mark.parametrize(("write_ends", "digest_ends"), [(1, 0), (1, 3), (4, 0), (4, 4)])
def test_state_is_digested_with_its_one_write(write_ends, digest_ends):
    assert REGION.layers > region_of(STATE_POOL).layers == 1
    of_states, turns = Device(looks=digest_ends), [StartPush(state_push()), *[None] * 6]
    nixl = ran(turns, Device(looks=0), ends_at=write_ends, of_states=of_states)
    assert nixl.happened == ["write", "digest", "over", "PushDone"]
    done = PushDone(key=state_push().key, digests=state_proof("room"), seconds=nixl.events[0].seconds)
    assert nixl.events == [done]


@pytest.mark.parametrize(("pages_end", "states_end"), [(0, 3), (3, 0), (2, 2)])
def test_pages_and_states_of_an_order_are_proved_together(pages_end, states_end):
    both = replace(order(), states=(ROW,))
    nixl = ran([both, *[None] * 6], Device(looks=pages_end), of_states=Device(looks=states_end))
    assert nixl.happened == ["digest", "digest", "Digests"]
    assert nixl.events == [Digests(room="room", generation=1, digests=(*proof("room"), *state_proof("room")))]


@pytest.mark.parametrize("fault", [{"broken": True}, {"full": True}])
def test_state_without_a_proof_leaves_its_pages_unproved(fault):  # [verified-pages]
    both = replace(order(), states=(ROW,))
    nixl = ran([both, None], Device(looks=0), of_states=Device(looks=0, **fault))
    assert nixl.events == [Digests(room="room", generation=1, digests=(0, 0, 0))]


def test_lost_peer_takes_a_state_along_that_is_digested():  # [late-write]
    """Its pages were written before."""
    turns = [StartPush(push()), None, StartPush(state_push()), None, Forget(THERE.incarnation), None]
    nixl = ran(turns, Device(looks=0), of_states=Device(looks=9))
    assert nixl.happened == [
        *["write", "digest", "over", "PushDone"],
        "write",
        "digest",
        "over",
        "remove",
        "PushFailed",
    ]
    assert (nixl.events[-1].key, nixl.events[-1].peer_lost) == (state_push().key, True)


def test_polls_of_a_device_digest_are_an_eighth_of_the_elapsed_time_apart():
    nixl = ran([StartPush(push()), *[None] * 12], Device(looks=20))
    looks = nixl.waited[2:]
    assert looks[:3] == pytest.approx([FIRST_PAUSE, TURN_S / PAUSE_SHARE, 2 * TURN_S / PAUSE_SHARE])
    assert looks[-1] == MAX_PAUSE


def test_half_a_gigabyte_is_pushed_in_few_pieces():
    """4,096 tokens of an 8B model: pieces, not milliseconds, are what this side can promise."""
    layers, page_bytes, pages = 32, 8 << 20, 64
    region = Region(1 << 40, page_bytes, pages + 1, "DRAM", 0, layers=layers)
    count, least = ON_DEVICE.pages(page_bytes), ON_DEVICE.layers(ON_DEVICE.push_bytes, layers)
    progress, device = KvProgress(ManualClock()), Device(looks=0)

    def turns() -> Iterator[Command | None]:
        for first in range(0, pages, count):
            key = PushKey(room="room", generation=1, first=first, count=count)
            # Backwards on one side, so that no two pages make one range.
            source = tuple(PageId(1 + page) for page in range(first, first + count))
            sent = push(key=key, source=source, target=source[::-1], progress=progress, least_layers=least)
            yield StartPush(sent)
        for layer in range(layers):
            progress.wrote(layer)
            yield None
        yield None

    nixl = ran(turns(), device, region=region)
    assert nixl.happened.count("PushDone") == device.begun == 2
    assert nixl.happened.count("write") == 16
    assert nixl.ranges == [count] * 16, "a range of each page, with as many layers as have come"
