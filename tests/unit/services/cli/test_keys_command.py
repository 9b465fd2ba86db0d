"""`tandem keys create --file`: what it writes is what a gateway reads."""

import errno
import fcntl
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from tandem_engine.ipc.keys import KeyPair
from tandem_services.cli import keys as keys_command
from tandem_services.cli.main import main
from tandem_services.gateway.access.keys import read_keys


def create(*argv: str) -> int:
    return main(["keys", "create", *argv])


def test_keys_are_added_to_a_file_that_a_gateway_takes(tmp_path, capsys) -> None:
    """The bare entry, sent to a file as in a former install.md, was one that no gateway takes."""
    path = tmp_path / "keys.json"
    assert create("search", "--requests-per-minute", "600", "--file", str(path)) == 0
    assert create("ops", "--admin", "--file", str(path)) == 0
    reported = capsys.readouterr()
    keys = {line.split()[2].rstrip(","): line.rpartition(": ")[2] for line in reported.err.splitlines()}
    ring = read_keys(path)
    assert reported.out == ""
    assert [tenant.name for tenant in ring.tenants] == ["search", "ops"]
    assert {name: ring.find(key).name for name, key in keys.items()} == {"search": "search", "ops": "ops"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_key_file_keeps_mode_and_entries_on_duplicate_name(tmp_path, capsys) -> None:
    path = tmp_path / "keys.json"
    assert create("search", "--file", str(path)) == 0
    path.chmod(0o640)
    before = path.read_bytes()
    assert create("search", "--file", str(path)) == 2
    assert "two entries have the name search" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert create("other", "--file", str(path)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.fixture
def of_another_user(monkeypatch):
    """Makes the command see the file that is there as another user's, for any user of the test."""
    replace = keys_command._replace

    def seen(path: Path, content: bytes, former: os.stat_result) -> None:
        uid, gid = former.st_uid + 1, former.st_gid + 1
        replace(path, content, os.stat_result((*former[:4], uid, gid, *former[6:])))

    return lambda: monkeypatch.setattr(keys_command, "_replace", seen)


def test_rewritten_key_file_keeps_owner_set_before_mode(tmp_path, monkeypatch, of_another_user) -> None:
    """`sudo tandem keys create` made the file root's, and the gateway could not read it any more."""
    path = tmp_path / "keys.json"
    assert create("search", "--file", str(path)) == 0
    path.chmod(0o640)
    before = path.stat()
    given, change_mode = [], os.fchmod

    def give(descriptor: int, uid: int, gid: int) -> None:
        given.append((uid, gid, stat.S_IMODE(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_size))

    def fchmod(descriptor: int, mode: int) -> None:
        assert given
        change_mode(descriptor, mode)

    of_another_user()
    monkeypatch.setattr(os, "fchown", give)
    monkeypatch.setattr(os, "fchmod", fchmod)
    assert create("ops", "--file", str(path)) == 0
    assert given == [(before.st_uid + 1, before.st_gid + 1, 0o600, 0)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_root_adds_a_key_to_the_file_of_another_user(tmp_path) -> None:
    path = tmp_path / "keys.json"
    assert create("search", "--file", str(path)) == 0
    os.chown(path, 65534, 65534)
    assert create("ops", "--file", str(path)) == 0
    after = path.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (65534, 65534, 0o600)


def test_key_file_is_unchanged_if_owner_cannot_be_kept(tmp_path, monkeypatch, capsys, of_another_user) -> None:
    path = tmp_path / "keys.json"
    assert create("search", "--file", str(path)) == 0
    before = path.read_bytes()

    def refused(descriptor: int, uid: int, gid: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    of_another_user()
    monkeypatch.setattr(os, "fchown", refused)
    capsys.readouterr()
    assert create("ops", "--file", str(path)) == 2
    reported = capsys.readouterr().err
    assert f"--file {path} belongs to user {path.stat().st_uid + 1}" in reported
    assert "shown only now" not in reported
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_keys_created_at_the_same_time_are_both_in_the_file(tmp_path, monkeypatch) -> None:
    """The second read the file before the first had replaced it, and wrote it without the first's entry."""
    path = tmp_path / "keys.json"
    lock, replace = fcntl.flock, keys_command._replace
    second = threading.Thread(target=create, args=("ops", "--file", str(path)))
    waits = threading.Event()

    def flock(descriptor: int, operation: int) -> None:
        if threading.current_thread() is second:
            waits.set()
        lock(descriptor, operation)

    def replaced(*args: object) -> None:
        if threading.current_thread() is not second:
            second.start()
            assert waits.wait(60)
        replace(*args)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(keys_command, "_replace", replaced)
    assert create("search", "--file", str(path)) == 0
    second.join(60)
    assert [tenant.name for tenant in read_keys(path).tenants] == ["search", "ops"]


def test_key_is_added_where_folders_cannot_be_locked(tmp_path, monkeypatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", refused)
    assert create("search", "--file", str(tmp_path / "keys.json")) == 0


@pytest.mark.parametrize(
    ("content", "sentence"), [("{}", "--file keys.json"), ("no json", "--file keys.json: not valid JSON")]
)
def test_file_that_is_no_key_file_is_left_alone(content, sentence, tmp_path, capsys) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    assert create("search", "--file", str(path)) == 2
    assert sentence in capsys.readouterr().err
    assert path.read_text() == content


def test_folder_that_is_not_there_is_named(tmp_path, capsys) -> None:
    assert create("search", "--file", str(tmp_path / "no" / "keys.json")) == 2
    assert f"--file {tmp_path}/no/keys.json: No such file or directory" in capsys.readouterr().err


def test_entry_goes_to_standard_output_without_a_file(capsys) -> None:
    assert create("search", "--concurrency", "4", "--model", "a", "--model", "b") == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["name"], entry["concurrency"], entry["models"]) == ("search", 4, ["a", "b"])


def test_name_that_no_gateway_takes_is_wrong_usage(capsys) -> None:
    assert create("two words") == 2
    assert "no gateway would take this entry" in capsys.readouterr().err


def test_deployment_key_file_is_new_private_and_usable(tmp_path, capsys) -> None:
    path = tmp_path / "keys.json"
    assert main(["keys", "deployment", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = KeyPair.load(path)
    assert main(["keys", "deployment", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert KeyPair.load(path) == before
    assert main(["keys", "deployment", str(tmp_path / "no" / "keys.json")]) == 2
