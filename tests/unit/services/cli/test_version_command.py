"""`tandem --version` and `tandem version`."""

import json
import os
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from tandem_engine.base.release import product_version
from tandem_engine.kernels.cpu.target import NATIVE, TARGETS
from tandem_services.cli import version
from tandem_services.cli.main import main

REPORT = """
import sys
from importlib.metadata import PathDistribution
from tandem_services.cli.start import tandem
sys.argv = ["tandem", "--version"]
status = tandem()
print(*sorted(sys.modules), file=sys.stderr)
raise SystemExit(status)
"""


def test_version_flag_imports_next_to_nothing():
    """The whole command line takes a hundred times as long to load, torch a thousand times."""
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == f"tandem {product_version()}\n"
    modules = done.stderr.split()
    ours = {name for name in modules if name.partition(".")[0].startswith("tandem_")}
    assert ours == {
        "tandem_engine",
        "tandem_engine.base",
        "tandem_engine.base.release",
        "tandem_services",
        "tandem_services.cli",
        "tandem_services.cli.start",
        "tandem_services.cli.version",
    }
    assert not {"torch", "numpy", "yaml", "httpx", "rich", "msgspec"} & {*modules}


def test_version_command_lists_packages_of_engine_behavior(capsys):
    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found)[:3] == ["tandem", "commit", "python"]
    assert {"torch", "torch_build", "numba", "nixl", "transformers", "tandem-llm-valkey"} <= found.keys()
    assert found["tandem"] == product_version()
    assert found["kernel_target"] in {*TARGETS, NATIVE}


def test_version_of_missing_package_is_null(monkeypatch, capsys):
    monkeypatch.setattr(version, "OTHERS", ("torch-that-is-not-there",))
    monkeypatch.setattr(version, "TARGET", ("false",))
    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["torch-that-is-not-there"], found["kernel_target"]) == (None, None)
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"tandem             {product_version()}"
    assert "torch-that-is-not-there not installed" in lines


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    run = subprocess.run(["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_commit_is_that_of_the_checkout_and_marks_changes(tmp_path):
    file = tmp_path / "services/tandem_services/cli/version.py"
    file.parent.mkdir(parents=True)
    file.write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert version.commit_of(file) == commit
    file.write_text("2")
    assert version.commit_of(file) == f"{commit}+"


def test_version_ignores_repository_around_the_environment(tmp_path, monkeypatch):
    file = tmp_path / ".venv/lib/site-packages/tandem_services/cli/version.py"
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "another version", "--allow-empty")
    (tmp_path / "services/tandem_services").mkdir(parents=True)
    info = tmp_path / "tandem_llm-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tandem-llm\nVersion: 1\n")
    monkeypatch.setattr(version, "_distribution", lambda _: PathDistribution(info))
    assert version.commit_of(file) is None
    (info / "direct_url.json").write_text('{"url": "https://a/b", "vcs_info": {"vcs": "git", "commit_id": "0ab1"}}')
    assert version.commit_of(file) == "0ab1"


@pytest.mark.parametrize(("text", "build"), [("cuda: Optional[str] = '13.0'", "cuda 13.0"), ("cuda = None", "cpu")])
def test_build_of_torch_is_read_without_importing_it(text, build, tmp_path):
    info = tmp_path / "torch-1.dist-info"
    (tmp_path / "torch").mkdir()
    info.mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '1'\n{text}\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1\n")
    assert version.torch_build(PathDistribution(info)) == build
