"""tools/setup.sh: when it has nothing to do. What it would install is not there, so it ends with an error instead."""

import hashlib
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tools.uv_settings import UnknownError, assignments, settings

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
"-m pip config list") echo "global.index-url='https://user:word@index.example/simple'"; echo "global.$SETTING='1'" ;;
*tools/uv_settings.py) exec "$REAL" tools/uv_settings.py ;;
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
        "REAL": sys.executable,
        "SETTING": "retries",
    }


@pytest.mark.parametrize(
    ("kind", "variables", "installed"),
    [
        (
            "runtime",
            {"MACHINE": "x86_64 3 11"},
            [
                "-q --require-hashes --no-deps -r docker/locks/uv.txt",
                "--require-hashes --no-deps --requirement VENV/.tandem-lock",
                "--no-deps -e .",
            ],
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


UV = """\
#!/bin/sh
echo "$UV_DEFAULT_INDEX $*" >>"$LOG"
case "$*" in *"${UV_LACKING:-nothing}"*) exit 1 ;; esac
"""
"""Installs nothing either."""
LOCK, HERE = "--require-hashes -r VENV/.tandem-lock", "--no-deps -e ."


@pytest.mark.parametrize(
    ("variables", "by_uv", "by_pip"),
    [
        ({}, [LOCK, HERE], []),
        ({"SETTING": "constraint"}, [], ["--requirement VENV/.tandem-lock", HERE]),
        ({"LACKING": "uv.txt"}, [], ["--requirement VENV/.tandem-lock", HERE]),
        (
            {"UV_LACKING": "--require-hashes"},
            [LOCK, f"{LOCK} --index https://download.pytorch.org/whl/cpu"],
            ["--requirement VENV/.tandem-lock", HERE],
        ),
        ({"UV_LACKING": "-e ."}, [LOCK, HERE], [HERE]),
    ],
    ids=["uv does", "a setting of pip alone", "no uv", "uv lacks a file", "uv cannot build"],
)
def test_uv_installs_the_lock_and_pip_what_uv_cannot(
    environment: dict[str, str], variables: dict[str, str], by_uv: list[str], by_pip: list[str]
) -> None:
    venv, bash = Path(environment["TANDEM_VENV"]), shutil.which("bash") or "bash"
    (venv / "bin/uv").write_text(UV)
    (venv / "bin/uv").chmod(0o755)
    given = environment | {"MACHINE": "x86_64 3 11", "LACKING": "nothing"} | variables
    subprocess.run([bash, SETUP, "runtime"], env=given, capture_output=True, check=True)
    lines = Path(environment["LOG"]).read_text().replace(str(venv), "VENV").splitlines()
    uv = "https://user:word@index.example/simple pip install --python VENV/bin/python --index-strategy "
    uv += "unsafe-best-match --no-deps "
    assert [line.removeprefix(uv) for line in lines if "-m pip" not in line] == [
        each.removeprefix("--no-deps ") for each in by_uv
    ]
    pip = [line for line in lines if "-m pip" in line and "uv.txt" not in line]
    assert len(pip) == len(by_pip)
    assert all(line.endswith(end) for line, end in zip(pip, by_pip, strict=True))


def test_uv_asks_the_indexes_of_pip() -> None:
    listed = [
        "global.cert='/ca.pem'",
        "global.index-url='https://one.example/simple'",
        "global.no-index='true'",
        "global.timeout='60'",
        "install.no-index='0'",
        ":env:.extra-index-url='https://two.example/simple\\nhttps://three.example/simple'",
        ":env:.find-links='/wheels more'",
        "download.index-url='https://other.example/simple'",
    ]
    expected = [
        "export SSL_CERT_FILE=/ca.pem",
        "export UV_DEFAULT_INDEX=https://one.example/simple",
        "export UV_INDEX='https://two.example/simple https://three.example/simple'",
        "export UV_FIND_LINKS=/wheels,more",
        "UV_FLAGS=()",
    ]
    # uv's own variables override pip's settings.
    assert assignments(settings(listed), {"UV_HTTP_TIMEOUT": "5", "REQUESTS_CA_BUNDLE": "/other.pem"}) == expected
    assert assignments({"no-index": "1"}, {"CURL_CA_BUNDLE": "/ca.pem"}) == [
        "export SSL_CERT_FILE=/ca.pem",
        "UV_FLAGS=(--no-index)",
    ]
    with pytest.raises(UnknownError, match="only-binary"):
        assignments(settings([":env:.only-binary=':all:'"]), {})


@pytest.mark.parametrize(
    ("machine", "lacking", "calls"),
    [("x86_64 3 11", "--require-hashes", 3), ("x86_64 3 12", "--constraint", 2)],
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
    text = SETUP.read_text()
    names = text[text.index("for imported in ") :].partition("for imported in ")[2].partition(";")[0]
    modules = names.replace("\\\n", " ").replace(",", " ").split()
    assert len(modules) == 7
    assert [name for name in modules if find_spec(name) is None] == []
