"""Write constraints-cuda.txt: versions of what the CUDA build of torch requires beyond constraints.txt.

    .venv/bin/python docker/pin_cuda.py         resolves with pip, for this Python and Linux; installs nothing

An environment that passes the tests has torch's CPU build, so these versions are those that resolve together, not those
that were tested. torch names most of them exactly; of the others (nvjitlink, cuda-bindings) an image would get the
newest of its day.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name
from requirements import requirements

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
OUTPUT = Path(__file__).with_name("constraints-cuda.txt")
HEADER = """\
# What the CUDA build of torch requires beyond constraints.txt. Written by docker/pin_cuda.py; do not edit.
"""


def pinned() -> dict[str, str]:
    """Name → version in constraints.txt."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def resolved(torch: str) -> dict[str, str]:
    """Name → version of all that an engine on GPUs installs. Raises `CalledProcessError` where that cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        # "===": a version with a local part, such as 2.13.0+cpu of a mirror, is not it.
        words = [
            "--only-binary",
            ":all:",
            "--report",
            str(report),
            f"torch==={torch}",
            *requirements(["engine", "otel"]),
        ]
        subprocess.run([*command, *words], check=True, env={**os.environ, "PIP_CONSTRAINT": str(CONSTRAINTS)})
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in found}


def beyond(everything: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Text of the file."""
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(everything.items()) if name not in known)


def main() -> None:
    """Writes it."""
    known = pinned()
    text = beyond(resolved(known["torch"]), known)
    OUTPUT.write_text(text, encoding="utf-8")
    print(f"{OUTPUT}: {text.count('==')} versions")


if __name__ == "__main__":
    main()
