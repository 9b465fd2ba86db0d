"""Commits of one repository on a volume that several machines read: each is whole, or is not there.

    VOLUME/COMMIT/…                   a whole commit; it appears by one rename and never changes
    VOLUME/COMMIT/tandem-commit.json  sizes and digests of its files, and the fingerprint of all of them
    VOLUME/.COMMIT.part/…             under way: NAME.part grows and becomes NAME when its size and digest are right
    VOLUME/.COMMIT.part/.verified     a line for each such file
    VOLUME/.lock                      held by the one process that writes

A process may be killed at any moment: the next one continues what is under way.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from tandem_engine.base.errors import CheckpointError
from tandem_engine.checkpoint_source.source import is_commit

MANIFEST = "tandem-commit.json"
VERIFIED = ".verified"
LOCK = ".lock"
MAX_MANIFEST = 1 << 24
_POLL_S = 0.5


class VolumeBusyError(CheckpointError):
    """Another process writes to the volume."""


class VerifiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose size and digest were those of the hub."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class CommitManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole commit consists of."""

    repo: str
    commit: str
    files: Annotated[tuple[VerifiedFile, ...], msgspec.Meta(max_length=20_000)]
    fingerprint: str
    """SHA-256 over names, sizes and digests, in hexadecimal."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @classmethod
    def of(cls, repo: str, commit: str, files: Mapping[str, VerifiedFile]) -> "CommitManifest":
        """With its fingerprint; `files` by name."""
        ordered = tuple(files[name] for name in sorted(files))
        lines = "".join(f"{file.sha256} {file.size} {file.name}\n" for file in ordered)
        digest = hashlib.sha256(lines.encode()).hexdigest()
        return cls(repo=repo, commit=commit, files=ordered, fingerprint=digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """`path`: a folder of the volume, for one repository alone."""

    path: Path

    def whole(self, repo: str, commit: str) -> CommitManifest | None:
        """The manifest of a whole commit; None if it is not here, or a file lacks bytes."""
        folder = self.path / commit
        try:
            with (folder / MANIFEST).open("rb") as file:
                manifest = msgspec.json.decode(file.read(MAX_MANIFEST), type=CommitManifest)
        except (OSError, msgspec.DecodeError):
            return None
        if (manifest.repo, manifest.commit) != (repo, commit):
            return None
        return manifest if all(_has(folder, file) for file in manifest.files) else None

    def partial(self, commit: str) -> Path:
        """Where a commit arrives."""
        return self.path / f".{commit}.part"

    def verified(self, commit: str) -> dict[str, VerifiedFile]:
        """Files of a commit under way that are whole, by name."""
        folder = self.partial(commit)
        try:
            lines = (folder / VERIFIED).read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        found: dict[str, VerifiedFile] = {}
        for line in lines:
            # The last line may be half of one.
            with suppress(msgspec.DecodeError):
                file = msgspec.json.decode(line, type=VerifiedFile)
                if Path(file.name).name == file.name and _has(folder, file):
                    found[file.name] = file
        return found

    def record(self, commit: str, file: VerifiedFile) -> None:
        """`file` of a commit under way is whole. Raises `OSError`."""
        with (self.partial(commit) / VERIFIED).open("ab") as log:
            # A line of its own, even after half of one.
            log.write(b"\n" + msgspec.json.encode(file) + b"\n")
            log.flush()
            os.fsync(log.fileno())

    def finish(self, manifest: CommitManifest) -> None:
        """Let a commit under way be whole. Raises `OSError`."""
        partial, folder = self.partial(manifest.commit), self.path / manifest.commit
        for path in partial.iterdir():
            if path.name not in {file.name for file in manifest.files}:
                path.unlink()
        with (partial / MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        # A folder of this name is not whole, as `whole` has found.
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        _sync_folder(self.path)

    def remove_others(self, keep: Collection[str]) -> list[str]:
        """Remove all commits but those of `keep`, whole or under way; names of what was removed. Raises `OSError`."""
        removed = []
        for path in sorted(self.path.iterdir()):
            commit = path.name.removeprefix(".").removesuffix(".part")
            if is_commit(commit) and commit not in keep and path.is_dir():
                self._remove(path, commit)
                removed.append(path.name)
        return removed

    def _remove(self, path: Path, commit: str) -> None:
        """Absent at once: a removal that is interrupted leaves a commit under way, never half of a whole one."""
        partial = self.partial(commit)
        if path != partial:
            if partial.exists():
                shutil.rmtree(partial)
            path.rename(partial)
        shutil.rmtree(partial)

    def remove_partial(self) -> None:
        """Remove incomplete commits; no process continues them. Raises `OSError`."""
        for path in self.path.glob(".*.part"):
            if is_commit(path.name.removeprefix(".").removesuffix(".part")):
                shutil.rmtree(path)

    def fix(self, error: OSError) -> str:
        """What to do about a folder of another user; empty for other errors.

        The kubelet makes missing folders that a pod mounts, as root.
        """
        place = Path(error.filename or self.path)
        for folder in (place, *place.parents) if isinstance(error, PermissionError) else ():
            with suppress(OSError):
                owner = folder.stat().st_uid
                return (
                    f"; {folder} belongs to user {owner}, and this is user {os.geteuid()}: let this user write there, "
                    f"or remove it if it has no files"
                )
        return ""

    @contextmanager
    def locked(self, wait_s: float) -> Iterator[None]:
        """No other process writes during the block. Raises `VolumeBusyError`, `OSError`."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("ab") as file:
            end = time.monotonic() + wait_s
            while not _lock(file.fileno()):
                if time.monotonic() >= end:
                    raise VolumeBusyError(f"{self.path}: another process downloads into it")
                time.sleep(_POLL_S)
            yield


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has(folder: Path, file: VerifiedFile) -> bool:
    try:
        return (folder / file.name).stat().st_size == file.size
    except OSError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
