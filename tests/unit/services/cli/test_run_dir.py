"""What `tandem up` does to the folder it is given: its own files only, and logs of earlier starts are kept."""

import os
import re
import stat
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from tandem_services.cli import run_dir
from tandem_services.cli.processes import Identity
from tandem_services.cli.run_dir import KEPT_LOGS, RUN_FILE, Run, describe_killed_run, prepare_run_dir, record_run
from tandem_services.common.errors import StartupError
from tandem_testing.control_groups import can_limit, new_group


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


def run_of(up: Identity, kills: int | None) -> Run:
    return Run(
        up=up, version="1", model="m", model_path="/m", port=1, url="http://h:1", processes=(), memory_kills=kills
    )


@pytest.fixture
def ended() -> Identity:
    """A process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = Identity.of(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert identity is not None
    return identity


@pytest.mark.parametrize(
    ("before", "now", "reported"),
    [
        (2, 5, r"perhaps by the kernel because .*: 3 processes of this machine, of any container,"),
        (2, 2, "killed; not by the kernel for memory"),
        (5, 2, "the kernel's count of kills for memory went back"),
        (None, 2, "does not count kills"),
        (2, None, "does not count kills"),
    ],
)
def test_killed_run_is_described_by_kernel_counters(tmp_path, ended, monkeypatch, before, now, reported):
    prepare(tmp_path)
    record_run(tmp_path, run_of(ended, before))
    monkeypatch.setattr(run_dir, "machine_memory_kills", lambda: now)
    described = describe_killed_run(tmp_path)
    assert described is not None
    assert f"process {ended.pid}" in described
    assert re.search(reported, described)


def test_killed_run_of_an_earlier_boot_blames_nothing(tmp_path, ended):
    prepare(tmp_path)
    record_run(tmp_path, run_of(replace(ended, boot="another"), 0))
    assert (describe_killed_run(tmp_path) or "").endswith(
        "was killed, its machine restarted, or it runs on another machine"
    )


@pytest.mark.parametrize(("namespace", "elsewhere"), [("here", False), ("", False), ("pid:[1]", True)])
def test_run_in_another_container_may_still_run(tmp_path, ended, monkeypatch, namespace, elsewhere):
    """Its process ids mean nothing here."""
    monkeypatch.setattr(run_dir, "machine_memory_kills", lambda: 2)
    prepare(tmp_path)
    where = os.readlink("/proc/self/ns/pid") if namespace == "here" else namespace
    record_run(tmp_path, msgspec.structs.replace(run_of(ended, 2), pid_namespace=where))
    described = describe_killed_run(tmp_path) or ""
    assert ("was killed, or runs in another container that shares it" in described) == elsewhere


def test_folder_that_cannot_be_looked_into_is_described_by_its_check(tmp_path):
    folder = tmp_path / ("x" * 300)
    assert describe_killed_run(folder) is None
    with pytest.raises(StartupError, match="File name too long"):
        prepare(folder)


def test_run_that_stopped_or_runs_is_not_described(tmp_path):
    prepare(tmp_path)
    assert describe_killed_run(tmp_path) is None
    here = Identity.of(os.getpid())
    assert here is not None
    record_run(tmp_path, run_of(here, 0))
    assert describe_killed_run(tmp_path) is None
    record_run(tmp_path, None)
    assert describe_killed_run(tmp_path) is None


EATS_MEMORY = """
import os, sys
from pathlib import Path
from tandem_engine.base.cgroups import machine_memory_kills
from tandem_services.cli.processes import Identity
from tandem_services.cli.run_dir import Run, record_run
record_run(Path(sys.argv[1]), Run(
    up=Identity.of(os.getpid()), version="1", model="m", model_path="/m", port=1, url="http://h:1", processes=(),
    memory_kills=machine_memory_kills(),
))
eaten = [bytearray(1 << 20) for _ in range(1 << 12)]
"""


@pytest.mark.skipif(not can_limit("memory"), reason="NOT CHECKED: no memory control group can be made here")
def test_whole_container_killed_for_memory_is_reported(tmp_path):
    prepare(tmp_path)
    with new_group("memory") as group:
        group.limit(128 << 20)
        with group.entered():
            process = subprocess.Popen([sys.executable, "-c", EATS_MEMORY, str(tmp_path)])
        assert process.wait(60.0) == -9
    # The group is gone, as after a restart of a container.
    assert "perhaps by the kernel because" in (describe_killed_run(tmp_path) or "")
