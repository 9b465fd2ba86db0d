"""A folder that processes of one user meet in, gone when the one that made it is.

1. made      in the machine's temporary folder, for this user alone
2. marked    by a file that is locked before it gets its name, for as long as the process lives
3. removed   when its maker is done with it
   or left   its maker was killed. The next process that makes one of the same prefix finds the marker without a lock,
             which the kernel has lifted, and removes the folder

A folder without a marker is never taken for abandoned, whatever its name: it is somebody else's, it is about to be
marked, its maker was killed before it had marked it, or its file system has no locks.
"""

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem_engine.errors import ConfigError

logger = logging.getLogger(__name__)

MARKER = "owner.lock"
UNLOCKED_MARKER = ".owner.lock"
"""Its name until it is locked."""
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
        logger.debug("what killed processes left in %s stays: %s", temporary, error)
        return
    for folder in folders:
        _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    try:
        marker = _open_marker(folder)
    except OSError as error:
        logger.debug("%s is left alone: %s", folder, error)
        return
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed the folder between the two; this name may be a newer one's by now.
        if os.path.samestat(os.fstat(marker), (folder / MARKER).lstat()):
            logger.info("removing %s: the process that made it was killed", folder)
            remove(folder)
    except OSError as error:
        logger.debug("%s belongs to a process that lives, or cannot be locked: %s", folder, error)
    finally:
        os.close(marker)


def _open_marker(folder: Path) -> int:
    """Raises `OSError` where there is none, or folder or marker is not as `own_folder` makes them."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        made = os.fstat(place)
        if made.st_uid != os.getuid() or made.st_mode & 0o777 != 0o700:
            raise PermissionError(f"{folder} is not of this user alone")
        # Whatever else has this name must not keep the process waiting.
        marker = os.open(MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    finally:
        os.close(place)
    status = os.fstat(marker)
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
        os.close(marker)
        raise PermissionError(f"{folder / MARKER} is no file of this user")
    return marker


def _make(prefix: str) -> tuple[Path, int | None]:
    """A folder, and the descriptor that holds its lock; None where it cannot be locked."""
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            return folder, _mark(folder)
        except OSError as error:
            # Something that clears the temporary folder may have taken it.
            if folder.is_dir():
                logger.warning("%s stays behind if this process is killed, as it cannot be locked: %s", folder, error)
                return folder, None
    raise FileNotFoundError(f"{ATTEMPTS} folders that were made in {tempfile.gettempdir()} were gone at once")


def _mark(folder: Path) -> int:
    """A descriptor that holds the marker's lock. Raises `OSError`."""
    unlocked = folder / UNLOCKED_MARKER
    marker = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / MARKER)
    except BaseException:
        os.close(marker)
        raise
    return marker
