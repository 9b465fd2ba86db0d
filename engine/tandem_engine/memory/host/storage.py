"""Storage below host memory: blocks that outlive their page, and the process.

`HostStorage` is the interface. Implementations never raise for faults of the medium: a block that cannot be read, or
has the wrong content, is a miss; one that cannot be written is not stored.

`DiskStorage` has one file per block in a directory and removes the least recently used ones first:

    <directory>/<block hash>.<geometry>.kv     header, then the bytes of the page
    header   magic · fingerprint of model and KV geometry · block hash · xxh3-128 of the bytes

Parts of a state (`pages`) are files, too: the number of the part follows the block hash in the name, and is the seed of
the digest.

A file is written under a temporary name and renamed, so no reader sees an incomplete one. A file that is torn, damaged,
of another model or of another shape is a miss and is removed; the digest detects damage. The time of modification is
the recency, which therefore survives a restart. Files of other models and geometries count against the bound and are
removed by age. Workers may share a directory: each bounds the files that it has seen.

`StorageTraffic` moves blocks between host pages and storage, off the scheduler loop:

    a backup is acked   ──store──▶  written while pinned, at most `MAX_WRITES` at a time; more is not stored
    a request arrives   ──read───▶  blocks that continue its cached prefix get host pages and are filled; each
                                    can be matched once it is complete and verified (`prefetch`)

The I/O thread only fills buffers and reports. `poll` applies the reports on the scheduler thread. A descriptor becomes
readable with a report, so that an idle loop can sleep on it.
"""

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import randbits
from struct import Struct
from threading import Lock
from typing import Generic, NamedTuple, Protocol, TypeVar

import xxhash

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import PRIVATE_FOLDER, private_opener
from tandem_engine.base.thread_pools import started_pool
from tandem_engine.memory.host.pages import DIGEST_BYTES, HostBlock, HostBlocks, HostPages, HostPool, TierEvents
from tandem_engine.messages.kv_events import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class PutReport:
    """What became of a block that was offered."""

    stored: bool
    evicted: tuple[bytes, ...] = ()
    """Keys of blocks that had to make room."""


class Fetched(Enum):
    """Result of a requested read of a block."""

    WHOLE = "whole"
    ABSENT = "absent"
    """It was removed before it was read, as a `PutReport` or a `clear` has reported."""
    LOST = "lost"
    """It should have been there and cannot be read, or is not what it should be. It is gone now."""


class HostStorage(Protocol):
    """Maps block hashes to the bytes of a page. Called by the scheduler thread, works on separate threads.

    Operations take effect in the order of the calls. The caller leaves a buffer alone until
    the future of its operation is done.
    """

    def __contains__(self, key: bytes) -> bool:
        """Whether a `get` has a chance. No I/O."""
        ...

    def __len__(self) -> int: ...

    def hashes(self) -> Iterator[bytes]:
        """Every block there is, for a replay of events."""
        ...

    def put(self, key: bytes, page: memoryview) -> "Future[PutReport]":
        """Store the bytes of `page` under `key`."""
        ...

    def get(self, key: bytes, page: memoryview) -> "Future[Fetched]":
        """Fill `page`. Unless WHOLE it holds anything."""
        ...

    def clear(self) -> None:
        """Forget every block that `get` could find, those that are still being written included."""
        ...

    def close(self) -> None:
        """Finish the operations requested so far and stop. Idempotent."""
        ...


logger = logging.getLogger(__name__)
SUFFIX = ".kv"
PARTIAL = ".part"

OURS = re.compile(rf"[0-9a-f]{{32}}(?:[0-9a-f]{{8}})?\.[0-9a-f]{{32}}\{SUFFIX}(\.\d+\{PARTIAL})?")
"""Any other file in the directory is left alone and not counted."""

MAGIC = b"TANDEMKV"

HEADER = Struct("<8s16s16s16s")
"""Magic, fingerprint, block hash, digest of the page."""


