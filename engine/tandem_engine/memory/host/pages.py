"""Host memory for KV pages: the bytes, which pages are free, and the cached blocks in them.

`HostPool` is uint8 [num_pages, page_bytes]; a page has the layout of `KvPool`, so copies move whole rows. There is no
dummy page, because copies name every page that they use.

    0 ............... cached blocks ............... | ........ reserve for swapping ........ num_pages

`HostPages`: the cache never grows into the reserve. Swapping may use any free page, and evicts cached blocks when the
reserve is not enough. A page is released only when no copy and no read touches it any more.

`HostBlocks`: cached blocks by block hash
    1. add       pinned: a copy from the device or a read from storage fills its page
    2. unpin     filled; it joins the recency list as the most recent
    3. pin       for a match, a copy, or a write to storage; any number of times
    4. evict     the least recent unpinned block, whether or not the device has it too [mirror-reclaimable]

A state is as many blocks as its bytes fill pages, whose keys are the hash of the block that it follows and a number.
They are held, evicted and stored like blocks of KV, and no event names them.

A hash identifies a block together with all before it, so a block needs no parent. Its own tokens are compared as well:
a match goes block by block from the root and has compared those before. A block without its predecessor cannot be
reached, and ages until it is evicted.

Eviction takes only the head of the recency list [evict-without-scan], and never a pinned block [pinned-host-block]
[copy-acked].
"""

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.names import HostPageId
from tandem_engine.memory.pool import untouched_zeros
from tandem_engine.messages.kv_events import BlockRemoved, BlockStored, KvEvent, Tier

DIGEST_BYTES = 16
"""Of a block. The keys of a state's parts are longer."""


def state_keys(digest: bytes, parts: int) -> Iterator[bytes]:
    """The parts of the state after the block of `digest`, each of a page's size."""
    return (digest + part.to_bytes(4, "big") for part in range(1, parts + 1))


class HostPages:
    """The free list of a `HostPool`. Scheduler thread only."""

    def __init__(self, num_pages: int, *, reserve: int = 0) -> None:
        """`reserve`: pages kept for swapped requests."""
        assert 0 <= reserve <= num_pages, f"{reserve} of {num_pages} host pages cannot be reserved"
        self.num_pages = num_pages
        self.reserve = reserve
        self._free = [HostPageId(page) for page in range(num_pages - 1, -1, -1)]
        self._is_free = bytearray(b"\1" * num_pages)
        self._swapped = 0

    @property
    def available(self) -> int:
        """Free pages, the reserve included."""
        return len(self._free)

    @property
    def cache_capacity(self) -> int:
        """Pages that the cache could have if it had all it may."""
        return self.num_pages - self.reserve

    def take_for_cache(self) -> HostPageId | None:
        """A page for a cached block; None when only the reserve is left."""
        if len(self._free) <= max(0, self.reserve - self._swapped):
            return None
        return self._take()

    def take_for_swap(self, n: int) -> list[HostPageId] | None:
        """`n` pages for a swapped request; None, and nothing taken, if fewer are free."""
        if n > len(self._free):
            return None
        self._swapped += n
        return [self._take() for _ in range(n)]

    def free_cached(self, page: HostPageId) -> None:
        self._give_back(page)

    def free_swapped(self, pages: Iterable[HostPageId]) -> None:
        for page in pages:
            self._swapped -= 1
            self._give_back(page)

    def free_page_ids(self) -> Iterator[HostPageId]:
        """Every page without an owner (audit)."""
        return iter(self._free)

    def _take(self) -> HostPageId:
        page = self._free.pop()
        self._is_free[page] = False
        return page

    def _give_back(self, page: HostPageId) -> None:
        assert not self._is_free[page], f"host page {page} given back while free"
        self._is_free[page] = True
        self._free.append(page)


@dataclass(kw_only=True, slots=True, eq=False)
class HostBlock:
    """One page of KV in host memory, or of a state."""

    digest: bytes
    tokens: bytes
    """Packed."""
    page: HostPageId
    pins: int = 1
    on_device: bool = False
    """The device has it too."""
    loading: bool = False
    """It is being read from storage: its page holds nothing yet."""
    origin: Tier = Tier.DEVICE
    """DISK until a request has used what was read from there."""
    dropped: bool = False
    """No longer to be found; its page is free when the last pin goes."""


