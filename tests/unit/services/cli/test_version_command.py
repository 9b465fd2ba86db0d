"""`tandem --version` and `tandem version`."""

import json
import os
import subprocess
import sys
from importlib.metadata import PathDistribution

import pytest

from tandem_engine.base.version import product_version
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
        "tandem_engine.base.version",
        "tandem_services",
        "tandem_services.cli",
        "tandem_services.cli.start",
        "tandem_services.cli.version",
    }
    assert not {"torch", "numpy", "yaml", "httpx", "rich", "msgspec"} & {*modules}


def test_version_command_has_what_decides_an_engines_behavior(capsys):
    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found)[:2] == ["tandem", "python"]
    assert {"torch", "torch_build", "numba", "nixl", "transformers"} <= found.keys()
    assert found["tandem"] == product_version()
    assert main(["version"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"tandem        {product_version()}"


def test_version_of_what_is_not_installed_is_null(monkeypatch, capsys):
    monkeypatch.setattr(version, "OTHERS", ("torch-that-is-not-there",))
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["torch-that-is-not-there"] is None
    assert main(["version"]) == 0
    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "build"), [("cuda: Optional[str] = '13.0'", "cuda 13.0"), ("cuda = None", "cpu")])
def test_build_of_torch_is_read_without_importing_it(text, build, tmp_path):
    info = tmp_path / "torch-1.dist-info"
    (tmp_path / "torch").mkdir()
    info.mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '1'\n{text}\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1\n")
    assert version.torch_build(PathDistribution(info)) == build
