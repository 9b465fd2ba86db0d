"""Where pools lie, and pages as the address ranges that NIXL moves."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from tandem_engine.base.errors import TransferError
from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.transport import HeadPart
from tandem_engine.kernels.cpu.page_runs import Ranges, merge_runs
from tandem_engine.memory.state_pool import slot_room
from tandem_engine.messages.transfer import GroupPool, Hello

ADDRESS_LIMIT = 1 << 64

DEVICE_LIMIT = 1 << 16
"""What a peer claims of its pool must be possible."""


class Region(NamedTuple):
    """Where a pool lies: page p starts at `address + p * page_bytes`, and layer l of it l equal parts later."""

    address: int
    page_bytes: int
    num_pages: int
    device: str
    """DRAM or VRAM, NIXL's names."""
    device_id: int
    layers: int = 1
    """Equal parts of a page, one after the other."""
    heads: int = 1
    """Equal parts of the K and of the V of a layer, one after the other."""
    parts: int = 2
    """Of a layer: K and V, or one latent."""
    blocks: tuple[int, ...] = ()
    """Of slots of states in place of pages: bytes of one head in each run of all heads."""

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.device_id}" if self.device == "VRAM" else "cpu"

    @property
    def layer_bytes(self) -> int:
        return self.page_bytes // self.layers

    @property
    def head_bytes(self) -> int:
        """Of K, V or the latent."""
        return self.layer_bytes // (self.parts * self.heads)


class Descriptors(NamedTuple):
    """Matching ranges of both sides."""

    source: Ranges
    target: Ranges


def describe(
    here: Region,
    source: Sequence[PageId],
    there: Region,
    target: Sequence[PageId],
    layers: range | None = None,
    heads: HeadPart | None = None,
) -> Descriptors:
    """One range per run of pages that are neighbours on both sides; small pages gain most.

    `layers`: of these alone, which is one range per page.
    `heads`: of these alone, which is one range per page, layer and part, or per slot and run of heads.
    """
    if heads is not None and here.blocks:
        return _blocks(here, source, there, target, heads)
    if heads is not None:
        return _heads(here, source, there, target, range(here.layers) if layers is None else layers, heads)
    if layers is not None and len(layers) < here.layers:
        return _parts(here, source, there, target, layers)
    sources, targets = (np.fromiter(pages, np.uint64, len(pages)) for pages in (source, target))
    ranges = np.empty((2, len(sources), 3), np.uint64)
    ranges[0, :, 2], ranges[1, :, 2] = here.device_id, there.device_id
    count = merge_runs(
        sources, targets, np.uint64(here.address), np.uint64(there.address), np.uint64(here.page_bytes), ranges
    )
    return Descriptors(ranges[0, :count], ranges[1, :count])


def _parts(
    here: Region, source: Sequence[PageId], there: Region, target: Sequence[PageId], layers: range
) -> Descriptors:
    first = layers.start * here.layer_bytes
    sides = []
    for region, pages in ((here, source), (there, target)):
        ranges = np.empty((len(pages), 3), np.uint64)
        ranges[:, 0] = np.fromiter(pages, np.uint64, len(pages)) * np.uint64(region.page_bytes)
        ranges[:, 0] += np.uint64(region.address + first)
        ranges[:, 1] = len(layers) * here.layer_bytes
        ranges[:, 2] = region.device_id
        sides.append(ranges)
    return Descriptors(*sides)


def _heads(
    here: Region, source: Sequence[PageId], there: Region, target: Sequence[PageId], layers: range, heads: HeadPart
) -> Descriptors:
    sides = []
    for region, pages, part in ((here, source, heads.source), (there, target, heads.target)):
        # The parts of each layer in turn; how many heads they have is each side's own.
        blocks = np.arange(here.parts * layers.start, here.parts * layers.stop, dtype=np.uint64)
        blocks *= np.uint64(region.heads)
        starts = (blocks + np.uint64(part.start)) * np.uint64(here.head_bytes)
        at = np.fromiter(pages, np.uint64, len(pages)) * np.uint64(region.page_bytes) + np.uint64(region.address)
        ranges = np.empty((len(pages) * len(blocks), 3), np.uint64)
        ranges[:, 0] = (at[:, None] + starts).ravel()
        ranges[:, 1] = len(part) * here.head_bytes
        ranges[:, 2] = region.device_id
        sides.append(ranges)
    return Descriptors(*sides)


def _blocks(
    here: Region, source: Sequence[PageId], there: Region, target: Sequence[PageId], heads: HeadPart
) -> Descriptors:
    sizes = np.array(here.blocks, np.uint64)
    starts = np.cumsum(sizes) - sizes
    sides = []
    for region, slots, part in ((here, source, heads.source), (there, target, heads.target)):
        at = np.fromiter(slots, np.uint64, len(slots)) * np.uint64(region.page_bytes) + np.uint64(region.address)
        ranges = np.empty((len(slots) * len(sizes), 3), np.uint64)
        ranges[:, 0] = (at[:, None] + starts * np.uint64(region.heads) + sizes * np.uint64(part.start)).ravel()
        ranges[:, 1] = np.tile(sizes * np.uint64(len(part)), len(slots))
        ranges[:, 2] = region.device_id
        sides.append(ranges)
    return Descriptors(*sides)


