"""Files that hold prompts, KV or keys: for this user alone.

A server process calls `keep_files_private` before it does anything else, so that logs, dumps and traces, some of which
libraries write, are private too. Code that also runs within a user's own process, whose umask is not ours to change,
opens its files with `private_opener`.
"""

import os

OTHERS = 0o077
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def keep_files_private() -> None:
    """From now on no file or folder that this process or its children make is open to other users."""
    os.umask(OTHERS)


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: a new file is its owner's alone, whatever the umask."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)
