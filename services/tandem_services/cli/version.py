"""`tandem version`, and `tandem --version`: from the metadata of distributions, without importing any of them.

The commit is that of the checkout which has this file, or the one that pip has installed from a repository. The kind of
CPU that kernels are compiled for comes from a process of the engine, which has the compiler.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from tandem_engine.base.release import DISTRIBUTION, product_version

OTHERS = ("torch", "numba", "nixl", "transformers", "tandem-llm-valkey")
"""Distributions that decide what an engine, and a service on one machine, do."""

TARGET = (sys.executable, "-m", "tandem_engine.cli", "kernels", "target")
PATIENCE_S = 30.0

_ABSENT = {"commit": "unknown", "kernel_target": "none: numba is not installed"}
_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "version",
        help="print the versions of Tandem and of what its engine uses",
        description="Print the versions of Tandem, Python and the libraries of the engine, for a report of an error.",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = versions()
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<18} {value or _ABSENT.get(name, 'not installed')}")
    return 0


def print_version() -> int:
    """`tandem --version`; returns the exit status."""
    print(f"tandem {product_version()}")
    return 0


def versions() -> dict[str, str | None]:
    """Version by name; None: not installed, or not known. `torch_build` is cpu, or cuda with its version."""
    found: dict[str, str | None] = {"tandem": product_version(), "commit": commit_of(Path(__file__))}
    found["python"] = platform.python_version()
    for name in OTHERS:
        installed = _distribution(name)
        found[name] = None if installed is None else installed.version
        if name == "torch":
            found["torch_build"] = None if installed is None else torch_build(installed)
    return found | {"kernel_target": kernel_target()}


def commit_of(file: Path) -> str | None:
    """Of the checkout that `file` lies in, `+` after it where files differ; else of what pip installed."""
    file = file.resolve()
    repository = next((folder for folder in file.parents if (folder / ".git").exists()), None)
    # One that merely contains the environment may be any, and one of Tandem's another version of it.
    if repository is None or not file.is_relative_to(repository / "services" / "tandem_services"):
        return _installed_commit()
    return _output("git", "-C", str(repository), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")


def _installed_commit() -> str | None:
    """As PEP 610 has it."""
    installed = _distribution(DISTRIBUTION)
    text = None if installed is None else installed.read_text("direct_url.json")
    if text is None:
        return None
    commit = json.loads(text).get("vcs_info", {}).get("commit_id")
    return None if commit is None else str(commit)


def kernel_target() -> str | None:
    """The kind of CPU that kernels here are for; None where nothing compiles them."""
    return _output(*TARGET)


def _output(*command: str) -> str | None:
    """The line that a command prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def torch_build(torch: Distribution) -> str:
    """From `torch/version.py`, which is written when torch is built."""
    text = torch.read_text("../torch/version.py") or ""
    cuda = _CUDA.search(text)
    return "cpu" if cuda is None else f"cuda {cuda[1]}"
