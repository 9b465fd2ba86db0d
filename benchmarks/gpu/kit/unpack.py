"""Unpack a kit and print the PYTHONPATH to use. Needs no pip: a kit's wheels are files to be put in place.

Standard library alone, for the Python that runs it has nothing of Tandem's yet.
"""

import argparse
import json
import platform
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gpu.kit.manifest import GROUP, KERNELS, KitError, Manifest
from gpu.kit.manifest import NAME as MANIFEST

ROOT = Path(__file__).parents[3]
UNPACKED = ".kit"
"""Marks a folder that unpacking has made."""
SOURCES = ("engine", "services", "operator", "lab", "tests/support", "benchmarks")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tools/gpu_unpack.sh", description=__doc__)
    made.add_argument("folder", nargs="?", type=Path, default=ROOT / "kit", help="the kit (default kit/)")
    made.add_argument("site", nargs="?", type=Path, default=Path("/tmp/tandem-kit"), help="default /tmp/tandem-kit")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        unpack(args.folder, args.site)
    except KitError as error:
        print(f"gpu-unpack: {error}", file=sys.stderr)
        return 1
    print(":".join([str(args.site.resolve()), *(str(ROOT / source) for source in SOURCES)]))
    return 0


def unpack(folder: Path, site: Path) -> Manifest:
    """Puts a kit's packages, and its kernels as a cache of Triton, into `site`, in place of those of another kit.

    The kit itself stays as it is: what Triton compiles besides goes to `site`, and is there at the next call.

    Raises `KitError` when they are damaged or for another Python, or when `site` holds something else.
    """
    manifest = Manifest.read(folder)
    running = ".".join(platform.python_version_tuple()[:2])
    if running != manifest.python:
        raise KitError(f"{folder} is for Python {manifest.python}, this is {running}: set TANDEM_PYTHON")
    manifest.check(folder)
    if _holds(site, manifest):
        return manifest
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    (site / UNPACKED).touch()
    for one in manifest.files:
        path = folder / one.name
        if path.suffix == ".whl":
            _place(path, site)
        else:
            with tarfile.open(path) as packed:
                packed.extractall(site, filter="data")
    if manifest.kernels:
        adopt(site / KERNELS)
    manifest.write(site)
    return manifest


def _holds(site: Path, manifest: Manifest) -> bool:
    """Whether this kit is there already. The manifest comes last: without it, unpacking was interrupted."""
    if not site.exists() or not any(site.iterdir()):
        return False
    if not (site / UNPACKED).exists():
        raise KitError(f"{site} holds something other than a kit: name another folder, or remove it")
    return (site / MANIFEST).exists() and Manifest.read(site) == manifest


def adopt(cache: Path) -> int:
    """Have Triton find kernels in a folder that was moved: lists of their files name where those are now.

    The folder is this user's alone, as engines require. Returns the number of kernels.
    """
    cache.chmod(0o700)
    kernels = 0
    for metadata in cache.glob("*/*.json"):
        if not metadata.name.startswith(GROUP):
            files = {path.name: str(path.resolve()) for path in metadata.parent.glob(f"{metadata.stem}.*")}
            listed = json.dumps({"child_paths": files})
            (metadata.parent / f"{GROUP}{metadata.name}").write_text(listed, encoding="utf-8")
            kernels += 1
    return kernels


def _place(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        moved = [name for name in packed.namelist() if name.split("/")[0].endswith(".data")]
        if moved:
            raise KitError(f"{wheel.name} has files that only an installer puts in place, such as {moved[0]}")
        packed.extractall(site)


if __name__ == "__main__":
    sys.exit(main())
