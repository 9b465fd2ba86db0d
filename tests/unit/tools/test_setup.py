"""tools/setup.sh: when it has nothing to do. What it would install is not there, so it ends with an error instead."""

import hashlib
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SETUP = ROOT / "tools/setup.sh"
FILES = ("pyproject.toml", "tools/setup.sh", "docker/locks/engine-cpu.txt", "docker/constraints.txt")
"""Which a set-up depends on."""


def file_line(name: str) -> str:
    """As sha256sum prints it."""
    return f"{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}  {name}\n"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder without package managers and Python, for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "cut", "dirname", "env", "grep", "id", "sha256sum"):
        (folder / name).symlink_to(shutil.which(name) or name)
    (folder / "redis-server").write_text("")
    (folder / "redis-server").chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("earlier", "kind", "given", "done"),
    [
        ("cpu runtime yes", "runtime", {}, True),
        ("cpu dev yes", "runtime", {}, True),
        ("cpu dev yes", "dev", {"TANDEM_TORCH": "cpu"}, True),
        ("cuda dev yes", "runtime", {}, True),
        ("cpu runtime yes", "dev", {}, False),
        ("cuda dev yes", "runtime", {"TANDEM_TORCH": "cpu"}, False),
        ("cpu runtime yes", "runtime", {"TANDEM_LOCK": "no"}, False),
        ("cpu runtime no", "runtime", {"TANDEM_LOCK": "yes"}, False),
        ("cpu runtime no", "runtime", {}, True),
        ("cpu dev yes", "runtime", {"TANDEM_LOCK": "no"}, True),
    ],
)
def test_setup_has_nothing_to_do(
    commands: Path, tmp_path: Path, earlier: str, kind: str, given: dict[str, str], done: bool
) -> None:
    files = "".join(map(file_line, FILES))
    stamp = f"{hashlib.sha256(files.encode()).hexdigest()} {earlier}\n"
    (tmp_path / ".tandem-setup").write_text(stamp)
    variables = {"PATH": str(commands), "TANDEM_VENV": str(tmp_path), "PYTHON": "absent", **given}
    bash = shutil.which("bash") or "bash"
    ended = subprocess.run([bash, SETUP, kind], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == (0 if done else 1), ended.stderr
    assert bool(ended.stdout) is not done
    assert ("python3-venv" in ended.stderr) is not done


PROGRAM = """\
#!/bin/sh
case "$*" in
*platform*) echo "$MACHINE" ;;
*compileall*) ;;
"-m pip "*) echo "$*" >>"$LOG"; case "$*" in *"${LACKING:-nothing}"*) exit 1 ;; esac ;;
esac
"""
"""A Python that installs nothing, and fails where it is called with LACKING."""


@pytest.fixture
def environment(commands: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a set-up whose environment is there, and whose pip writes what it is called with to LOG."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    for place in (commands / "python", tmp_path / "venv/bin/python"):
        place.write_text(PROGRAM)
        place.chmod(0o755)
    return {
        "PATH": str(commands),
        "TANDEM_VENV": str(tmp_path / "venv"),
        "PYTHON": "python",
        "LOG": str(tmp_path / "log"),
    }


@pytest.mark.parametrize(
    ("kind", "variables", "installed"),
    [
        (
            "runtime",
            {"MACHINE": "x86_64 3 11"},
            ["--require-hashes --no-deps --requirement VENV/.tandem-lock", "--no-deps -e ."],
        ),
        ("runtime", {"MACHINE": "x86_64 3 12"}, ["torch", "--constraint docker/constraints.txt -e .[engine]"]),
        ("runtime", {"MACHINE": "aarch64 3 11"}, ["torch", "--constraint docker/constraints.txt -e .[engine]"]),
        (
            "runtime",
            {"MACHINE": "x86_64 3 11", "TANDEM_TORCH": "cuda"},
            ["torch", "--constraint docker/constraints.txt -e .[engine]"],
        ),
        ("runtime", {"MACHINE": "x86_64 3 11", "TANDEM_LOCK": "no"}, ["torch", "-e .[engine]"]),
        ("dev", {"MACHINE": "x86_64 3 11"}, ["torch", "-e .[dev]"]),
    ],
)
def test_setup_installs_locked_versions_of_runtime_packages(
    environment: dict[str, str], kind: str, variables: dict[str, str], installed: list[str]
) -> None:
    bash = shutil.which("bash") or "bash"
    subprocess.run([bash, SETUP, kind], env=environment | variables, capture_output=True, check=True)
    common = "-m pip --disable-pip-version-check install --no-compile "
    lines = Path(environment["LOG"]).read_text().replace(environment["TANDEM_VENV"], "VENV").splitlines()
    assert [line.removeprefix(common).partition("torch==2")[0] or "torch" for line in lines] == installed


@pytest.mark.parametrize(
    ("machine", "lacking", "calls"),
    [("x86_64 3 11", "--require-hashes", 2), ("x86_64 3 12", "--constraint", 2)],
)
def test_index_without_locked_versions_has_a_way_out(
    environment: dict[str, str], machine: str, lacking: str, calls: int
) -> None:
    bash, failing = shutil.which("bash") or "bash", environment | {"MACHINE": machine, "LACKING": lacking}
    ended = subprocess.run([bash, SETUP, "runtime"], env=failing, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "TANDEM_LOCK=no takes what it has" in ended.stderr
    assert len(Path(environment["LOG"]).read_text().splitlines()) == calls
    for variables in ({"TANDEM_LOCK": "no"}, {}):
        # The second one has nothing to do: the choice stays.
        subprocess.run([bash, SETUP, "runtime"], env=failing | variables, capture_output=True, check=True)
    installed = Path(environment["LOG"]).read_text().splitlines()[calls:]
    assert [line.rpartition(" ")[2] for line in installed] == ["torch==2.13.0+cpu", ".[engine]"]


def test_modules_that_setup_compiles_by_import_exist() -> None:
    [line] = [line for line in SETUP.read_text().splitlines() if line.strip().startswith("for imported in ")]
    names = line.partition(" in ")[2].partition(";")[0].replace(",", " ").split()
    assert len(names) == 4
    assert [name for name in names if find_spec(name) is None] == []
