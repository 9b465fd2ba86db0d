"""The folder of a run. It has few files, none of them large, so that it can be carried from where the GPU is."""

from pathlib import Path

MAX_FILES, MAX_BYTES = 8, 16 << 20
LOG = "log.txt"


class FolderError(Exception):
    """A folder that cannot be carried."""


def check(folder: Path) -> None:
    """Raises `FolderError` when it has too many files or one that is too large."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if len(files) > MAX_FILES:
        names = ", ".join(sorted(path.name for path in files))
        raise FolderError(f"{folder} has {len(files)} files ({names}), at most {MAX_FILES} can be carried")
    for path in files:
        if path.stat().st_size > MAX_BYTES:
            raise FolderError(f"{path} has {path.stat().st_size} bytes, at most {MAX_BYTES} can be carried")


class Log:
    """What parts print, cut off before it is too large."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG

    def write(self, text: bytes) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        room = MAX_BYTES - size
        if room > 0:
            with self._path.open("ab") as file:
                file.write(text[:room])
