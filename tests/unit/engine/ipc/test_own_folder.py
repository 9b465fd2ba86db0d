"""Folders that processes meet in: none stays behind."""

import os
import tempfile
from pathlib import Path

import pytest

from tandem_engine.ipc.own_folder import own_folder, remove_abandoned

PREFIX = "tandem-ranks-"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_this_users_alone_and_removed_with_all_that_is_in_it(temporary):
    with own_folder(PREFIX) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "store").write_text("rank 0")
    assert not [*temporary.iterdir()]


def test_what_a_killed_engine_left_is_removed_by_the_next_and_nothing_else(temporary):
    abandoned = temporary / f"{PREFIX}killed"
    abandoned.mkdir()
    (abandoned / "store").write_text("rank 0")
    (temporary / f"{PREFIX}file").write_text("no folder")
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    with own_folder(PREFIX) as first, own_folder(PREFIX) as second:
        assert {path.name for path in temporary.iterdir()} == {
            *(first.name, second.name, "elsewhere"),
            *(f"{PREFIX}file", f"{PREFIX}link"),
        }


def test_the_lock_ends_with_the_process_that_holds_it(temporary):
    child = os.fork()
    if child == 0:
        place = own_folder(PREFIX)
        place.__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert len([*temporary.iterdir()]) == 1
    remove_abandoned(PREFIX)
    assert not [*temporary.iterdir()]


def test_a_folder_that_another_engine_took_for_abandoned_is_made_anew(temporary, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def interrupted(**options: str) -> str:
        made.append(make(**options))
        if len(made) == 1:
            remove_abandoned(PREFIX)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with own_folder(PREFIX) as folder:
        assert str(folder) == made[1]
        assert folder.is_dir()
