"""A model directory: which of its files may be opened.

A checkpoint comes from elsewhere. Names inside it (an index naming its shards, symbolic links) must not
lead the engine to read other files of the machine.
"""

from dataclasses import dataclass
from pathlib import Path

from tandem_engine.errors import CheckpointError
from tandem_engine.model.json_file import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDirectory:
    """An existing directory and the tree its links may point into."""

    path: Path
    root: Path
    """Resolved. The directory itself; in a Hugging Face cache the repository that holds its blobs."""

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def file(self, name: str, *, named_by: str = "") -> Path:
        """Path of a regular file that must be there; `named_by` tells who says so.

        Raises:
            CheckpointError: it is absent, not a plain file name, not a file, or leads out of the directory.
        """
        path = self.path / name
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{named_by or self.path} names {shown(name)}; only plain file names are allowed")
        if not path.exists():
            reason = f", although {named_by} names it" if named_by else ""
            raise CheckpointError(f"no {name} in {self.path}{reason}")
        if not path.resolve().is_relative_to(self.root):
            raise CheckpointError(f"{path} is a link out of the model directory; copy the file into it")
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        return path


def open_directory(path: str | Path) -> ModelDirectory:
    """Check that `path` is a directory.

    Raises:
        CheckpointError: it is absent or a file.
    """
    directory = Path(path)
    if not directory.exists():
        raise CheckpointError(f"the model directory {directory} does not exist; pass a local directory")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; pass the directory that holds config.json")
    return ModelDirectory(path=directory, root=_root_of(directory.resolve()))


def _root_of(resolved: Path) -> Path:
    """Hugging Face caches keep `snapshots/<revision>/file` as links into `blobs/` two levels up."""
    is_snapshot = resolved.parent.name == "snapshots" and (resolved.parent.parent / "blobs").is_dir()
    return resolved.parent.parent if is_snapshot else resolved
