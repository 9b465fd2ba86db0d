"""Packages of a kit. Versions are those of docker/constraints.txt, which passed the tests."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / "docker" / "constraints.txt"
PYTHON = "3.12"
"""Python of the GPU machine."""
PACKAGES = ("llguidance", "msgspec", "nixl", "pyzmq", "xxhash")
"""What an engine imports besides torch, transformers and their dependencies. Their own dependencies are among these."""
NIXL = "nixl-cu13"
"""NIXL's libraries for the CUDA version of torch's wheels. Most of them are for storage and network backends."""


def pinned(packages: tuple[str, ...], constraints: str) -> Mapping[str, str]:
    """Package → version from the text of a constraints file. Raises `KeyError` for one that it does not name."""
    versions = dict(line.split("==") for line in constraints.splitlines() if "==" in line and not line.startswith("#"))
    return {package: versions[package] for package in packages}
