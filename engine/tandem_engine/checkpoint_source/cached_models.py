"""The models in the cache of huggingface_hub, for `tandem models`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.checkpoint_source.cache import CachedRepo
from tandem_engine.checkpoint_source.examination import examine_folder
from tandem_engine.checkpoint_source.source import is_repo
from tandem_engine.config import ModelImpl

PREFIX = "models--"


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedModel:
    """One commit of a repository, of which there are files."""

    repo: str
    commit: str
    revisions: tuple[str, ...]
    """Branches and tags that are this commit."""
    size: int
    """Bytes of its files; commits may share some."""
    problem: str
    """Why it cannot be served, in one sentence; empty if it can."""


def cached_models(cache: Path) -> Iterator[CachedModel]:
    """Of all repositories, by name; the newest commit of each first."""
    for path in sorted(cache.glob(f"{PREFIX}*/")):
        repo = path.name.removeprefix(PREFIX).replace("--", "/")
        cached = CachedRepo(path=path)
        for commit in cached.commits() if is_repo(repo) else ():
            yield CachedModel(
                repo=repo,
                commit=commit,
                revisions=tuple(cached.revisions(commit)),
                size=sum(_size(file) for file in cached.snapshot(commit).rglob("*")),
                problem=_problem(cached, commit),
            )


def _problem(cached: CachedRepo, commit: str) -> str:
    try:
        missing = cached.missing(commit)
        if missing is not None:
            return f"{missing} is missing"
        examine_folder(cached.snapshot(commit), impl=ModelImpl.AUTO)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


def _size(file: Path) -> int:
    """0 for what is no file or a link to none."""
    return file.stat().st_size if file.is_file() else 0
