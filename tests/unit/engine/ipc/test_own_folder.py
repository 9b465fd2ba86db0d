"""Directories that processes share: none stays behind, and none of another process is removed."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.ipc.private_tmpdir import ATTEMPTS, MARKER, NEW_MARKER, UNMARKED_S, own_folder, remove_abandoned

PREFIX = "tandem-ranks-"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(folder: Path) -> Path:
    """As a killed process leaves it: with a marker that no process holds."""
    folder.mkdir(mode=0o700)
    (folder / MARKER).touch(mode=0o600)
    (folder / "store").write_text("rank 0")
    return folder


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_own_folder_is_private_and_removed_with_its_contents(temporary):
    with own_folder(PREFIX) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / MARKER).stat().st_mode & 0o777 == 0o600
        (folder / "store").write_text("rank 0")
    assert not [*temporary.iterdir()]


def test_directory_of_killed_engine_is_removed_by_the_next(temporary):
    left(temporary / f"{PREFIX}killed_1")
    (temporary / f"{PREFIX}filefile").write_text("no folder")
    elsewhere = left(temporary / "elsewhere")
    (temporary / f"{PREFIX}linklink").symlink_to(elsewhere)
    with own_folder(PREFIX) as first, own_folder(PREFIX) as second:
        assert {path.name for path in temporary.iterdir()} == {
            *(first.name, second.name, "elsewhere"),
            *(f"{PREFIX}filefile", f"{PREFIX}linklink"),
        }
    assert (elsewhere / "store").exists()


@pytest.mark.parametrize("suffix", ["logs", "dumps", "somelogs"])
def test_folder_of_the_users_own_with_such_a_name_is_left_alone(suffix, temporary):
    """Its prefix alone was taken for a proof that an engine had made it."""
    users = temporary / f"{PREFIX}{suffix}"
    users.mkdir(mode=0o700)
    (users / "core.1").write_text("kept")
    remove_abandoned(PREFIX)
    assert (users / "core.1").read_text() == "kept"


def test_marked_folder_of_other_name_or_mode_is_kept(temporary):
    left(temporary / f"{PREFIX}longer_than_eight")
    left(temporary / f"{PREFIX}Capitals")
    left(temporary / f"{PREFIX}readable").chmod(0o755)
    before = {*temporary.rglob("*")}
    remove_abandoned(PREFIX)
    assert {*temporary.rglob("*")} == before


def test_marker_that_is_a_link_a_pipe_or_a_folder_is_none(temporary):
    elsewhere = temporary / "elsewhere"
    elsewhere.touch()
    for name, make in {
        "linklink": lambda marker: marker.symlink_to(elsewhere),
        "pipepipe": os.mkfifo,
        "folder_1": Path.mkdir,
    }.items():
        folder = left(temporary / f"{PREFIX}{name}")
        (folder / MARKER).unlink()
        make(folder / MARKER)
    before, opened = {*temporary.rglob("*")}, open_files()
    remove_abandoned(PREFIX)
    assert {*temporary.rglob("*")} == before
    assert open_files() <= opened


def test_lock_ends_with_the_process_that_holds_it(temporary):
    child = os.fork()
    if child == 0:
        # Whatever happens, this process must not continue as a second pytest.
        status = 1
        try:
            place = own_folder(PREFIX)
            place.__enter__()
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    assert len([*temporary.iterdir()]) == 1
    remove_abandoned(PREFIX)
    assert not [*temporary.iterdir()]


def test_folder_is_left_alone_at_every_moment_of_its_making(monkeypatch):
    make, lock, rename = tempfile.mkdtemp, fcntl.flock, Path.rename
    moments = []

    def cleaned(moment: str) -> None:
        moments.append(moment)
        remove_abandoned(PREFIX)

    def mkdtemp(**options: str) -> str:
        folder = make(**options)
        cleaned("made")
        return folder

    def flock(descriptor: int, operation: int) -> None:
        if moments == ["made"]:
            cleaned("about to be locked")
        lock(descriptor, operation)

    def renamed(path: Path, target: Path) -> Path:
        cleaned("locked")
        moved = rename(path, target)
        cleaned("marked")
        return moved

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(Path, "rename", renamed)
    with own_folder(PREFIX) as folder:
        assert moments == ["made", "about to be locked", "locked", "marked"]
        assert (folder / MARKER).is_file()


def test_newer_folder_of_the_same_name_is_left_alone(temporary, monkeypatch):
    abandoned = left(temporary / f"{PREFIX}same_one")
    lock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        shutil.rmtree(abandoned)
        left(abandoned)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    remove_abandoned(PREFIX)
    assert (abandoned / "store").exists()


def test_own_folder_removed_during_creation_is_recreated(monkeypatch):
    make, made = tempfile.mkdtemp, []

    def interrupted(**options: str) -> str:
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with own_folder(PREFIX) as folder:
        assert str(folder) == made[1]
        assert (folder / MARKER).is_file()


def test_folders_that_all_vanish_are_an_error_that_names_tmpdir(monkeypatch):
    make, made = tempfile.mkdtemp, []

    def vanishing(**options: str) -> str:
        made.append(make(**options))
        os.rmdir(made[-1])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", vanishing)
    with pytest.raises(ConfigError, match="TMPDIR"), own_folder(PREFIX):
        pass
    assert len(made) == ATTEMPTS


def test_missing_temporary_folder_raises_error_naming_tmpdir(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "no"))
    with pytest.raises(ConfigError, match="TMPDIR"), own_folder(PREFIX):
        pass


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EWOULDBLOCK])
def test_file_system_without_locks_does_not_prevent_start(number, temporary, monkeypatch):
    """It ended the worker, or let it try forever."""
    abandoned = left(temporary / f"{PREFIX}killed_1")

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    opened = open_files()
    with own_folder(PREFIX) as folder:
        assert open_files() <= opened
        assert not (folder / MARKER).exists()
        monkeypatch.undo()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        an_hour_passes(monkeypatch)
        remove_abandoned(PREFIX)
        assert folder.is_dir()
    assert not folder.exists()
    assert not abandoned.exists()


def killed_while_making(step: str) -> None:
    """A process that makes a folder and ends, as by SIGKILL, once it has come to `step`."""
    child = os.fork()
    if child == 0:

        def end(*_: object, **__: object) -> None:
            os._exit(0)

        # Whatever happens, this process must not continue as a second pytest.
        try:
            if step == "made":
                make = tempfile.mkdtemp
                tempfile.mkdtemp = lambda **options: end(make(**options))
            elif step == "about to be locked":
                fcntl.flock = end
            else:
                Path.rename = end
            own_folder(PREFIX).__enter__()
        finally:
            os._exit(1)
    _, ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended) == 0


def an_hour_passes(monkeypatch) -> None:
    later = time.time() + UNMARKED_S + 1.0
    monkeypatch.setattr(time, "time", lambda: later)


@pytest.mark.parametrize("step", ["made", "about to be locked", "locked"])
def test_unmarked_folder_of_killed_process_is_removed_once_old(step, temporary, monkeypatch):
    """It stayed forever."""
    killed_while_making(step)
    (folder,) = temporary.iterdir()
    opened = open_files()
    remove_abandoned(PREFIX)
    assert folder.is_dir()  # it may be about to be marked
    an_hour_passes(monkeypatch)
    remove_abandoned(PREFIX)
    assert not [*temporary.iterdir()]
    assert open_files() <= opened


def test_old_unmarked_folder_of_other_origin_is_kept(temporary, monkeypatch):
    for name, entries in {
        f"{PREFIX}longer_than_eight": (),
        f"{PREFIX}somelogs": ("core.1",),
        f"{PREFIX}likeours": (NEW_MARKER, "store"),
        f"{PREFIX}readable": (),
    }.items():
        (temporary / name).mkdir(mode=0o700)
        for entry in entries:
            (temporary / name / entry).touch()
    (temporary / f"{PREFIX}readable").chmod(0o755)
    elsewhere = temporary / "elsewhere"
    elsewhere.touch()
    (temporary / f"{PREFIX}linklink").mkdir(mode=0o700)
    (temporary / f"{PREFIX}linklink" / NEW_MARKER).symlink_to(elsewhere)
    before = {*temporary.rglob("*")}
    an_hour_passes(monkeypatch)
    remove_abandoned(PREFIX)
    assert {*temporary.rglob("*")} == before


def test_old_folder_with_locked_marker_is_kept(temporary, monkeypatch):
    folder = temporary / f"{PREFIX}sleepy_1"
    folder.mkdir(mode=0o700)
    an_hour_passes(monkeypatch)
    with (folder / NEW_MARKER).open("w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_abandoned(PREFIX)
        assert (folder / NEW_MARKER).exists()
    remove_abandoned(PREFIX)
    assert not folder.exists()


def test_old_empty_folder_is_left_alone_where_there_are_no_locks(temporary, monkeypatch):
    folder = temporary / f"{PREFIX}unlocked"
    folder.mkdir(mode=0o700)

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    an_hour_passes(monkeypatch)
    with monkeypatch.context() as without_locks:
        without_locks.setattr(fcntl, "flock", refused)
        remove_abandoned(PREFIX)
    assert folder.is_dir()
