"""Between host pages and storage, off the loop.

    a backup is acked   ──store──▶  written while pinned, at most `MAX_WRITES` at a time; more is not stored
    a request arrives   ──read───▶  blocks that continue its cached prefix get host pages and are filled; each
                                    can be matched as soon as it is whole and verified (`prefetch`)

The I/O thread only fills buffers and reports; what follows is decided in `poll`, on the scheduler thread. A
descriptor becomes readable with a report, so that an idle loop can sleep on it.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from tandem_engine.memory.host.blocks import HostBlock, HostBlocks
from tandem_engine.memory.host.events import TierEvents
from tandem_engine.memory.host.pages import HostPages
from tandem_engine.memory.host.pool import HostPool
from tandem_engine.memory.host.storage import Fetched, HostStorage, PutReport
from tandem_engine.messages.kv_events import Tier

MAX_WRITES = 256
"""Blocks being written. Each is pinned meanwhile, and storage that is slower than the traffic must not pin all
of the host tier: beyond this a block is not stored."""

Outcome = TypeVar("Outcome")


class Report(NamedTuple, Generic[Outcome]):
    """An operation of storage that has ended."""

    block: HostBlock
    future: "Future[Outcome]"


@dataclass(kw_only=True, slots=True)
class StorageTraffic:
    """Writes and reads under way. Scheduler thread only."""

    storage: HostStorage
    pool: HostPool
    pages: HostPages
    blocks: HostBlocks
    events: TierEvents
    reading: int = 0
    not_stored: int = 0
    """Blocks that were not written: too many were being written, or the medium refused."""
    misses: int = 0
    """Reads of what should have been there."""
    _writing: dict[HostBlock, bool] = field(default_factory=dict)
    """Blocks being written; True if they still should be (`clear`)."""
    _written: "SimpleQueue[Report[PutReport]]" = field(default_factory=SimpleQueue)
    _read: "SimpleQueue[Report[Fetched]]" = field(default_factory=SimpleQueue)
    _bell: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._bell

    def store(self, blocks: Iterable[HostBlock]) -> None:
        """Write what storage does not have, pinning each block for as long as that takes."""
        for block in blocks:
            if block.digest in self.storage:
                continue
            if len(self._writing) >= MAX_WRITES:
                self.not_stored += 1
                continue
            self._writing[block] = True
            self.blocks.pin(block)
            future = self.storage.put(block.digest, self.pool.page_bytes_of(block.page))
            future.add_done_callback(partial(self._report, self._written, block))

    def read(self, block: HostBlock) -> None:
        """Fill a block that was added with `loading` set; its first pin is this read's."""
        assert block.loading, f"block {block.digest.hex()} does not wait to be read"
        self.reading += 1
        future = self.storage.get(block.digest, self.pool.page_bytes_of(block.page))
        future.add_done_callback(partial(self._report, self._read, block))

    def poll(self) -> bool:
        """Take in what has ended since the last call. True if anything has."""
        before = len(self._writing) + self.reading
        if not before:
            return False
        self._silence()
        for written in _drained(self._written):
            self._after_write(written.block, written.future.result())
        for read in _drained(self._read):
            self._after_read(read.block, read.future.result())
        return len(self._writing) + self.reading != before

    def clear(self) -> None:
        """Forget what is stored, and what is being written."""
        unannounced = {block.digest for block in self._writing}
        self.events.removed(Tier.DISK, [(key, False) for key in self.storage.hashes() if key not in unannounced])
        self.storage.clear()
        self._writing = dict.fromkeys(self._writing, False)

    def close(self) -> None:
        """Finish what was begun. Idempotent; nothing else may be called afterwards."""
        self.storage.close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def _report(self, queue: "SimpleQueue[Report[Outcome]]", block: HostBlock, future: "Future[Outcome]") -> None:
        """On the I/O thread."""
        queue.put(Report(block, future))
        os.eventfd_write(self._bell, 1)

    def _silence(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return  # nothing was reported since

    def _after_write(self, block: HostBlock, report: PutReport) -> None:
        still_wanted = self._writing.pop(block)
        self.events.removed(Tier.DISK, [(key, False) for key in report.evicted])
        if report.stored and still_wanted:
            self.events.stored(Tier.DISK, [(block.digest, False)])
        else:
            self.not_stored += 1
        self._unpin(block)

    def _after_read(self, block: HostBlock, fetched: Fetched) -> None:
        self.reading -= 1
        block.loading = False
        if fetched is not Fetched.WHOLE:
            self.misses += 1
        if fetched is Fetched.LOST:
            self.events.removed(Tier.DISK, [(block.digest, False)])
        if not block.dropped:
            if fetched is Fetched.WHOLE:
                self.events.stored(Tier.HOST, [(block.digest, block.on_device)])
            else:
                self.blocks.drop(block)
        self._unpin(block)

    def _unpin(self, block: HostBlock) -> None:
        freed = self.blocks.unpin(block)
        if freed is not None:
            self.pages.free_cached(freed)


def _drained(queue: "SimpleQueue[Report[Outcome]]") -> Iterator[Report[Outcome]]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
