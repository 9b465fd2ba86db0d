"""tools/setup.sh: when it has nothing to do. What it would install is not there, so it ends with an error instead."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SETUP = ROOT / "tools/setup.sh"


def file_line(name: str) -> str:
    """As sha256sum prints it."""
    return f"{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}  {name}\n"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder without package managers and Python, for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "cut", "dirname", "id", "sha256sum"):
        (folder / name).symlink_to(shutil.which(name) or name)
    (folder / "redis-server").write_text("")
    (folder / "redis-server").chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("earlier", "kind", "torch", "done"),
    [
        ("cpu runtime", "runtime", None, True),
        ("cpu dev", "runtime", None, True),
        ("cpu dev", "dev", "cpu", True),
        ("cuda dev", "runtime", None, True),
        ("cpu runtime", "dev", None, False),
        ("cuda dev", "runtime", "cpu", False),
    ],
)
def test_setup_has_nothing_to_do(
    commands: Path, tmp_path: Path, earlier: str, kind: str, torch: str | None, done: bool
) -> None:
    files = file_line("pyproject.toml") + file_line("tools/setup.sh")
    stamp = f"{hashlib.sha256(files.encode()).hexdigest()} {earlier}\n"
    (tmp_path / ".tandem-setup").write_text(stamp)
    variables = {"PATH": str(commands), "TANDEM_VENV": str(tmp_path), "PYTHON": "absent"}
    variables |= {} if torch is None else {"TANDEM_TORCH": torch}
    bash = shutil.which("bash") or "bash"
    ended = subprocess.run([bash, SETUP, kind], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == (0 if done else 1), ended.stderr
    assert bool(ended.stdout) is not done
    assert ("python3-venv" in ended.stderr) is not done
