"""The folder in which the ranks of one engine meet: of this user alone, and gone when they are.

1. made      by rank 0, in the machine's temporary folder, and locked for as long as the process lives
2. removed   by rank 0 when its engine closes
   or left   rank 0 was killed. The others remove it when they notice; where they were killed as well, the next
             engine that starts finds it without a lock, which the kernel has lifted, and removes it
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

PREFIX = "tandem-ranks-"


@contextmanager
def meeting_place() -> Iterator[Path]:
    """A new folder, locked, and removed on leaving."""
    remove_abandoned()
    folder, lock = _make_locked()
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def remove(folder: Path) -> None:
    """Remove a meeting place. Idempotent, and several ranks may do so at once."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove what is left of engines of this user that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _try_lock(folder)
        if lock is not None:
            logger.info("removing %s: the engine that made it was killed", folder)
            remove(folder)
            os.close(lock)


def _make_locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = _try_lock(folder)
        # Another engine that starts may have looked at it between the two, and taken it for abandoned.
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
        logger.debug("%s belongs to an engine that lives", folder)
    os.close(descriptor)
    return None
