"""A temporary directory shared by processes of one user, removed when its creator is gone.

    1. made      in the machine's temporary directory, for this user alone
    2. marked    by a file that is locked before it gets its name, for as long as the process lives
    3. removed   when its creator is done with it
       or left   its creator was killed. The next process that makes one of the same prefix finds the marker unlocked,
                 because the kernel has released the lock, and removes the directory

A directory without a marker belongs to another program, whatever its name; or it is about to be marked, its creator was
killed before it had marked it, or its file system has no locks. Nothing in it is touched. Once it has been empty for
longer than marking takes, `rmdir` removes it, where there are locks.
"""

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem_engine.base.errors import ConfigError

logger = logging.getLogger(__name__)
MARKER = "owner.lock"

NEW_MARKER = ".owner.lock"
"""Its name until it is locked. A folder with nothing else in it is as good as empty."""

VAIN_MARKER = "owner"
"""Its name when it could not be locked: whether its maker lives is not to be seen."""

UNMARKED_S = 3600.0
"""A maker that lives has marked its folder long before. One that slept for so long finds it gone, and makes another."""

ATTEMPTS = 3

RANDOM_NAME = "[a-z0-9_]{8}"
"""What `tempfile.mkdtemp` appends to a prefix."""


@contextmanager
def own_folder(prefix: str) -> Iterator[Path]:
    """A new folder of mode 0700, marked where its file system has locks, and removed on leaving.

    Raises:
        ConfigError: there is no temporary folder that it can be made in.
    """
    try:
        remove_abandoned(prefix)
        folder, lock = _make(prefix)
    except OSError as error:
        raise ConfigError(f"no folder for temporary files: {error}; let TMPDIR name one that can be written") from error
    try:
        yield folder
    finally:
        remove(folder)
        if lock is not None:
            os.close(lock)


def remove(folder: Path) -> None:
    """Idempotent, and several processes may do so at once."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(prefix: str) -> None:
    """Remove what is left of processes of this user that were killed.

    Raises:
        FileNotFoundError: there is no temporary folder.
    """
    temporary = Path(tempfile.gettempdir())
    ours = re.compile(re.escape(prefix) + RANDOM_NAME)
    try:
        folders = [folder for folder in temporary.iterdir() if ours.fullmatch(folder.name)]
    except OSError as error:
        # Folders can be made in some that cannot be listed.
        logger.debug("cannot remove directories of killed processes in %s: %s", temporary, error)
        return
    for folder in folders:
        try:
            _remove_if_abandoned(folder)
        except OSError as error:
            logger.debug("%s belongs to another user or a running process, or cannot be locked: %s", folder, error)


def _remove_if_abandoned(folder: Path) -> None:
    """Raises `OSError` when it is not, or when that is unknown."""
    with _opened(folder) as place:
        entries = os.listdir(place)  # noqa: PTH208  # of the folder that was opened, whatever has its name by now
        if MARKER in entries:
            _remove_marked(folder, place)
        elif entries in ([], [NEW_MARKER]) and time.time() - os.fstat(place).st_ctime > UNMARKED_S:
            _remove_never_marked(folder, place)


def _remove_marked(folder: Path, place: int) -> None:
    with _locked(MARKER, place) as marker:
        # Another process may have removed the folder between the two; this name may be a newer one's by now.
        if os.path.samestat(marker, (folder / MARKER).lstat()):
            logger.info("removing %s: its process was killed", folder)
            remove(folder)


def _remove_never_marked(folder: Path, place: int) -> None:
    # Where this fails there are no locks, and so no markers of those that live either.
    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with suppress(FileNotFoundError), _locked(NEW_MARKER, place):
        os.unlink(NEW_MARKER, dir_fd=place)
    if os.path.samestat(os.fstat(place), folder.lstat()):
        folder.rmdir()
        logger.info("removed %s: its process was killed before it marked it", folder)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Its descriptor. Raises `OSError` for what is no folder of this user alone."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        made = os.fstat(place)
        if made.st_uid != os.getuid() or made.st_mode & 0o777 != 0o700:
            raise PermissionError(f"{folder} is not of this user alone")
        yield place
    finally:
        os.close(place)


@contextmanager
def _locked(name: str, place: int) -> Iterator[os.stat_result]:
    """A file of this user in a folder, which no process holds. Raises `OSError`."""
    # Whatever else has this name must not keep the process waiting.
    marker = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    try:
        status = os.fstat(marker)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{name} is no file of this user")
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield status
    finally:
        os.close(marker)


def _make(prefix: str) -> tuple[Path, int | None]:
    """A folder, and the descriptor that holds its lock; None where it cannot be locked."""
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            return folder, _mark(folder)
        except OSError as error:
            # Something that clears the temporary folder may have taken it.
            if folder.is_dir():
                logger.warning("cannot lock %s, it remains if this process is killed: %s", folder, error)
                with suppress(OSError):
                    (folder / NEW_MARKER).rename(folder / VAIN_MARKER)
                return folder, None
    raise FileNotFoundError(f"{ATTEMPTS} folders that were made in {tempfile.gettempdir()} were gone at once")


def _mark(folder: Path) -> int:
    """A descriptor that holds the marker's lock. Raises `OSError`."""
    unlocked = folder / NEW_MARKER
    marker = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / MARKER)
    except BaseException:
        os.close(marker)
        raise
    return marker
