"""What a kit holds. Standard library alone: the other side reads it before anything is installed."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1
KERNELS = "triton-cache"
"""Of an unpacked kit, the folder that TRITON_CACHE_DIR names; in the kit an archive."""
GROUP = "__grp__"
"""In Triton's cache, before the name of a file that lists the files of a kernel, by absolute path."""


class KitError(Exception):
    """A kit that cannot be made or used, with the reason."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One file of a kit."""

    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Packed":
        return cls(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files of a kit, and what they were made for."""

    commit: str
    python: str
    versions: dict[str, str]
    files: list[Packed]
    tree_bytes: int
    """Size of the tree that goes with the kit."""
    kernels: int = 0
    """Compiled for the GPU machine, in Triton's cache of the kit."""
    triton: str = ""
    """Key of the Triton that compiled them; another finds none (`python -m gpu.kit.kernels --key`)."""
    format: int = field(default=FORMAT)

    @property
    def kit_bytes(self) -> int:
        return sum(one.size for one in self.files)

    def write(self, folder: Path) -> None:
        (folder / NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises `KitError` when there is none, or one of another format."""
        try:
            read: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        except OSError as error:
            raise KitError(f"{folder} is no kit ({error}); make one with tools/gpu_pack.sh") from error
        except ValueError as error:
            raise KitError(f"{folder / NAME} is not JSON: {error}") from error
        if read.get("format") != FORMAT:
            raise KitError(f"{folder / NAME} has format {read.get('format')}, not {FORMAT}: pack again")
        return cls(**{**read, "files": [Packed(**one) for one in read["files"]]})

    def check(self, folder: Path) -> None:
        """Raises `KitError` when a file is absent or not the one that was packed."""
        for one in self.files:
            path = folder / one.name
            if not path.is_file():
                raise KitError(f"{path} is absent; the manifest names it")
            if Packed.of(path) != one:
                raise KitError(f"{path} is not the file that was packed: pack again")
