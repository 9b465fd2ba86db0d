"""tools/release/images.sh, as far as it goes without buildah: what it refuses, and in what words."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def images(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PATH": path} if path is not None else {})}
    command = ["/bin/bash", str(ROOT / "tools/release/images.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("words", "error_message"),
    [
        ((), "name a folder: see --help"),
        (("out", "--thrice"), "no option '--thrice': see --help"),
        (("out", "--push", "--sign-by"), "--sign-by: name a key"),
        (("out", "--sign-by", "release"), "--sign-by is about images in a registry: add --push"),
    ],
)
def test_wrong_command_lines_are_refused(words, error_message):
    done = images(*words)
    assert done.returncode == 1
    assert error_message in done.stderr


def test_missing_buildah_is_named_with_its_package(tmp_path):
    for name in ("dirname", "realpath"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = images(str(tmp_path / "out"), path=str(tmp_path))
    assert done.returncode == 1
    assert "buildah is missing: apt-get install -y buildah" in done.stderr
    assert not (tmp_path / "out").exists()


def test_help_is_the_comment_of_the_script():
    done = images("--help")
    assert done.returncode == 0
    assert "--twice" in done.stdout
    assert "images.txt" in done.stdout
