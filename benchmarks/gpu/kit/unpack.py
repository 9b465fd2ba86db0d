"""Unpack a kit and print the PYTHONPATH to use. Needs no pip: a kit's wheels are files to be put in place.

Standard library alone, for the Python that runs it has nothing of Tandem's yet.
"""

import argparse
import platform
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gpu.kit.manifest import KitError, Manifest

ROOT = Path(__file__).parents[3]
SOURCES = ("engine", "services", "operator", "tests/support", "benchmarks")


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
    """Puts a kit's packages into `site`. Raises `KitError` when they are damaged or for another Python."""
    manifest = Manifest.read(folder)
    running = ".".join(platform.python_version_tuple()[:2])
    if running != manifest.python:
        raise KitError(f"{folder} is for Python {manifest.python}, this is {running}: set TANDEM_PYTHON")
    manifest.check(folder)
    site.mkdir(parents=True, exist_ok=True)
    for one in manifest.files:
        path = folder / one.name
        if path.suffix == ".whl":
            _place(path, site)
        else:
            with tarfile.open(path) as packed:
                packed.extractall(site, filter="data")
    return manifest


def _place(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        moved = [name for name in packed.namelist() if name.split("/")[0].endswith(".data")]
        if moved:
            raise KitError(f"{wheel.name} has files that only an installer puts in place, such as {moved[0]}")
        packed.extractall(site)


if __name__ == "__main__":
    sys.exit(main())
