"""What `tandem up` does to the folder it is given: its own files only, and logs of earlier starts are kept."""

import os
import stat

import pytest

from tandem_services.cli.run_dir import KEPT_LOGS, RUN_FILE, prepare_run_dir
from tandem_services.common.errors import StartupError


def prepare(folder):
    return prepare_run_dir(folder, files=["keys.json"], logs=["gateway.log"])


def contents(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != RUN_FILE}


def test_foreign_files_in_run_dir_stay_unchanged(tmp_path):
    (tmp_path / "mine.log").write_text("data")
    (tmp_path / "gateway.log.2").write_text("older data")
    (tmp_path / "link.log").symlink_to("mine.log")
    os.mkfifo(tmp_path / "pipe.log")
    for _ in range(4):
        prepare(tmp_path)
        (tmp_path / "gateway.log").write_text("ours")
    assert (tmp_path / "mine.log").read_text() == "data"
    assert (tmp_path / "gateway.log.2").read_text() == "older data"
    assert (tmp_path / "link.log").is_symlink()
    assert stat.S_ISFIFO((tmp_path / "pipe.log").lstat().st_mode)


@pytest.mark.parametrize("name", ["keys.json", "gateway.log", RUN_FILE])
def test_foreign_file_with_needed_name_is_an_error(tmp_path, name):
    (tmp_path / name).write_text("data")
    with pytest.raises(StartupError, match=f"{name} exists and was not made by tandem up"):
        prepare(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "data"}


def test_link_in_place_of_own_file_is_an_error(tmp_path):
    prepare(tmp_path)
    target = tmp_path / "target"
    target.write_text("data")
    (tmp_path / "keys.json").symlink_to(target)
    with pytest.raises(StartupError, match="keys.json exists"):
        prepare(tmp_path)
    assert target.read_text() == "data"


def test_logs_of_earlier_starts_are_kept_and_bounded(tmp_path):
    for number in range(KEPT_LOGS + 3):
        prepare(tmp_path)
        assert not (tmp_path / "gateway.log").exists()
        (tmp_path / "gateway.log").write_text(str(number))
    newest = KEPT_LOGS + 2
    kept = {f"gateway.log.{n}": str(newest - n) for n in range(1, KEPT_LOGS + 1)}
    assert contents(tmp_path) == {"gateway.log": str(newest), **kept}


@pytest.mark.parametrize("document", ["", "[]", "{", '{"made_by": "tandem up", "files": 3}', "[" * 100_000])
def test_unreadable_list_of_files_claims_nothing(tmp_path, document):
    (tmp_path / RUN_FILE).write_text(document)
    with pytest.raises(StartupError, match=f"{RUN_FILE} exists"):
        prepare(tmp_path)


def test_run_dir_is_readable_by_its_owner_alone(tmp_path):
    folder = prepare(tmp_path / "run")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / RUN_FILE).stat().st_mode) == 0o600
