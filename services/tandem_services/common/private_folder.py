"""A private directory of this user in the temporary directory, at the same path for all of the user's processes."""

import os
import tempfile
from pathlib import Path


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
