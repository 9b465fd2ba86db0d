"""Older releases of Tandem, taken from git and run together with this one.

A release is what `git archive` of its commit contains, in a folder; the site-packages of this environment serve it. A
`.dist-info` next to its packages states the version of its pyproject.toml. `tandem` runs with that folder's PYTHONPATH.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMMITS = ("9d9c504f", "126fbc70")
"""Stand for the two releases before this one. Their KV has another identity than this release's."""

ROOT = Path(__file__).parents[4]
PACKAGES = ("engine", "services", "operator", "lab", "tests/support")
"""Folders that hold packages; an older release may lack some."""


class MissingCommitError(Exception):
    """This clone does not contain a commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A tree of Tandem that can be run."""

    name: str
    folder: Path

    @property
    def python_path(self) -> str:
        """PYTHONPATH by which a process has the packages of this release."""
        packages = [self.folder / name for name in PACKAGES]
        return os.pathsep.join(map(str, (self.folder, *(folder for folder in packages if folder.is_dir()))))

    def command(self, *args: str) -> list[str]:
        """`tandem` of this release."""
        launcher = ["env", f"PYTHONPATH={self.python_path}", sys.executable]
        return [*launcher, "-m", "tandem_services.cli.main", *args]


HERE = Release(name="HEAD", folder=ROOT)
"""The working tree."""


def missing_commits(commits: Sequence[str]) -> list[str]:
    """Those of `commits` that this clone lacks, as a shallow one does; all where there is no clone, or no git."""
    return [commit for commit in commits if not _has(commit)]


def take(commit: str, below: Path) -> Release:
    """The release of `commit`, in a folder in `below` that is named after it and made if there is none.

    Raises `MissingCommitError`.
    """
    if missing_commits([commit]):
        raise MissingCommitError(f"this clone has no commit {commit}: fetch the whole history (git fetch --unshallow)")
    name = subprocess.check_output(_git("rev-parse", "--short", f"{commit}^{{commit}}"), text=True).strip()
    folder = below / name
    if not folder.exists():
        _unpack(name, folder)
    return Release(name=name, folder=folder)


def _unpack(commit: str, folder: Path) -> None:
    """`folder` is there once it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{commit}-", dir=folder.parent) as temporary:
        tree = Path(temporary) / commit
        tree.mkdir()
        _extract(commit, tree)
        state_version(tree)
        tree.rename(folder)


def _extract(commit: str, folder: Path) -> None:
    archive = subprocess.Popen(_git("archive", commit), stdout=subprocess.PIPE)
    try:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
    finally:
        assert archive.stdout is not None
        archive.stdout.close()
        status = archive.wait()
    assert status == 0, f"git archive {commit} ended with {status}"


def state_version(folder: Path) -> None:
    """Write the `.dist-info` of the tree in `folder`."""
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = project["name"], project["version"]
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")


def _has(commit: str) -> bool:
    if shutil.which("git") is None:
        return False
    checked = subprocess.run(_git("cat-file", "-e", f"{commit}^{{commit}}"), check=False, stderr=subprocess.DEVNULL)
    return checked.returncode == 0


def _git(*args: str) -> list[str]:
    return ["git", "-C", str(ROOT), *args]
