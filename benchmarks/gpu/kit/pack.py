"""Make a kit: wheels, a slim NIXL and their manifest. An error if kit and tree together are too large to travel."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu.kit import nixl, pins, wheels
from gpu.kit.manifest import KitError, Manifest, Packed

LIMIT_BYTES = 64 * 2**20
MIB = 2**20


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tools/gpu_pack.sh", description=__doc__)
    made.add_argument("folder", nargs="?", type=Path, default=pins.ROOT / "kit", help="default kit/; replaced")
    made.add_argument("--find-links", metavar="FOLDER", help="take wheels from this folder, not from a registry")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    sources = ("--no-index", "--find-links", args.find_links) if args.find_links else ()
    try:
        manifest = pack(args.folder, sources=sources)
    except (KitError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        print(f"gpu-pack: {error}", file=sys.stderr)
        return 1
    print(
        f"gpu-pack: {args.folder}: {manifest.kit_bytes / MIB:.1f} MiB, with the tree "
        f"{(manifest.kit_bytes + manifest.tree_bytes) / MIB:.1f} of {LIMIT_BYTES / MIB:.0f} MiB"
    )
    return 0


def pack(folder: Path, *, sources: Sequence[str] = (), root: Path = pins.ROOT, limit: int = LIMIT_BYTES) -> Manifest:
    """Fills `folder` in place of what it held. Raises `KitError` when kit and tree exceed `limit`."""
    versions = pins.pinned((*pins.PACKAGES, pins.NIXL), pins.CONSTRAINTS.read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheels.download({name: versions[name] for name in pins.PACKAGES}, folder, sources=sources)
    with tempfile.TemporaryDirectory() as scratch:
        downloads, unpacked = Path(scratch) / "wheel", Path(scratch) / "files"
        (whole,) = wheels.download({pins.NIXL: versions[pins.NIXL]}, downloads, sources=sources)
        nixl.slim(whole, folder / f"{pins.NIXL}-{versions[pins.NIXL]}.tar.xz", unpacked)
    manifest = Manifest(
        commit=commit(root),
        python=pins.PYTHON,
        versions=dict(versions),
        files=[Packed.of(path) for path in sorted(folder.iterdir())],
        tree_bytes=tree_bytes(root, folder),
    )
    manifest.write(folder)
    check_size(manifest, limit)
    return manifest


def check_size(manifest: Manifest, limit: int) -> None:
    """Raises `KitError` when kit and tree exceed `limit`, with the largest files."""
    total = manifest.kit_bytes + manifest.tree_bytes
    if total > limit:
        largest = sorted(manifest.files, key=lambda one: -one.size)[:3]
        raise KitError(
            f"kit ({manifest.kit_bytes / MIB:.1f} MiB) and tree ({manifest.tree_bytes / MIB:.1f} MiB) exceed "
            f"{limit / MIB:.1f} MiB; largest of the kit: "
            + ", ".join(f"{one.name} {one.size / MIB:.1f} MiB" for one in largest)
        )


def tree_bytes(root: Path, folder: Path) -> int:
    """Bytes of the files that git tracks or does not ignore, without those of `folder`."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    paths = {root / name for name in listed if name}
    return sum(path.lstat().st_size for path in paths if path.is_file() and folder.resolve() not in path.parents)


def commit(root: Path) -> str:
    return _git(root, "describe", "--always", "--dirty").strip()


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
