"""Commands without the extra they need, on a full disk, and interrupted while they load: a sentence, no traceback."""

import errno
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from tandem_engine.base.extras import EXTRAS, lacking
from tandem_engine.base.release import DISTRIBUTION
from tandem_lab import __main__ as cli
from tandem_services.cli import entry
from tandem_services.cli import main as command
from tandem_testing.import_blocker import write_import_blocker

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
"""


def run(folder: Path, script: str, *argv: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    module, _, function = script.partition(":")
    code = f"import sys; from {module} import {function}; sys.argv[0] = 'x'; sys.exit({function}())"
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env=os.environ | env | {"PYTHONPATH": ":".join([str(folder), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("script", "argv", "extra"),
    [
        ("tandem_services.cli.start:tandem", ["verify", "--quick"], "engine"),
        ("tandem_services.cli.start:tandem", ["bench", "offline"], "engine"),
        ("tandem_services.cli.start:tandem", ["accuracy"], "engine"),
        ("tandem_lab.__main__:main", ["verify", "--model", "models/tandem-mini"], "engine"),
        ("tandem_services.cli.start:tandem", ["k8s", "status"], "operator"),
        ("tandem_services.cli.start:kubectl_tandem", ["status"], "operator"),
        ("tandem_services.cli.start:tandem", ["router", "--redis-url", "redis://127.0.0.1:1"], "router"),
        ("tandem_operator.start:main", ["--namespace", "x"], "operator"),
    ],
)
def test_command_without_its_extra_names_the_extra(tmp_path, script, argv, extra):
    folder = write_import_blocker(tmp_path / "site", *EXTRAS[extra])
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    done = run(folder, script, *argv, env={"KUBECONFIG": str(tmp_path / "kubeconfig")})
    assert done.returncode not in (0, None)
    assert f"is not installed: pip install 'tandem-llm[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_table_of_extras_covers_every_distribution():
    distributions = packages_distributions()
    for line in requires(DISTRIBUTION) or ():
        found = re.match(r"([\w.-]+)(?:\[[^]]*\])?[^;]*;.*extra == ['\"](\w+)['\"]", line)
        if found is None or found[2] not in EXTRAS:
            continue
        name, extra = found.groups()
        modules = {module for module, owners in distributions.items() if name.lower() in map(str.lower, owners)}
        assert modules & {*EXTRAS[extra]}, f"{name} of the extra {extra}: none of {sorted(modules)} is in EXTRAS"


def test_module_of_no_extra_is_not_explained():
    assert lacking(ModuleNotFoundError("x", name="tandem_engine.nope")) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_of_an_engine_command_is_one_sentence(monkeypatch, capsys, number):
    def run(*_, **__):
        raise OSError(number, os.strerror(number), "/data/table.json")

    monkeypatch.setattr("tandem_lab.verify.command.run_verify", run)
    assert cli.main(["verify", "--model", "x"]) == 3
    assert capsys.readouterr().err == (
        "tandem: error: no space left on the disk for /data/table.json: free some, or use a folder on another disk\n"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_one_sentence(monkeypatch, capsys, number):
    def build():
        raise OSError(number, os.strerror(number), "/data/keys.json")

    assert entry.run_command(build, []) == 3
    assert capsys.readouterr().err == (
        "tandem: error: no space left on the disk for /data/keys.json: free some, or use a folder on another disk\n"
    )


def test_other_os_errors_are_not_explained():
    assert lacking(OSError(errno.EACCES, "denied", "x")) is None


@pytest.mark.parametrize("module", ["tandem_services.cli.main", "rich", "tandem_lab.cli.verify", "argparse"])
def test_ctrl_c_while_a_command_loads_leaves_no_traceback(tmp_path, module):
    """The process interrupts itself when it imports `module`."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, signal, sys

class Interrupt:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r} and "tandem_services.cli.start" in sys.modules:
            os.kill(os.getpid(), signal.SIGINT)

sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Interrupt)
"""
    )
    done = run(tmp_path, "tandem_services.cli.start:tandem", "chat", "--url", "http://127.0.0.1:1", env={})
    assert done.stderr == ""
    assert done.returncode in (130, -signal.SIGINT)


def test_command_of_the_lab_where_it_is_missing_names_it(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert command.main(["verify", "--quick", "--json", "x"]) == 3
    assert "tandem_lab is not installed here: pip install 'tandem-llm[lab]'" in capsys.readouterr().err


def test_install_hints_name_extras_of_pyproject():
    """The distribution's own name, and nothing of another distribution's."""
    root = Path(__file__).parents[4]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    assert {*EXTRAS} <= {*project["optional-dependencies"]}
    texts = [
        path.read_text("utf-8")
        for part in ("engine", "services", "operator", "lab")
        for path in (root / part).rglob("*.py")
    ]
    hints = {hint for text in texts for hint in re.findall(r"pip install '?([\w.-]+)", text)}
    assert hints <= {"nixl"}, "hints of ours are made by `install_hint`"
