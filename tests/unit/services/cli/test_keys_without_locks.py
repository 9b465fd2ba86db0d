"""`tandem keys create --file` where folders cannot be locked, as on some network file systems."""

import errno
import fcntl
import os

import pytest

from tandem_services.cli import keys as keys_command
from tandem_services.cli.main import main
from tandem_services.gateway.access.keys import read_keys


@pytest.fixture(autouse=True)
def without_locks(monkeypatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", refused)


def test_second_of_two_concurrent_creates_is_rejected(tmp_path, monkeypatch, capsys) -> None:
    """Both reported success, and one of the keys was not in the file."""
    path, replace = tmp_path / "keys.json", keys_command._replace

    def create_second(*args: object) -> None:
        monkeypatch.setattr(keys_command, "_replace", replace)
        assert main(["keys", "create", "ops", "--file", str(path)]) == 2
        reported = capsys.readouterr().err
        assert f"--file {path}: another `tandem keys create` changes it" in reported
        assert "shown only now" not in reported
        replace(*args)

    monkeypatch.setattr(keys_command, "_replace", create_second)
    assert main(["keys", "create", "search", "--file", str(path)]) == 0
    assert [tenant.name for tenant in read_keys(path).tenants] == ["search"]
    assert main(["keys", "create", "ops", "--file", str(path)]) == 0
    assert [tenant.name for tenant in read_keys(path).tenants] == ["search", "ops"]
    assert list(tmp_path.iterdir()) == [path]


def test_leftover_of_killed_create_is_named(tmp_path, capsys) -> None:
    left = tmp_path / ".keys.json.lock"
    left.touch()
    assert main(["keys", "create", "search", "--file", str(tmp_path / "keys.json")]) == 2
    assert f"you may remove {left}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [left]
