"""The import rules of the repository's layout, checked from outside as a user would trip over them."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "engine": "tandem_engine",
    "services": "tandem_services",
    "operator": "tandem_operator",
    "lab": "tandem_lab",
}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", [*PACKAGES, "charts", "docker", "tests"])
def test_no_init_file_shadows_the_standard_library(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_tests_folder_has_no_package_markers() -> None:
    markers = [p for p in (ROOT / "tests").rglob("__init__.py") if "tandem_testing" not in p.parts]
    assert markers == []


def test_test_file_names_are_unique() -> None:
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_python_works_with_repository_root_on_sys_path() -> None:
    done = run_python("import sys; sys.path.insert(0, ''); import collections, operator; operator.add(1, 2)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "tandem_engine",
        "tandem_engine.messages.codec",
        "tandem_engine.messages.control",
        "tandem_engine.ipc.channels",
        "tandem_services.cli.main",
        "tandem_services.cli.k8s.views",
        "tandem_services.gateway.app",
        "tandem_services.router.router",
        "tandem_services.router_server.serve",
        "tandem_services.worker.main",
        "tandem_lab.cli.verify",
        "tandem_lab.simulate.run",
    ],
)
def test_processes_without_torch_can_import(module: str) -> None:
    done = run_python(f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)")
    assert done.returncode == 0, done.stderr or f"{module} imports torch or transformers"


def test_engine_package_imports_submodules_lazily() -> None:
    done = run_python(
        "import sys, tandem_engine; before = {m for m in sys.modules if m.startswith(('tandem_engine.', 'torch'))}; "
        "from tandem_engine import SamplingParams; sys.exit(bool(before) or 'torch' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr or "tandem_engine imports more than itself"


@pytest.mark.parametrize(
    "package",
    ["tandem_engine/messages", "tandem_engine/ipc", "tandem_engine/tokenizer", "tandem_engine/library"],
)
def test_package_markers_on_the_light_path_are_empty(package: str) -> None:
    assert (ROOT / "engine" / package / "__init__.py").read_text() == ""


BANNED_CALLS = {"eval", "exec", "compile"}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def sources() -> list[Path]:
    return [p for folder, package in PACKAGES.items() for p in (ROOT / folder / package).rglob("*.py")]


def test_sources_use_no_pickle_and_no_eval() -> None:
    """No pickle and its kin, no eval or exec, in anything that ships [no-pickle]."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found += [f"{path}: {a.name}" for a in node.names if a.name.split(".")[0] in BANNED_MODULES]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
                found.append(f"{path}: {node.module}")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                found.append(f"{path}:{node.lineno}: {node.func.id}()")
    assert found == []


ENVIRONMENT_READERS = {
    "engine/tandem_engine/base/environment.py",
    "operator/tandem_operator/settings.py",
    "services/tandem_services/common/settings.py",
}


def test_environment_is_read_in_one_file_per_package() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name)
    }
    assert readers <= ENVIRONMENT_READERS


def modules() -> list[Path]:
    found = [p for part, package in PACKAGES.items() for p in (ROOT / part / package).rglob("*.py")]
    return [p for p in found if not p.name.endswith("_pb2.py")]


def test_no_module_is_longer_than_500_lines() -> None:
    assert [str(p) for p in modules() if p.read_text("utf-8").count("\n") > 500] == []


def test_no_folder_holds_more_than_25_modules() -> None:
    folders = Counter(str(p.parent) for p in modules() if p.name != "__init__.py")
    assert {folder: count for folder, count in folders.items() if count > 25} == {}
