"""A model directory without its tensors: which of its files may be opened, and JSON from them. Needs no torch.

    directory     names inside a checkpoint (an index that names its shards, symbolic links) must not lead the engine to
                  other files of the machine
    JSON          sizes and duplicate keys are checked

In a Hugging Face cache a snapshot has links to the blobs of its repository, or of all repositories:

    models--org--name/snapshots/COMMIT/model.safetensors -> models--org--name/blobs/ETAG [-> blobs/XX/HASH]
"""

import json
import reprlib
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.errors import CheckpointError

MAX_SHOWN = 80
"""Longest value that an error message repeats: a checkpoint must not choose the size of our logs."""


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, object]:
    """Parse the file `path` as one JSON object of at most `max_bytes`.

    Raises:
        CheckpointError: it cannot be read, is larger, or is not a JSON object without duplicate keys.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes; at most {max_bytes} are expected in such a file")
        return parse_json_object(path.read_bytes(), where=str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def parse_json_object(data: bytes, *, where: str) -> dict[str, object]:
    """Parse `data`; `where` starts the message of a `CheckpointError`."""
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error).removeprefix("maximum recursion depth exceeded") or "nested too deeply"
        raise CheckpointError(f"{where} is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """`value` as an error message may repeat it: short, however large or deeply nested it is."""
    short = reprlib.Repr()
    short.maxstring = MAX_SHOWN
    text = short.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {shown(key)} stands twice")
        seen.add(key)
    raise AssertionError("unreachable: a dict is shorter than its pairs only by a repeated key")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDirectory:
    """An existing directory and the trees its links may point into."""

    path: Path
    roots: tuple[Path, ...]
    """Resolved. The directory itself; in a Hugging Face cache those that hold its blobs."""

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def file(self, name: str, *, named_by: str = "") -> Path:
        """Path of a regular file that must be there; `named_by`: the file that names it.

        Raises:
            CheckpointError: it is absent, not a plain file name, not a file, or leads out of the directory.
        """
        path = self.path / name
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{named_by or self.path} names {shown(name)}; only plain file names are allowed")
        if not path.exists():
            reason = f", although {named_by} names it" if named_by else ""
            raise CheckpointError(f"no {name} in {self.path}{reason}")
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in self.roots):
            raise CheckpointError(f"{path} is a link out of the model directory; copy the file into it")
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        return path


def open_directory(path: str | Path) -> ModelDirectory:
    """Check that `path` is a directory.

    Raises:
        CheckpointError: it is absent, a file, or cannot be looked at.
    """
    directory = Path(path)
    try:
        if not directory.exists():
            raise CheckpointError(f"the model directory {directory} does not exist; pass a local directory")
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is a file; pass the directory that holds config.json")
        return ModelDirectory(path=directory, roots=_roots_of(directory.resolve()))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error


SHARED_BLOBS_MARK = ".huggingface-shared-blobs"
"""In the folder of blobs that several repositories of a cache share, and in no other."""


def _roots_of(resolved: Path) -> tuple[Path, ...]:
    repository = resolved.parent.parent
    if resolved.parent.name != "snapshots" or not (repository / "blobs").is_dir():
        return (resolved,)
    shared = repository.parent / "blobs"
    return (repository, shared) if (shared / SHARED_BLOBS_MARK).is_file() else (repository,)


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 1 << 26
MAX_SHARDS = 10_000
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_weight_map(index: Path) -> dict[str, str]:
    """File by tensor name, as an index gives them. Raises `CheckpointError`."""
    value = read_json_object(index, max_bytes=MAX_INDEX).get("weight_map")
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{index}: weight_map must map tensor names to files, got {shown(value)}")
    result: dict[str, str] = {}
    for name, shard in value.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index}: tensor {shown(name)} must map to a file name, got {shown(shard)}")
        result[name] = shard
    if len(set(result.values())) > MAX_SHARDS:
        raise CheckpointError(f"{index} names more than {MAX_SHARDS} shards")
    return result
