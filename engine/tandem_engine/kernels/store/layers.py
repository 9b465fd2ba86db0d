"""Where compiled kernels lie on disk: a folder of the user, and folders that are read alone.

    1. $TANDEM_CACHE_DIR/kernels, by default $XDG_CACHE_HOME/tandem/kernels      read and written
    2. folders of TANDEM_KERNELS_PATH, separated by colons                       read
    3. `packs` of this package                                                   read

To call a kernel is to execute its file. So folders and files must belong to this user or to root, and no other user may
be able to write to them; others are skipped with a warning. The check uses the descriptor that files are then opened
from, so that nothing can take their place in between. Packs are trusted as this file is, which is executed as well:
they may also belong to its owner, and users that may write to it may write to them.

Files are written under another name and renamed, so a reader finds a whole kernel or none. `KernelStore.compiling` is
an exclusive lock on a key, which ends with its process; a process that waited for it looks again.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.kernels.store.code_file import SUFFIX, Code, DamagedError, decode, encode
from tandem_engine.kernels.store.keys import KernelKey

logger = logging.getLogger(__name__)
CACHE_VARIABLE, PATH_VARIABLE = "TANDEM_CACHE_DIR", "TANDEM_KERNELS_PATH"
PACKS = Path(__file__).with_name("packs")
LOCKS = "locks"
NEW_PREFIX = ".new-"
FOLDER_MODE, FILE_MODE = 0o755, 0o644
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """Which folders and files may be executed."""

    owners: frozenset[int]
    refused: int
    """Bits of a mode."""

    def accepts(self, status: os.stat_result) -> bool:
        return status.st_uid in self.owners and not status.st_mode & self.refused


def trust_of_user() -> Trust:
    """For folders that the environment names."""
    return Trust(owners=frozenset((os.geteuid(), ROOT)), refused=OTHERS_WRITE)


def trust_of_package(code: Path = Path(__file__)) -> Trust:
    """For folders next to `code`."""
    status = code.stat()
    return Trust(
        owners=frozenset((os.geteuid(), ROOT, status.st_uid)), refused=OTHERS_WRITE & ~stat.S_IMODE(status.st_mode)
    )


STALE_AFTER_S = 30 * 24 * 3600
"""A kernel that was not read for so long is pruned,"""

MAX_BYTES = 512 << 20
"""and the ones read longest ago beyond so many bytes."""

TOUCH_AFTER_S = 24 * 3600
"""How old the time of a file's last use may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelStore:
    """All layers of a process."""

    own: Path | None
    """Where new kernels go; None keeps them in memory."""
    others: tuple[Path, ...] = ()
    packs: Path = PACKS
    _refused: set[Path] = field(default_factory=set)
    """Folders that a warning was given for."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "KernelStore":
        """The layers that the environment of a process names."""
        others = tuple(Path(each) for each in environment.get(PATH_VARIABLE, "").split(os.pathsep) if each)
        return cls(own=own_folder(environment), others=others)

    def find(self, key: KernelKey) -> Code | None:
        """The kernel of `key`, from the first layer that has it."""
        for folder, trust in self._layers():
            data = self._read(folder, key.file_name, trust)
            if data is None:
                continue
            try:
                return decode(data, key=key.text)
            except DamagedError as error:
                logger.warning("%s is no kernel that can be used: %s", folder / key.file_name, error)
        return None

    def has(self, key: KernelKey) -> bool:
        """Whether a layer has a file for `key`."""
        for folder, trust in self._layers():
            with self._opened(folder, trust) as opened:
                if opened is not None and _is_file(opened, key.file_name, trust):
                    return True
        return False

    def save(self, key: KernelKey, code: Code) -> None:
        """Keep a kernel. Where that is not possible it is in the memory of this process alone."""
        if self.own is None:
            return
        try:
            self._write(self.own, key.file_name, encode(code))
        except OSError as error:
            logger.warning("cannot keep a compiled kernel in %s: %s", self.own, error.strerror)

    def compiling(self, key: KernelKey, *, wait: bool = True) -> AbstractContextManager[bool]:
        """Be the only process that compiles `key`. Gives False, at once, if another does and not `wait`."""
        return self.held(f"{key.file_name}.lock", wait=wait)

    def keeps(self) -> bool:
        """Whether new kernels can be kept. A warning says why not."""
        if self.own is None:
            return False
        try:
            with self._opened(self.own, trust_of_user(), make=True) as opened:
                return opened is not None and os.access(self.own, os.W_OK)
        except OSError as error:
            logger.warning("cannot keep compiled kernels in %s: %s", self.own, error.strerror)
            return False

    @contextlib.contextmanager
    def held(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Hold a lock of this store. Gives False, at once, if another process holds it and not `wait`."""
        lock = self._lock_file(name)
        if lock is None:
            yield True
            return
        try:
            yield _locked(lock, wait=wait)
        finally:
            os.close(lock)

    def _lock_file(self, name: str) -> int | None:
        """Open, close on exec; None where there is no folder for it."""
        if self.own is None:
            return None
        try:
            with self._opened(self.own, trust_of_user(), make=True) as folder:
                if folder is None:
                    return None
                with contextlib.suppress(FileExistsError):
                    os.mkdir(LOCKS, FOLDER_MODE, dir_fd=folder)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                return os.open(f"{LOCKS}/{name}", flags, FILE_MODE, dir_fd=folder)
        except OSError as error:
            logger.warning("cannot lock kernels in %s: %s", self.own, error.strerror)
            return None

    def _layers(self) -> Iterator[tuple[Path, Trust]]:
        if self.own is not None:
            yield self.own, trust_of_user()
        for folder in self.others:
            yield folder, trust_of_user()
        yield self.packs, trust_of_package()

    def _read(self, folder: Path, name: str, trust: Trust) -> bytes | None:
        with self._opened(folder, trust) as opened:
            if opened is None:
                return None
            try:
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=opened)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    logger.warning("cannot read the kernel %s: %s", folder / name, error.strerror)
                return None
            with os.fdopen(file, "rb") as data:
                if not _is_trusted(os.fstat(data.fileno()), stat.S_ISREG, trust):
                    logger.warning("%s is not used: it is not a file of this user or of root alone", folder / name)
                    return None
                _note_use(data.fileno())
                return data.read()

    @contextlib.contextmanager
    def _opened(self, folder: Path, trust: Trust, *, make: bool = False) -> Iterator[int | None]:
        """A descriptor of `folder`; None where there is none, or where others could write to it."""
        if make:
            folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        try:
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            trusted = _is_trusted(os.fstat(opened), stat.S_ISDIR, trust)
            if not trusted and folder not in self._refused:
                self._refused.add(folder)
                logger.warning(
                    "kernels in %s are not used: the folder must belong to this user or to root, and no other user may "
                    "write to it (chmod go-w %s)",
                    folder,
                    folder,
                )
            yield opened if trusted else None
        finally:
            os.close(opened)

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        with self._opened(folder, trust_of_user(), make=True) as opened:
            if opened is None:
                return
            new = f"{NEW_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(new, flags, FILE_MODE, dir_fd=opened), "wb") as target:
                    os.fchmod(target.fileno(), FILE_MODE)
                    target.write(data)
                os.rename(new, name, src_dir_fd=opened, dst_dir_fd=opened)
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(new, dir_fd=opened)
                raise


