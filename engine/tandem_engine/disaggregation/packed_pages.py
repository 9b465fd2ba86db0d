"""Some heads of pages as one run of bytes per page, for transfers between engines with unequal numbers of ranks.

A page is [layer, part, head, slot, row]. Some of its heads are 2 × layers runs, and a WRITE of 2,048 pages of 32 layers
would have 131,072 ranges of 16 KiB. Packed, a slice has one range per page:

    sender     pages of 4 heads       ring, heads 2 3         receiver      granted page of 4 heads, as written
               [layer, part, 4, …] ─▶ [layer, part, 2, …] ─── WRITE ──▶     [heads 0 1: layer, part, 2, …]
                                                                            [heads 2 3: layer, part, 2, …]
                                                              unpacked ─▶   [layer, part, 4, …], in place

    all heads of the sender's page       nothing is copied there: the page is the run
    all heads of the receiver's page     nothing is unpacked there: the run is the page

So the wider side copies, and both do only if neither number of heads divides the other. A slice lies in the page in the
place that its heads have among all of them, so no memory of the receiver's but the granted pages is written, and
grants, digests and acks are of pages as before. The receiver unpacks after the record, when all is written, and before
it digests.

Copies and digests of a device are queued on one stream, which is ahead of others (`DeviceQueue`). The ring is made and
registered for the first slice that needs it, in memory that the plan of the start leaves for it (`ring_bytes`). A slot
is taken until its WRITE is over. Without memory for the ring, or where peers that stand still have all slots, a slice
is written to the same place by a range for each layer and part.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, Self

import torch
from torch import Tensor

from tandem_engine.base.errors import TransferError
from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.digest_words import word_bytes
from tandem_engine.disaggregation.transport import PagePool
from tandem_engine.memory.pool import PageLayout
from tandem_engine.messages.control import KvGeometry

logger = logging.getLogger(__name__)

WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}

SLOT_BYTES = 64 << 20
"""Of the ring, unless a page is larger; and what is unpacked at once."""

SLOTS = 4
"""Of the ring: while one is written, others are filled."""

SLOT_WAIT_S = 1.0
"""After so many seconds without a slot a push goes without one: peers that stand still have them all
[peer-error-contained]."""

AHEAD = -1
"""Priority of the stream."""


class Arrival(Protocol):
    """`torch.cuda.Event`, as far as it is used here."""

    def query(self) -> bool:
        """Whether the device got there."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Arrived:
    """An arrival that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class DeviceQueue:
    """Where digests and copies of slices are queued: a stream of a GPU. On a CPU, where kernels are interpreted, all is
    done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if self.on_gpu:
            self._stream = torch.cuda.Stream(device, priority=AHEAD)  # type: ignore[no-untyped-call]

    def on(self) -> AbstractContextManager[object]:
        """What is queued inside is queued here."""
        on: AbstractContextManager[object] = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        return on

    def host_memory(self, *shape: int) -> Tensor:
        """int64, and pinned: copies to and from the device do not block the host."""
        # Pinned by the context of the current device, which need not be this one.
        with torch.cuda.device(self.device) if self.on_gpu else nullcontext():
            return torch.empty(shape, dtype=torch.int64, pin_memory=self.on_gpu)

    def indices(self, pages: Sequence[PageId]) -> Tensor:
        """[pages] int64 on the device, of which the host waits for nothing. Called where `on` is."""
        there = self.host_memory(len(pages))
        there.copy_(torch.tensor(pages, dtype=torch.int64))
        return there.to(self.device, non_blocking=True)

    def record(self) -> "Arrival":
        """What is queued until now."""
        if self._stream is None:
            return Arrived()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


