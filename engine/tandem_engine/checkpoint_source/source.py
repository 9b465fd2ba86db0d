"""What a user names as a model.

folder     exists, or begins with . / ~                               wins
name       a key of `aliases`, such as the bundled model              stands for one of the others
hub id     org/name[@revision], hf://org/name[@revision]              a repository of a Hugging Face hub
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.errors import ConfigError
from tandem_engine.model.checkpoint_folder import shown

SCHEME = "hf://"
DEFAULT_REVISION = "main"

MAX_REPO = 96
"""Characters, as the hub has it."""

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a model is: in `folder`, or at `revision` of `repo`."""

    text: str
    """As the user wrote it."""
    folder: Path | None = None
    repo: str = ""
    revision: str = DEFAULT_REVISION
    """A branch, a tag or a commit."""

    @property
    def is_pinned(self) -> bool:
        """Whether `revision` is a commit, which never changes."""
        return is_commit(self.revision)

    @property
    def other_reading(self) -> str:
        """For an error about a repository that could be a mistyped folder; empty where it cannot [folder-or-hub]."""
        return "" if self.text.startswith(SCHEME) else f"; there is no folder {self.text} either"


def is_commit(revision: str) -> bool:
    """Whether `revision` is the id of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def is_repo(text: str) -> bool:
    """Whether `text` is an id as repositories of a hub have it."""
    return len(text) <= MAX_REPO and _REPO.fullmatch(text) is not None and "--" not in text and ".." not in text


def parse(text: str, aliases: Mapping[str, str] | None = None) -> ModelSource:
    """Read what a user wrote. `aliases`: what each name stands for.

    Raises:
        ConfigError: it is no folder, no name and no hub id.
    """
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    if text.startswith((".", "/", "~")) or (text and _exists(path)):
        return ModelSource(text=text, folder=path)
    if aliases is not None and text in aliases:
        return parse(aliases[text])
    repo, at, revision = text.removeprefix(SCHEME).partition("@")
    if not is_repo(repo):
        names = f", no name ({', '.join(aliases)})" if aliases else ""
        raise ConfigError(f"{shown(text)} is no folder{names} and no hub id, which is org/name or org/name@revision")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision or revision.endswith("/")):
        raise ConfigError(f"{shown(text)}: after @ stands a branch, a tag or a commit, got {shown(revision)}")
    return ModelSource(text=text, repo=repo, revision=revision or DEFAULT_REVISION)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # Longer than the system takes, or with a NUL: no path.
        return False
