"""One repository in the cache of huggingface_hub: which snapshots are whole.

    models--org--name/refs/main             commit of a branch or tag; written when its snapshot is whole
    models--org--name/snapshots/COMMIT/…    links to blobs, one for each file that has arrived
    models--org--name/.no_exist/COMMIT/…    an empty file for each name that the repository lacks

Other programs write references before they download, so a reference alone proves nothing. Files appear whole.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from tandem_engine.checkpoint_source.examination import CONFIG
from tandem_engine.checkpoint_source.source import is_commit
from tandem_engine.model.checkpoint_folder import INDEX, SINGLE, read_weight_map

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRepo:
    """`path`: of the repository, which may not exist."""

    path: Path

    @classmethod
    def of(cls, cache: Path, repo: str) -> "CachedRepo":
        """That of `repo` in the folder `cache`."""
        return cls(path=cache / f"models--{repo.replace('/', '--')}")

    def snapshot(self, commit: str) -> Path:
        """Its folder, which may not exist."""
        return self.path / "snapshots" / commit

    def commits(self) -> list[str]:
        """Of which there is any file, newest first."""
        folders = [path for path in self.path.glob("snapshots/*") if is_commit(path.name) and path.is_dir()]
        return [path.name for path in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)]

    def commit_of(self, revision: str) -> str | None:
        """As last recorded; None if it never was."""
        if is_commit(revision):
            return revision
        try:
            commit = (self.path / "refs" / revision).read_text("ascii", "replace").strip()
        except OSError:
            return None
        return commit if is_commit(commit) else None

    def revisions(self, commit: str) -> list[str]:
        """Branches and tags that were `commit` when they were last recorded."""
        refs = self.path / "refs"
        names = sorted(str(path.relative_to(refs)) for path in refs.rglob("*") if path.is_file())
        return [name for name in names if self.commit_of(name) == commit]

    def whole_commit(self, revision: str, *, weights: bool = True) -> str | None:
        """That of `revision`, if all of its files are here."""
        commit = self.commit_of(revision)
        return commit if commit is not None and self.missing(commit, weights=weights) is None else None

    def missing(self, commit: str, *, weights: bool = True) -> str | None:
        """A file of the snapshot that a server needs and that is not here; None for a whole snapshot.

        Raises:
            CheckpointError: the index of its weights is broken.
        """
        folder = self.snapshot(commit)
        if not (folder / CONFIG).is_file():
            return CONFIG
        if not (folder / TOKENIZER).is_file() and not self._absence(commit, TOKENIZER).exists():
            return TOKENIZER
        if not weights or (folder / SINGLE).is_file():
            return None
        if not (folder / INDEX).is_file():
            return SINGLE
        shards = sorted(set(read_weight_map(folder / INDEX).values()))
        return next((shard for shard in shards if not (folder / shard).is_file()), None)

    def date(self, commit: str) -> str:
        """Day on which the snapshot was downloaded."""
        changed = (self.snapshot(commit) / CONFIG).lstat().st_mtime
        return datetime.fromtimestamp(changed, UTC).date().isoformat()

    def record_absence(self, commit: str, name: str) -> None:
        """The repository has no file of that `name`. Raises `OSError`."""
        mark = self._absence(commit, name)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    def record(self, revision: str, commit: str) -> None:
        """`revision` is `commit`, whose snapshot is whole. Raises `OSError`."""
        if is_commit(revision) or self.commit_of(revision) == commit:
            return
        path = self.path / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{token_hex(4)}.tmp")
        new.write_text(commit, "ascii")
        new.replace(path)

    def _absence(self, commit: str, name: str) -> Path:
        return self.path / ".no_exist" / commit / name
