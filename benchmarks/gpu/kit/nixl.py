"""A slim NIXL: of its wheel the bindings, the UCX backend, and the shared libraries that these need.

The wheel has a backend for each storage service and their clients, five times what a transfer between processes of one
machine loads. What is kept keeps its path, so every RPATH holds.
"""

import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

SEEDS = (
    r"nixl_cu\d+/.*",
    r"nixl_cu\d+-[^/]*\.dist-info/(METADATA|RECORD|WHEEL|licenses/.*)",
    r"\.nixl_cu\d+\.mesonpy\.libs/plugins/libplugin_UCX\.so",
    r"nixl_cu\d+\.libs/ucx/lib(uct|ucm)_(cuda|cma)\..*",
)
"""What Python and the two plug-in loaders open by name. All else is found by the dynamic linker."""
NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")


def slim(wheel: Path, archive: Path, scratch: Path) -> list[str]:
    """Writes what is needed of `wheel` to `archive`, a .tar.xz; gives the paths. `scratch` is an empty folder."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(scratch)
    files = sorted(path.relative_to(scratch).as_posix() for path in scratch.rglob("*") if path.is_file())
    kept = closure(files, {name: needed_by(scratch / name) for name in files if ".so" in PurePosixPath(name).suffixes})
    with tarfile.open(archive, "w:xz", preset=9) as packing:
        for name in kept:
            packing.add(scratch / name, arcname=name, filter=anonymous)
    return kept


def closure(files: Iterable[str], needed: Mapping[str, Iterable[str]]) -> list[str]:
    """Files that match a seed, and those of the same wheel that they need, directly or not.

    `needed` has for each shared library the names that it is linked to; those that the wheel has not are the system's.
    Raises `ValueError` when a seed matches nothing: then the wheel is laid out in another way.
    """
    names = list(files)
    missing = [seed for seed in SEEDS if not any(re.fullmatch(seed, name) for name in names)]
    if missing:
        raise ValueError(f"NIXL's wheel has nothing like {', '.join(missing)}: adapt SEEDS in {Path(__file__).name}")
    homes: dict[str, list[str]] = {}
    for name in names:
        homes.setdefault(PurePosixPath(name).name, []).append(name)
    kept: set[str] = set()
    waiting = [name for name in names if any(re.fullmatch(seed, name) for seed in SEEDS)]
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept.add(name)
            waiting += [home for library in needed.get(name, ()) for home in homes.get(library, ())]
    return sorted(kept)


def needed_by(library: Path) -> list[str]:
    """Names that a shared library is linked to. Raises `CalledProcessError` when readelf cannot read it."""
    done = subprocess.run(["readelf", "--dynamic", str(library)], capture_output=True, text=True, check=True)
    return NEEDED.findall(done.stdout)


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Equal files give equal archives, independent of user and time."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = 0
    return entry
