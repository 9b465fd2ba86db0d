"""Folders in the temporary folder that only this user reads."""

import os

import pytest

from tandem_services.common.private_folder import private_folder


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def test_private_folder_is_the_same_at_each_call(tmp_path):
    folder = private_folder("cores")
    assert folder == private_folder("cores") == tmp_path / f"tandem-{os.getuid()}" / "cores"
    assert [one.stat().st_mode & 0o777 for one in (folder, folder.parent)] == [0o700, 0o700]


def test_private_folder_reached_by_link_is_rejected(tmp_path):
    private_folder("cores").rmdir()
    (tmp_path / f"tandem-{os.getuid()}" / "cores").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is not a folder of this user alone"):
        private_folder("cores")


def test_private_folder_open_to_others_is_rejected():
    private_folder().chmod(0o755)
    with pytest.raises(PermissionError, match="is not a folder of this user alone"):
        private_folder("cores")
