"""Folders and files that only this user reads.

private_folder    in the machine's temporary folder, at the same place for every process of the user
write_private     a file
new_contents      of a file, whole or not at all
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def private_folder(*names: str) -> Path:
    """$TMPDIR/tandem-UID, or a folder below it; made with mode 0700 when it is not there.

    Raises `OSError` when it cannot be created, belongs to another user, or is open to others.
    """
    folder = Path(tempfile.gettempdir())
    for name in (f"tandem-{os.getuid()}", *names):
        folder = folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def write_private(path: Path, text: str) -> None:
    """Write `text` to a file that only its owner can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def new_contents(path: Path) -> Iterator[BinaryIO]:
    """An empty file of mode 0600 that replaces `path` at the end of the block. After an error it is removed.

    A reader gets either the former contents or all of the new ones. Raises `OSError`.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
