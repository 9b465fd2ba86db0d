"""Lines typed at the prompt, for the arrow keys, kept from one conversation to the next.

They are in a file that only this user can read, at most `MAX_LINES` of them. Without GNU readline in Python, or without
a place for the file, lines are edited by what the terminal has.
"""

import os
import stat
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.runs import state_folder

FILE = "chat_history"
MAX_LINES = 1000
MAX_LINE_BYTES = 4096
"""Of a line that is kept: a document that was pasted is not."""


class LineHistory:
    """Of this process, which has one prompt."""

    def __init__(self, path: Path | None, editor: Any) -> None:
        self._path = path
        self._editor = editor

    @classmethod
    def load(cls) -> "LineHistory":
        """With the lines of earlier conversations; a reason why there are none is a line on standard error."""
        try:
            editor = import_module("readline")
        except ImportError:
            return cls(None, None)
        editor.set_auto_history(False)
        editor.set_history_length(MAX_LINES)
        try:
            path = _private_file(state_folder() / FILE)
            editor.read_history_file(path)
        except (OSError, ConfigError) as error:
            print(f"typed lines are not kept: {error}", file=sys.stderr)
            return cls(None, editor)
        return cls(path, editor)

    def add(self, line: str) -> None:
        """The newest."""
        if self._editor is None or len(line.encode(errors="replace")) > MAX_LINE_BYTES:
            return
        self._editor.add_history(line)
        if self._path is None:
            return
        try:
            # Each line at once: other conversations, and one that is killed, lose none.
            self._editor.append_history_file(1, _private_file(self._path))
        except OSError as error:
            print(f"typed lines are no longer kept: {error}", file=sys.stderr)
            self._path = None


def _private_file(path: Path) -> Path:
    """A file that this user alone can read, made where there is none. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path} is not a file of this user")
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return path
