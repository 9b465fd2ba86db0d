"""Write locks/*.txt: every file that an image installs, by version and hash.

    .venv/bin/python docker/lock.py            resolves with pip, for Debian 12's Python 3.11; installs nothing

pip decides by the Python that runs it what packages require. What they require with the images' Python alone is added.

Versions are those of constraints.txt and, for the CUDA build of torch, constraints-cuda.txt. Hashes are those of the
files that pip chooses for each architecture of Linux, so that a build takes these files or none: `pip install
--require-hashes --no-deps` neither resolves nor trusts the index.

    locks/services.txt, operator.txt, engine-cpu.txt, engine-cuda.txt      for the image of that name
    locks/build.txt                                                       what builds our wheel
    locks/uv.txt                                                          what installs the others in `make up`
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pin import BUILD
from requirements import requirements

HERE = Path(__file__).resolve().parent
LOCKS = HERE / "locks"
PYTHON = ("--implementation", "cp", "--python-version", "3.11", "--abi", "cp311", "--abi", "abi3", "--abi", "none")
ARCHITECTURES = ("x86_64", "aarch64")
IMAGES = {"python_version": "3.11", "python_full_version": "3.11.2"}
"""Of Debian 12's Python, as requirements compare with them."""
GLIBC = range(36, 4, -1)
"""Minor versions of glibc 2 that wheels may ask for: Debian 12 has 2.36."""
UV = "0.13.9"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEADER = """\
# Files of Tandem's images by version and hash. Written by docker/lock.py from constraints.txt; do not edit.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """One file of locks."""

    name: str
    wanted: tuple[str, ...]
    """Requirements, each as pip reads it."""
    constraints: tuple[str, ...] = ("constraints.txt",)
    index: str = ""
    """One more, asked where the configured ones lack a file."""

    def text(self) -> str:
        """Of the file. Raises `CalledProcessError` when pip cannot resolve it for the first architecture."""
        files: dict[str, set[str]] = {}
        for architecture in ARCHITECTURES:
            try:
                found = self.resolved(architecture)
            except subprocess.CalledProcessError:
                if architecture == ARCHITECTURES[0]:
                    raise
                print(f"{self.name}: not for {architecture}, for which the index lacks a file", file=sys.stderr)
                continue
            for pin, digest in found:
                files.setdefault(pin, set()).add(digest)
        lines = (" ".join((pin, *(f"--hash=sha256:{one}" for one in sorted(files[pin])))) for pin in sorted(files))
        return HEADER + "".join(f"{line}\n" for line in lines)

    def resolved(self, architecture: str) -> list[tuple[str, str]]:
        """(NAME==VERSION, SHA-256) of each file that pip would install. Raises `CalledProcessError`."""
        wanted = self.wanted
        while True:
            found = self._found(architecture, wanted)
            if not (lacking := _lacking([one["metadata"] for one in found])):
                break
            wanted += tuple(sorted(lacking))
        exact = {line.partition("===")[0] for line in wanted if "===" in line}
        return [
            (_pin(one["metadata"], exact), one["download_info"]["archive_info"]["hashes"]["sha256"]) for one in found
        ]

    def _found(self, architecture: str, wanted: tuple[str, ...]) -> list[dict[str, Any]]:
        try:
            return self._report(architecture, wanted)
        except subprocess.CalledProcessError:
            if not self.index:
                raise
        return self._report(architecture, wanted, "--extra-index-url", self.index, "--retries", "0")

    def _report(self, architecture: str, wanted: tuple[str, ...], *more: str) -> list[dict[str, Any]]:
        platforms = [f"manylinux_2_{minor}_{architecture}" for minor in GLIBC]
        platforms += [f"manylinux2014_{architecture}", f"manylinux2010_{architecture}", f"linux_{architecture}"]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
            command += ["--only-binary", ":all:", "--target", folder, "--report", str(report), *PYTHON]
            command += [word for platform in platforms for word in ("--platform", platform)]
            command += more
            constraints = " ".join(str(HERE / name) for name in self.constraints)
            subprocess.run([*command, *wanted], check=True, env={**os.environ, "PIP_CONSTRAINT": constraints})
            found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return found


def _lacking(packages: Sequence[dict[str, Any]]) -> set[str]:
    """What these packages require with the images' Python, and not with the one that runs here."""
    names = {canonicalize_name(one["name"]) for one in packages}
    lines = [Requirement(line) for one in packages for line in one.get("requires_dist", [])]
    return {
        f"{line.name}{line.specifier}"
        for line in lines
        if line.marker is not None and canonicalize_name(line.name) not in names and by_python(line.marker)
    }


def by_python(marker: Marker) -> bool:
    """Whether a requirement holds with the images' Python alone."""
    return marker.evaluate({"extra": "", **IMAGES}) and not marker.evaluate({"extra": ""})


def _pin(metadata: dict[str, Any], exact: Set[str]) -> str:
    """`exact`: names whose versions with a local part are others."""
    name = canonicalize_name(metadata["name"])
    return f"{name}{'===' if name in exact else '=='}{metadata['version']}"


def locks() -> list[Lock]:
    """All of them."""
    torch = next(
        line for line in (HERE / "constraints.txt").read_text("utf-8").splitlines() if line.startswith("torch==")
    )
    version = torch.removeprefix("torch==")
    engine = tuple(requirements(["engine", "otel"]))
    return [
        Lock(name="services", wanted=tuple(requirements(["router", "otel"]))),
        Lock(name="operator", wanted=tuple(requirements(["operator"]))),
        Lock(name="engine-cpu", wanted=(f"torch=={version}+cpu", *engine), index=CPU_INDEX),
        # "===": "==" takes 2.13.0+cpu for newer than 2.13.0, which is the CUDA build, where an index has both. So it
        # stands in the lock too: a folder of wheels names no hashes by which pip would leave the other one out.
        Lock(
            name="engine-cuda",
            wanted=(f"torch==={version}", *engine),
            constraints=("constraints.txt", "constraints-cuda.txt"),
        ),
        Lock(name="build", wanted=tuple(f"{name}=={pinned}" for name, pinned in BUILD.items())),
        Lock(name="uv", wanted=(f"uv=={UV}",)),
    ]


def main(names: Iterable[str]) -> None:
    """Write those that are named, or all."""
    LOCKS.mkdir(exist_ok=True)
    chosen = set(names)
    for lock in locks():
        if not chosen or lock.name in chosen:
            (LOCKS / f"{lock.name}.txt").write_text(lock.text(), encoding="utf-8")
            print(f"{lock.name}: written")


if __name__ == "__main__":
    main(sys.argv[1:])