class DiskStorage:
    """Implements `HostStorage`. One thread does all reading and writing, in order."""

    def __init__(self, directory: Path, *, fingerprint: bytes, page_bytes: int, max_bytes: int) -> None:
        """`fingerprint`: 16 bytes that name the weights and the shape of a page.

        Raises `ConfigError` when `directory` cannot be made or written, or `max_bytes` holds not one block.
        """
        self._directory = directory
        self._fingerprint = fingerprint
        self._ending = f".{fingerprint.hex()}{SUFFIX}"
        self._file_bytes = HEADER.size + page_bytes
        self._max_bytes = max_bytes
        self._lock = Lock()
        """Guards the two below: the scheduler thread reads them, the I/O thread changes them."""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """File name → bytes, least recently used first."""
        self._bytes = 0
        self._own = 0
        """Files of this geometry among them."""
        self._writer = randbits(64)
        """In names of partial files: workers that share the directory may be in containers, with one pid."""
        self._epoch = 0
        """Grows with each `clear`: what was offered before is not stored after it."""
        self._failures = 0
        """Blocks that could not be written since the last one that was. I/O thread only."""
        if max_bytes < self._file_bytes:
            raise ConfigError(
                f"--hicache-storage-size {max_bytes / (1 << 30):g} GiB does not hold one block of "
                f"{self._file_bytes} bytes: raise it"
            )
        self._open()
        self._thread = started_pool(1, name="kv-storage")

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._name(key) in self._sizes

    def __len__(self) -> int:
        return self._own

    def hashes(self) -> Iterator[bytes]:
        with self._lock:
            names = [name for name in self._sizes if name.endswith(self._ending)]
        return (bytes.fromhex(name.removesuffix(self._ending)) for name in names)

    def put(self, key: bytes, page: memoryview) -> "Future[PutReport]":
        return self._thread.submit(self._put, key, page, self._epoch)

    def get(self, key: bytes, page: memoryview) -> "Future[Fetched]":
        return self._thread.submit(self._get, key, page)

    def clear(self) -> None:
        with self._lock:
            self._epoch += 1
            names = [name for name in self._sizes if name.endswith(self._ending)]
            for name in names:
                self._strike(name)
        self._thread.submit(self._remove, names)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _name(self, key: bytes) -> str:
        return key.hex() + self._ending

    def _open(self) -> None:
        """Learn what is there, oldest first, and shrink it to the bound."""
        try:
            self._directory.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            entries = [entry for entry in os.scandir(self._directory) if OURS.fullmatch(entry.name)]
            if not os.access(self._directory, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
            self._remove([entry.name for entry in entries if entry.name.endswith(PARTIAL)])
            found = [(entry.stat(), entry.name) for entry in entries if entry.name.endswith(SUFFIX)]
        except OSError as error:
            raise ConfigError(
                f"--hicache-storage-dir {self._directory} cannot be used: {error.strerror}; name a directory that "
                "this process may write to"
            ) from error
        for stat, name in sorted(found, key=lambda entry: entry[0].st_mtime_ns):
            self._enter(name, stat.st_size)
        self._remove(self._shrink(self._max_bytes))

    # On the I/O thread.

    def _put(self, key: bytes, page: memoryview, epoch: int) -> PutReport:
        name = self._name(key)
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
                return PutReport(stored=True)
            # Room first, so that the bound holds at every moment.
            evicted = self._shrink(self._max_bytes - self._file_bytes)
        self._remove(evicted)
        stored = self._write(name, key, page)
        if stored:
            with self._lock:
                stored = epoch == self._epoch
                if stored:
                    self._enter(name, self._file_bytes)
        if not stored:
            self._remove([name])
        return PutReport(stored=stored, evicted=tuple(self._keys_of(evicted)))

    def _write(self, name: str, key: bytes, page: memoryview) -> bool:
        header = self._header(key, page)
        # Two workers may write the same block at once.
        partial = self._directory / f"{name}.{self._writer}{PARTIAL}"
        try:
            with open(partial, "wb", buffering=0, opener=private_opener) as file:  # has no opener
                written = os.writev(file.fileno(), (header, page))
            if written != self._file_bytes:
                raise OSError(28, f"wrote {written} of {self._file_bytes} bytes")
            partial.replace(self._directory / name)
        except OSError as error:
            self._note_failure(error)
            self._remove([partial.name])
            return False
        if self._failures:
            logger.warning(
                "storing KV blocks in %s again; %d were not stored in the meantime", self._directory, self._failures
            )
            self._failures = 0
        return True

    def _note_failure(self, error: OSError) -> None:
        """One line for a disk that takes nothing, not one per block; the metric counts the blocks."""
        self._failures += 1
        if self._failures == 1:
            logger.warning(
                "cannot store KV blocks in %s: %s; kv_blocks_not_stored_total counts further failures",
                self._directory,
                error.strerror,
            )

    def _get(self, key: bytes, page: memoryview) -> Fetched:
        name = self._name(key)
        with self._lock:
            if name not in self._sizes:
                return Fetched.ABSENT
        path = self._directory / name
        try:
            with path.open("rb", buffering=0) as file:
                header = bytearray(HEADER.size)
                read = os.readv(file.fileno(), (header, page))
                # One byte more would mean a longer file: not one of ours.
                whole = read == self._file_bytes and not file.read(1)
            if whole and header == self._header(key, page):
                os.utime(path)
                with self._lock:
                    if name in self._sizes:
                        self._sizes.move_to_end(name)
                return Fetched.WHOLE
            logger.warning("removing KV block %s in %s: damaged or of another model", name, self._directory)
        except OSError as error:
            logger.warning("cannot read KV block %s in %s: %s", name, self._directory, error.strerror)
        return self._forget(name)

    def _header(self, key: bytes, page: memoryview) -> bytes:
        digest, part = key[:DIGEST_BYTES], int.from_bytes(key[DIGEST_BYTES:], "big")
        return HEADER.pack(MAGIC, self._fingerprint, digest, xxhash.xxh3_128_digest(page, seed=part))

    def _forget(self, name: str) -> Fetched:
        with self._lock:
            known = name in self._sizes
            if known:
                self._strike(name)
        self._remove([name])
        return Fetched.LOST if known else Fetched.ABSENT

    def _enter(self, name: str, size: int) -> None:
        """As the most recently used. Under the lock."""
        self._sizes[name] = size
        self._bytes += size
        self._own += name.endswith(self._ending)

    def _strike(self, name: str) -> None:
        """Under the lock."""
        self._bytes -= self._sizes.pop(name)
        self._own -= name.endswith(self._ending)

    def _shrink(self, to_bytes: int) -> list[str]:
        """Strike the oldest files off until the rest fits; returns those to remove. Under the lock."""
        struck = []
        while self._bytes > to_bytes and self._sizes:
            name = next(iter(self._sizes))
            self._strike(name)
            struck.append(name)
        return struck

    def _keys_of(self, names: list[str]) -> Iterator[bytes]:
        return (bytes.fromhex(name.removesuffix(self._ending)) for name in names if name.endswith(self._ending))

    def _remove(self, names: list[str]) -> None:
        for name in names:
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s in %s cannot be removed: %s", name, self._directory, error.strerror)


MAX_WRITES = 256
"""Blocks being written. Each is pinned for so long, and storage that is slower than the traffic must not pin all
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
            self._write(block)

    def store_whole(self, parts: Sequence[HostBlock]) -> None:
        """Write the parts of a state, or none: fewer are worth nothing."""
        missing = [part for part in parts if part.digest not in self.storage]
        if len(self._writing) >= MAX_WRITES:
            self.not_stored += len(missing)
            return
        for part in missing:
            self._write(part)

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

    def _write(self, block: HostBlock) -> None:
        self._writing[block] = True
        self.blocks.pin(block)
        future = self.storage.put(block.digest, self.pool.page_bytes_of(block.page))
        future.add_done_callback(partial(self._report, self._written, block))

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
