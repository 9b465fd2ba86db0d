"""Wheels of exact versions for another Python, by pip."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu.kit.pins import PYTHON

GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)
"""Minor versions of glibc that a wheel may be for: pip compares them for equality, not for order."""


def download(versions: Mapping[str, str], folder: Path, *, sources: Sequence[str] = ()) -> list[Path]:
    """One wheel for each package, in `folder`. Raises `CalledProcessError` when one cannot be had.

    `sources` are further arguments of pip, such as `--no-index --find-links FOLDER`.
    """
    platforms = ["manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder), *sources]
    for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in versions.items())], check=True)
    return sorted(folder.glob("*.whl"))