@cache
def queue_of(device: torch.device) -> DeviceQueue:
    """One for each device: pages that were unpacked are digested behind it."""
    return DeviceQueue(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSlot:
    """Heads of some pages in a slot of the ring."""

    number: int
    address: int
    pages: int
    """How many pages' heads."""
    filled: Arrival
    """Nothing reads the slot before."""


@dataclass(kw_only=True, slots=True)
class PackedPages:
    """Packs slices of one pool into a ring, which is made when it is needed. One thread calls it."""

    words: Tensor
    """[num_pages, words of a page], signed, of the pool."""
    layout: PageLayout
    register: Callable[[int, int], None]
    """Of memory from an address on, so many bytes, on the device of the pool."""
    slot_bytes: int = SLOT_BYTES
    slots: int = SLOTS
    _ring: Tensor | None = None
    """[slots, words of a slot]"""
    _refused: str = ""
    """Why there is none, and will be none."""
    _free: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, pool: PagePool, *, register: Callable[[int, int], None]) -> Self:
        """Of `pool`. A slot has room for a page at least."""
        slot_bytes = _slot_bytes(pool.page_bytes)
        return cls(words=words_of(pool), layout=pool.layout, register=register, slot_bytes=slot_bytes)

    def slice_bytes(self, layers: range, heads: range) -> int:
        """Of one page."""
        layout = self.layout
        return len(layers) * layout.parts * len(heads) * layout.slots * layout.row_bytes

    def pack(self, pages: Sequence[PageId], layers: range, heads: range) -> PackedSlot | None:
        """Queue a copy of these heads of the first `room_for` of `pages`; None while no slot is free.

        The copy is [page, layer, part, head, slot, row]. Raises `TransferError` if memory is short.
        """
        ring = self._ring if self._ring is not None else self._make()
        if not self._free:
            return None
        number = self._free.pop()
        count = min(len(pages), self.room_for(layers, heads))
        by_head = _by_head(self.words, self.layout)
        source = by_head[
            :, self.layout.parts * layers.start : self.layout.parts * layers.stop, heads.start : heads.stop
        ]
        shape = (count, *source.shape[1:])
        target = ring[number, : count * source[0].numel()].view(shape)
        queue = queue_of(self.words.device)
        try:
            with queue.on():
                torch.index_select(source, 0, queue.indices(pages[:count]), out=target)
                filled = queue.record()
        except Exception as error:
            self._free.append(number)
            if isinstance(error, torch.OutOfMemoryError):
                raise TransferError(f"no memory to pack slices: {error}") from error
            raise
        return PackedSlot(number=number, address=ring[number].data_ptr(), pages=count, filled=filled)

    def room_for(self, layers: range, heads: range) -> int:
        """How many pages' slices a slot holds, at least one."""
        return max(1, self.slot_bytes // self.slice_bytes(layers, heads))

    def give_back(self, slot: PackedSlot) -> None:
        """Its WRITE is over."""
        self._free.append(slot.number)

    def _make(self) -> Tensor:
        if self._refused:
            raise TransferError(self._refused)
        words = self.slot_bytes // self.words.dtype.itemsize
        try:
            # Where it is used: another stream may still be using memory that torch gives out again.
            with queue_of(self.words.device).on():
                ring = torch.empty((self.slots, words), dtype=self.words.dtype, device=self.words.device)
            self.register(ring.data_ptr(), ring.numel() * ring.dtype.itemsize)
        except (TransferError, RuntimeError) as error:
            self._refused = f"no {self.slots} x {self.slot_bytes} bytes to pack slices in: {error}"
            logger.warning("%s; they go by a range for each layer", self._refused)
            raise TransferError(self._refused) from error
        self._ring, self._free = ring, [*range(self.slots)]
        return ring


def ring_bytes(geometry: KvGeometry) -> int:
    """Of the ring of a pool of such pages. 0 where none is made: for pages of one head, which are one run as they are,
    and for layers that differ, which go to peers of as many ranks alone."""
    packs = geometry.num_kv_heads > 1 and not geometry.rows
    return SLOTS * _slot_bytes(geometry.page_bytes) if packs else 0


def _slot_bytes(page_bytes: int) -> int:
    return max(SLOT_BYTES, page_bytes)


def words_of(pool: PagePool) -> Tensor:
    """The pages of `pool` in words as wide as rows allow: [num_pages, words of a page], signed, a view."""
    return pool.bytes_view().view(WORD_TYPES[word_bytes(pool.layout)])


def unpack(words: Tensor, pages: Sequence[PageId], layout: PageLayout, slices: Sequence[range]) -> None:
    """Give `pages` their layout, in place: each holds all layers of the heads of each of `slices`, one after the other.

    `slices` are in order and together all heads of a page. Queued on the current stream of a device.
    """
    assert [*range(layout.heads)] == [head for heads in slices for head in heads], f"{slices} of {layout.heads} heads"
    by_head, of_head = _by_head(words, layout), words.shape[1] // layout.heads

    def in_place(where: Tensor | int, written: Tensor) -> None:
        for heads in slices:
            run = written[..., heads.start * of_head : heads.stop * of_head]
            run = run.view(*written.shape[:-1], by_head.shape[1], len(heads), -1)
            target = by_head[..., heads.start : heads.stop, :]
            if isinstance(where, int):
                target[where].copy_(run)
            else:
                target.index_copy_(0, where, run)

    if words.device.type == "cpu":
        for page in pages:
            # By index_copy_ each word would be copied by itself.
            in_place(page, words[page].clone())
        return
    step = max(1, SLOT_BYTES // (words.shape[1] * words.dtype.itemsize))
    for some in torch.split(queue_of(words.device).indices(pages), step):
        in_place(some, words.index_select(0, some))


def _by_head(words: Tensor, layout: PageLayout) -> Tensor:
    """[num_pages, layers * parts, heads, words of a head], a view."""
    return words.view(words.shape[0], layout.layers * layout.parts, layout.heads, -1)
