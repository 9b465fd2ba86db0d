"""The folder in which `tandem up` keeps its keys and logs.

`run.json` lists the files that `tandem up` made there. Any other file is never written, renamed or deleted: a name
that is needed and belongs to a file that is not listed is an error. Logs of earlier starts are kept as NAME.log.1
(the newest) to NAME.log.5.
"""

import json
import stat
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from tandem_services.common.errors import StartupError

RUN_FILE = "run.json"
KEPT_LOGS = 5
_MAX_RUN_FILE_BYTES = 1 << 20


def prepare_run_dir(path: Path, *, files: Iterable[str], logs: Iterable[str]) -> Path:
    """Makes the folder ready for a start that will write `files` and `logs`. Returns its absolute path.

    Raises:
        StartupError: the folder cannot be written to, or a file there has a needed name and is not listed as ours.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        ours = _listed(path)
        logs = [*logs]
        needed = {RUN_FILE, *files, *logs}
        _require_ours(path, sorted(needed), ours)
        kept = {name for log in logs for name in _rotate(path, log, ours)}
        _write_list(path, ours | needed | kept)
    except OSError as error:
        raise StartupError(
            f"cannot write to {path} ({error.strerror}): choose another folder with --run-dir"
        ) from error
    return path.resolve()


def _listed(path: Path) -> frozenset[str]:
    """Names that `run.json` lists, itself included; empty if there is none of ours."""
    run_file = path / RUN_FILE
    try:
        if not stat.S_ISREG(run_file.lstat().st_mode):
            return frozenset()
        with run_file.open("rb") as opened:
            document = json.loads(opened.read(_MAX_RUN_FILE_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return frozenset()
    if not isinstance(document, dict) or document.get("made_by") != "tandem up":
        return frozenset()
    names = document.get("files")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _require_ours(path: Path, names: Iterable[str], ours: frozenset[str]) -> None:
    for name in names:
        if not _exists(path / name):
            continue
        if name not in ours or not stat.S_ISREG((path / name).lstat().st_mode):
            raise StartupError(
                f"{path / name} exists and was not made by tandem up: choose another folder with --run-dir"
            )


def _rotate(path: Path, log: str, ours: frozenset[str]) -> list[str]:
    """Moves NAME.log to NAME.log.1 and so on; the oldest is deleted. Returns the names of the logs that remain.

    Numbers from that of the first foreign file on are left alone.
    """
    names = [log, *(f"{log}.{number}" for number in range(1, KEPT_LOGS + 1))]
    usable = [*takewhile(lambda name: name in ours or not _exists(path / name), names)]
    last = next((number for number, name in enumerate(usable) if not _exists(path / name)), len(usable) - 1)
    (path / usable[last]).unlink(missing_ok=True)
    for number in range(last, 0, -1):
        (path / usable[number - 1]).replace(path / usable[number])
    return [name for name in usable if _exists(path / name)]


def _write_list(path: Path, names: Iterable[str]) -> None:
    temporary = path / f".{RUN_FILE}.new"
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600, exist_ok=False)
    temporary.write_text(json.dumps({"made_by": "tandem up", "files": sorted(names)}, indent=1) + "\n")
    temporary.replace(path / RUN_FILE)


def _exists(path: Path) -> bool:
    """Of the name itself: a link that leads nowhere exists."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True
