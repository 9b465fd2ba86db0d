"""The tools that build and run a control plane, as far as they go without one: what they refuse, and in what words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools/kube"


def control_plane(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(TOOLS / "control_plane.py"), *words)
    environment = {**os.environ, "TANDEM_KUBE_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def pretend_built(home: Path) -> None:
    (home / "bin").mkdir(parents=True)
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "crdserver"):
        (home / "bin" / name).write_text("#!/bin/sh\necho out of luck\nexit 1\n")
        (home / "bin" / name).chmod(0o755)


def test_missing_binaries_are_named_with_build_command(tmp_path):
    done = control_plane(tmp_path, "start")
    assert done.returncode == 1
    assert "etcd, kube-apiserver, kube-controller-manager, crdserver missing" in done.stderr
    assert "tools/kube/setup.sh" in done.stderr


def test_foreign_run_folder_is_not_emptied(tmp_path):
    pretend_built(tmp_path)
    kept = tmp_path / "mine" / "thesis.txt"
    kept.parent.mkdir()
    kept.touch()
    done = control_plane(tmp_path, "start", "--run", str(kept.parent))
    assert done.returncode == 1
    assert "not empty and no run of this tool" in done.stderr
    assert kept.exists()


def test_exited_component_is_reported_and_all_are_stopped(tmp_path):
    pretend_built(tmp_path)
    done = control_plane(tmp_path, "start")
    assert done.returncode == 1
    assert "etcd ended" in done.stderr or "kube-apiserver ended" in done.stderr
    assert "out of luck" in done.stderr
    assert control_plane(tmp_path, "status").stdout.startswith("nothing runs")


def test_reused_pid_is_treated_as_ended(tmp_path):
    """Stopping a run long after it died must not end the process that has its number by then."""
    run = tmp_path / "run" / "default"
    run.mkdir(parents=True)
    (run / "etcd.pid").write_text(f"{os.getpid()} 1\n")
    assert "etcd                       ended" in control_plane(tmp_path, "status").stdout
    assert control_plane(tmp_path, "stop").returncode == 0  # and we are still here


@pytest.mark.parametrize("action", ["start", "hold"])
def test_run_that_is_in_use_is_left_alone(tmp_path, action):
    pretend_built(tmp_path)
    run = tmp_path / "run" / "default"
    run.mkdir(parents=True)
    (run / ".tandem-kube-run").touch()
    with subprocess.Popen(("sleep", "60")) as etcd:
        started = Path(f"/proc/{etcd.pid}/stat").read_text().rpartition(")")[2].split()[19]
        (run / "etcd.pid").write_text(f"{etcd.pid} {started}\n")
        done = control_plane(tmp_path, action)
        assert done.returncode == 1
        assert "is running (etcd): stop it first" in done.stderr
        assert etcd.poll() is None
        assert control_plane(tmp_path, "stop").returncode == 0
        assert etcd.wait() != 0


def test_kube_tests_without_control_plane_skip_with_one_line(tmp_path):
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kube")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TANDEM_KUBE_HOME": str(tmp_path)}
    environment.pop("TANDEM_KUBE_REQUIRED", None)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    # Tests of the charts may lack Helm, too, and say so in a line of their own.
    lines = [line for line in skipped if "helm_library" not in line]
    assert len(lines) == 1, skipped
    assert "NO TEST AGAINST KUBERNETES WAS RUN: etcd" in lines[0]
    assert "make test-kube" in lines[0]


@pytest.mark.parametrize("script", sorted(TOOLS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_syntactically_right(script):
    assert subprocess.run(("bash", "-n", str(script)), check=False).returncode == 0


@pytest.mark.parametrize("name", ["build_control_plane.sh", "build_crd_engine.sh", "setup.sh"])
def test_scripts_explain_themselves(name):
    done = subprocess.run((str(TOOLS / name), "--help"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: {name}" in done.stdout
