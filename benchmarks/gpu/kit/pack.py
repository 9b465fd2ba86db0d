"""Make a kit: wheels, a slim NIXL, compiled kernels, a manifest. An error if kit and tree are too large to travel."""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpu.kit import nixl, pins, wheels
from gpu.kit.manifest import GROUP, KERNELS, KitError, Manifest, Packed

LIMIT_BYTES = 64 * 2**20
MIB = 2**20
READ = (".json", ".cubin")
"""What Triton reads of a kernel in its cache. The others are listings of what it was made from."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tools/gpu_pack.sh", description=__doc__)
    made.add_argument("folder", nargs="?", type=Path, default=pins.ROOT / "kit", help="default kit/; replaced")
    made.add_argument("--find-links", metavar="FOLDER", help="take wheels from this folder, not from a registry")
    made.add_argument(
        "--kernels-by",
        metavar="PYTHON",
        default=os.environ.get("TANDEM_PYTHON"),
        help="an interpreter with the GPU machine's versions of torch and Triton, which compiles kernels for the kit "
        "(default TANDEM_PYTHON; without one the kit has none, and the GPU machine compiles them)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    sources = ("--no-index", "--find-links", args.find_links) if args.find_links else ()
    try:
        manifest = pack(args.folder, sources=sources, kernels_by=args.kernels_by)
    except (KitError, ValueError, KeyError, OSError, subprocess.CalledProcessError) as error:
        print(f"gpu-pack: {error}", file=sys.stderr)
        return 1
    made = f"{manifest.kernels} kernels" if manifest.kernels else "no kernels: name --kernels-by, or TANDEM_PYTHON"
    print(
        f"gpu-pack: {args.folder}: {manifest.kit_bytes / MIB:.1f} MiB, with the tree "
        f"{(manifest.kit_bytes + manifest.tree_bytes) / MIB:.1f} of {LIMIT_BYTES / MIB:.0f} MiB; {made}"
    )
    return 0


def pack(
    folder: Path,
    *,
    sources: Sequence[str] = (),
    root: Path = pins.ROOT,
    limit: int = LIMIT_BYTES,
    kernels_by: str | None = None,
) -> Manifest:
    """Fills `folder` in place of what it held. `kernels_by`: see `with_kernels`.

    Raises `KitError` when kit and tree exceed `limit`.
    """
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
    if kernels_by is not None:
        manifest = with_kernels(manifest, folder, kernels_by)
        manifest.write(folder)
    check_size(manifest, limit)
    return manifest


def with_kernels(manifest: Manifest, folder: Path, python: str) -> Manifest:
    """The kit and, in one more file, what `python` compiles for it (`gpu.kit.kernels`): minutes on two cores.

    Raises `KitError` when it compiles nothing; what it could not compile is printed, and left to the GPU machine.
    """
    with tempfile.TemporaryDirectory() as scratch:
        site, cache = Path(scratch) / "site", Path(scratch) / KERNELS
        environment = {**os.environ, "PYTHONPATH": str(pins.ROOT / "benchmarks")}
        environment["PYTHONPATH"] = _output([python, "-m", "gpu.kit.unpack", str(folder), str(site)], environment)
        done = subprocess.run([python, "-m", "gpu.kit.kernels", str(cache)], env=environment, check=False)
        count = strip(cache) if cache.is_dir() else 0
        if not count:
            raise KitError(
                f"{python} compiled no kernel (status {done.returncode}): see above, or pack without kernels: neither "
                "--kernels-by nor TANDEM_PYTHON"
            )
        if done.returncode:
            print("gpu-pack: some sources failed, see above: the GPU machine compiles their kernels", file=sys.stderr)
        key = _output([python, "-m", "gpu.kit.kernels", "--key"], environment)
        path = folder / f"{KERNELS}.tar.xz"
        with tarfile.open(path, "w:xz", preset=9) as packed:
            packed.add(cache, KERNELS, filter=nixl.anonymous)
    return replace(manifest, files=[*manifest.files, Packed.of(path)], kernels=count, triton=key)


def strip(cache: Path) -> int:
    """Leave in a folder of Triton's what it reads of kernels, but for `unpack.adopt`. Returns their number."""
    for path in cache.rglob("*"):
        if path.is_file() and (path.suffix not in READ or path.name.startswith(GROUP)):
            path.unlink()
    for folder in cache.iterdir():
        if not any(folder.iterdir()):
            folder.rmdir()
    return len(list(cache.glob("*/*.cubin")))


def _output(command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


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