class HostBlocks:
    """An index with recency and pins. Scheduler thread only."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, HostBlock] = {}
        self._unpinned: OrderedDict[HostBlock, None] = OrderedDict()
        self._dropped: set[HostBlock] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[HostBlock]:
        return iter(self._blocks.values())

    @property
    def evictable(self) -> int:
        return len(self._unpinned)

    def get(self, digest: bytes) -> HostBlock | None:
        """The block of this hash, which may still be loading."""
        return self._blocks.get(digest)

    def add(self, block: HostBlock) -> None:
        assert block.digest not in self._blocks, f"block {block.digest.hex()} is in host memory already"
        assert block.pins > 0, "a new block is pinned by what fills it"
        self._blocks[block.digest] = block

    def pin(self, block: HostBlock) -> None:
        """Keep `block` where it is until `unpin`."""
        if block.pins == 0:
            self._unpinned.pop(block)
        block.pins += 1

    def unpin(self, block: HostBlock) -> HostPageId | None:
        """Release a pin. Returns the page that becomes free if the block was dropped while pinned."""
        assert block.pins > 0, f"block {block.digest.hex()} unpinned twice"
        block.pins -= 1
        if block.pins:
            return None
        if block.dropped:
            self._dropped.remove(block)
            return block.page
        self._unpinned[block] = None
        return None

    def touch(self, block: HostBlock) -> None:
        """`block` is wanted: the most recent now."""
        if block.pins == 0:
            self._unpinned.move_to_end(block)

    def evict(self) -> HostBlock | None:
        """Take out the least recent unpinned block. Its page is the caller's."""
        if not self._unpinned:
            return None
        block, _ = self._unpinned.popitem(last=False)
        del self._blocks[block.digest]
        return block

    def drop(self, block: HostBlock) -> HostPageId | None:
        """Take `block` out. Its page if that is free now, else `unpin` returns it later."""
        del self._blocks[block.digest]
        if block.pins == 0:
            del self._unpinned[block]
            return block.page
        block.dropped = True
        self._dropped.add(block)
        return None

    def pages(self) -> Iterator[HostPageId]:
        """Every page of a block, dropped ones that are still pinned included (audit)."""
        for block in (*self._blocks.values(), *self._dropped):
            yield block.page

    def audit(self) -> list[str]:
        """What is wrong with the bookkeeping; one sentence each."""
        unpinned = {block for block in self._blocks.values() if block.pins == 0}
        if unpinned == self._unpinned.keys():
            return []
        return [f"{len(unpinned)} unpinned host blocks, {len(self._unpinned)} in the recency list"]


Marked: TypeAlias = tuple[bytes, bool]
"""A block hash, and whether the other of device and host has the block too."""


@dataclass(kw_only=True, slots=True)
class TierEvents:
    """Events since they were last taken."""

    _events: list[KvEvent] = field(default_factory=list)

    def stored(self, tier: Tier, blocks: Iterable[Marked]) -> None:
        for elsewhere, hashes in _runs(blocks):
            self._events.append(BlockStored(hashes=hashes, tier=tier, elsewhere=elsewhere))

    def removed(self, tier: Tier, blocks: Iterable[Marked]) -> None:
        for elsewhere, hashes in _runs(blocks):
            self._events.append(BlockRemoved(hashes=hashes, tier=tier, elsewhere=elsewhere))

    def take(self) -> list[KvEvent]:
        taken, self._events = self._events, []
        return taken


def _runs(blocks: Iterable[Marked]) -> Iterable[tuple[bool, tuple[bytes, ...]]]:
    """Runs of neighbors with the same mark, in order, without parts of states."""
    whole = (marked for marked in blocks if len(marked[0]) == DIGEST_BYTES)
    for elsewhere, run in groupby(whole, key=itemgetter(1)):
        yield elsewhere, tuple(digest for digest, _ in run)


GIB = 1 << 30


class HostPool:
    """Pages of `page_bytes` each in the memory of this machine. Written by copies and by reads from storage."""

    def __init__(self, *, num_pages: int, page_bytes: int, pinned: bool = False) -> None:
        """`pinned`: for copies to and from a GPU that the host does not wait for. It takes the memory at once.

        Raises `ConfigError` when the machine does not have the memory.
        """
        wanted, installed = num_pages * page_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted > installed:
            raise ConfigError(
                f"--hicache-size, --hicache-ratio and --swap-space ask for {wanted / GIB:.1f} GiB of host memory "
                f"and this machine has {installed / GIB:.1f} GiB: lower them"
            )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.data = untouched_zeros(wanted).view(num_pages, page_bytes)
        self._buffer = self.data.numpy().reshape(-1).data
        if pinned:
            _pin(self.data)
            weakref.finalize(self, _unpin, self.data).atexit = False

    def bytes_view(self) -> torch.Tensor:
        """The bytes of all pages: uint8 [num_pages, page_bytes]."""
        return self.data

    def page_bytes_of(self, page: HostPageId) -> memoryview:
        """The bytes of one page, to be read or written in place."""
        return self._buffer[page * self.page_bytes : (page + 1) * self.page_bytes]


def _pin(data: torch.Tensor) -> None:
    """Have the driver know the memory of `data`. torch's own pinned memory comes in powers of two."""
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(driver.cudaHostRegister(data.data_ptr(), data.nbytes, 0))
    if status != 0:
        raise ConfigError(
            f"{data.nbytes / GIB:.1f} GiB of host memory for --hicache-size, --hicache-ratio and --swap-space cannot "
            f"be pinned (CUDA error {status}): lower them, or raise the limit of locked memory (ulimit -l)"
        )


def _unpin(data: torch.Tensor) -> None:
    """Before its memory is freed."""
    torch.cuda.cudart().cudaHostUnregister(data.data_ptr())  # type: ignore[no-untyped-call]