def own_folder(environment: Mapping[str, str]) -> Path | None:
    """Where kernels are written to; None without a home."""
    if chosen := environment.get(CACHE_VARIABLE):
        return Path(chosen).absolute() / "kernels"
    cache = Path(environment.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "tandem" / "kernels"


def prune(folder: Path, now: float, *, largest: int = MAX_BYTES, stale_after_s: float = STALE_AFTER_S) -> list[str]:
    """Delete kernels of the folder that were not used for long, or are too many; returns their names."""
    kept = sorted(((each.stat(), each) for each in folder.glob(f"*{SUFFIX}")), key=lambda pair: -pair[0].st_mtime)
    total, deleted = 0, []
    for status, path in kept:
        total += status.st_size
        if total > largest or now - status.st_mtime > stale_after_s:
            path.unlink(missing_ok=True)
            deleted.append(path.name)
    for path in (*folder.glob(f"{NEW_PREFIX}*"), *(folder / LOCKS).glob("*")):
        # Its writer was killed, or its kernel is there. At worst one kernel is compiled twice.
        if now - path.stat().st_mtime > TOUCH_AFTER_S:
            path.unlink(missing_ok=True)
    return deleted


def _locked(lock: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _is_trusted(status: os.stat_result, is_kind: Callable[[int], bool], trust: Trust) -> bool:
    return trust.accepts(status) and is_kind(status.st_mode)


def _is_file(folder: int, name: str, trust: Trust) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return _is_trusted(status, stat.S_ISREG, trust)


def _note_use(file: int) -> None:
    """`prune` deletes what was not used for long. Of a folder that is read alone nothing is deleted here."""
    if time.time() - os.fstat(file).st_mtime > TOUCH_AFTER_S:
        with contextlib.suppress(OSError):
            os.utime(file)
