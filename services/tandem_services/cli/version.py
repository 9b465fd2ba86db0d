"""`tandem version`, and `tandem --version`: from the metadata of distributions, without importing any of them."""

import argparse
import json
import platform
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from tandem_engine.base.version import product_version

OTHERS = ("torch", "numba", "nixl", "transformers")
"""Distributions that decide what an engine does."""

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
            print(f"{name:<14}{value or 'not installed'}")
    return 0


def print_version() -> int:
    """`tandem --version`; returns the exit status."""
    print(f"tandem {product_version()}")
    return 0


def versions() -> dict[str, str | None]:
    """Version by name; None: not installed. `torch_build` is cpu, or cuda with its version."""
    found: dict[str, str | None] = {"tandem": product_version(), "python": platform.python_version()}
    for name in OTHERS:
        installed = _distribution(name)
        found[name] = None if installed is None else installed.version
        if name == "torch":
            found["torch_build"] = None if installed is None else torch_build(installed)
    return found


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