def describe_packed(
    here: Region,
    source: Sequence[PageId],
    there: Region,
    target: Sequence[PageId],
    layers: range,
    heads: HeadPart,
    *,
    slot: int | None,
) -> Descriptors:
    """One range per page of `heads` of `layers`, which are one run on both sides (`packed_pages`).

    `slot`: address of a copy of them, page after page. None takes them from the pages, by a range for each layer and
    part unless they are all heads there.
    """
    if slot is None and len(heads.source) < here.heads:
        return _to_packed(here, source, there, target, layers, heads)
    layer_bytes = here.parts * len(heads.target) * here.head_bytes
    size = np.uint64(layer_bytes * len(layers))
    run = heads.target.start * (there.page_bytes // there.heads) + layers.start * layer_bytes
    pages = np.fromiter(source, np.uint64, len(source))
    ranges = np.empty((2, len(source), 3), np.uint64)
    ranges[0, :, 2], ranges[1, :, 2] = here.device_id, there.device_id
    targets = np.fromiter(target, np.uint64, len(target))
    if slot is None:
        ranges[0, :, 0] = pages * np.uint64(here.page_bytes) + np.uint64(here.address + layers.start * layer_bytes)
    else:
        pages = np.arange(len(source), dtype=np.uint64)
        ranges[0, :, 0] = pages * size + np.uint64(slot)
        if size == there.page_bytes:
            count = merge_runs(pages, targets, np.uint64(slot), np.uint64(there.address), size, ranges)
            return Descriptors(ranges[0, :count], ranges[1, :count])
    ranges[1, :, 0] = targets * np.uint64(there.page_bytes) + np.uint64(there.address + run)
    ranges[:, :, 1] = size
    return Descriptors(*ranges)


def _to_packed(
    here: Region, source: Sequence[PageId], there: Region, target: Sequence[PageId], layers: range, heads: HeadPart
) -> Descriptors:
    blocks = np.arange(here.parts * layers.start, here.parts * layers.stop, dtype=np.uint64)
    size = np.uint64(len(heads.source) * here.head_bytes)
    run = np.uint64(heads.target.start * (there.page_bytes // there.heads))
    starts = (blocks * np.uint64(here.heads) + np.uint64(heads.source.start)) * np.uint64(here.head_bytes)
    sides = []
    for region, pages, offsets in ((here, source, starts), (there, target, run + blocks * size)):
        at = np.fromiter(pages, np.uint64, len(pages)) * np.uint64(region.page_bytes) + np.uint64(region.address)
        ranges = np.empty((len(pages) * len(blocks), 3), np.uint64)
        ranges[:, 0] = (at[:, None] + offsets).ravel()
        ranges[:, 1], ranges[:, 2] = size, region.device_id
        sides.append(ranges)
    return Descriptors(*sides)


def regions_of(hello: Hello, own: Region, further: Sequence[Region]) -> tuple[Region, ...]:
    """Those of a peer: pages, then each further group. Raises `TransferError` where ours do not fit into them."""
    groups = () if hello.groups is UNSET else hello.groups
    if len(groups) != len(further):
        raise TransferError(f"it has {len(groups)} groups of states, ours are {len(further)}")
    pages = _region_of(hello, own)
    states = (
        _checked(
            ours._replace(
                address=group.address,
                page_bytes=group.slot_bytes,
                num_pages=group.num_slots,
                device=pages.device,
                device_id=pages.device_id,
                heads=_heads_of(group, ours),
            )
        )
        for group, ours in zip(groups, further, strict=True)
    )
    return pages, *states


def _region_of(hello: Hello, own: Region) -> Region:
    if hello.heads < 1 or hello.page_bytes * own.heads != own.page_bytes * hello.heads:
        raise TransferError(
            f"its pages have {hello.page_bytes} bytes for {hello.heads} KV heads, ours {own.page_bytes} for {own.heads}"
        )
    if hello.device not in ("DRAM", "VRAM"):
        raise TransferError(f"its pool is on {hello.device!r}, not on DRAM or VRAM")
    region = Region(
        hello.pool_address,
        hello.page_bytes,
        hello.num_pages,
        hello.device,
        hello.device_id,
        layers=own.layers,
        heads=hello.heads,
    )
    return _checked(region)


def _heads_of(group: GroupPool, own: Region) -> int:
    """Of each of a peer's slots. Raises `TransferError` where ours have heads that do not fit in there."""
    if group.slot_bytes == own.page_bytes:
        return own.heads
    size = sum(own.blocks)
    heads = group.slot_bytes // size if size else 0
    if not heads or slot_room(heads * size) != group.slot_bytes:
        raise TransferError(f"its states have {group.slot_bytes} bytes, ours {own.page_bytes}")
    return heads


def _checked(region: Region) -> Region:
    """Raises `TransferError` for one that a peer cannot have."""
    end = region.address + region.page_bytes * region.num_pages
    if not (0 < region.address < end < ADDRESS_LIMIT and 0 <= region.device_id < DEVICE_LIMIT):
        raise TransferError(
            f"its pool of {region.num_pages} pages at address {region.address} of device {region.device_id} is nowhere"
        )
    return region


def warm_up() -> None:
    """Compile: a second, once per machine."""
    nowhere = Region(0, 1, 1, "DRAM", 0)
    describe(nowhere, (), nowhere, ())
