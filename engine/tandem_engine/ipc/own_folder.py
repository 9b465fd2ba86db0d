"""A folder that processes of one user meet in, gone when the one that made it is.

1. made      in the machine's temporary folder, for this user alone, and locked for as long as the process lives
2. removed   when its maker is done with it
   or left   its maker was killed. The next process that makes one of the same prefix finds it without a lock, which
             the kernel has lifted, and removes it
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def own_folder(prefix: str) -> Iterator[Path]:
    """A new folder of mode 0700, locked, and removed on leaving."""
    remove_abandoned(prefix)
    folder, lock = _make_locked(prefix)
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def remove(folder: Path) -> None:
    """Idempotent, and several processes may do so at once."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(prefix: str) -> None:
    """Remove what is left of processes of this user that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        lock = _try_lock(folder)
        if lock is not None:
            logger.info("removing %s: the process that made it was killed", folder)
            remove(folder)
            os.close(lock)


def _make_locked(prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        lock = _try_lock(folder)
        # Another process that starts may have looked at it between the two, and taken it for abandoned.
        if lock is not None:
            if folder.is_dir():
                return folder, lock
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the lock; None if somebody else holds it, or it is not ours to lock."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except BlockingIOError:
        logger.debug("%s belongs to a process that lives", folder)
    os.close(descriptor)
    return None
