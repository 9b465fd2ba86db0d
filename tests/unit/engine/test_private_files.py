"""Files with prompts, KV or keys are their user's alone."""

import os
import stat

import pytest

from tandem_engine.base.linux import keep_files_private, private_opener


@pytest.fixture(autouse=True)
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_opened_file_is_private_with_any_umask(tmp_path) -> None:
    with open(tmp_path / "kv", "wb", opener=private_opener) as file:
        file.write(b"kv")
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o600


def test_server_process_makes_private_files_and_folders(tmp_path) -> None:
    keep_files_private()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker.log").write_text("prompt")
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "logs" / "worker.log").stat().st_mode) == 0o600
