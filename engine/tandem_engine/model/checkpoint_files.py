"""Safetensors files, checked before a byte of tensor data is read or allocated.

    [ 8 bytes: N, little-endian ][ N bytes: JSON header ][ data: tensors back to back, no gaps ]

Every offset, size and shape of the header is compared with the file's real size first. Tensors are then read into
memory (not mapped), so that a file replaced or truncated later can neither change weights nor kill the process.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn, Protocol

import torch

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint_folder import (
    INDEX,
    PICKLED,
    SINGLE,
    ModelDirectory,
    parse_json_object,
    read_weight_map,
    shown,
)

MAX_HEADER = 100_000_000
"""Bytes; the bound of the reference implementation."""

LENGTH_FIELD = 8
MAX_RANK = 8

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class ReadableTensor(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    @property
    def path(self) -> Path:
        """File that errors name."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of what `read_part` gives."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int:
        """Bytes in files."""
        ...

    @property
    def sources(self) -> "tuple[StoredTensor, ...]":
        """What it is made of."""
        ...

    def read_part(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """Indices [start, stop) of dimension `dim`, in fresh memory. Raises `CheckpointError` for unusable contents."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a file, not read yet. Its bytes are [offset, offset + size) of the file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def sources(self) -> "tuple[StoredTensor, ...]":
        """Itself."""
        return (self,)

    def read(self) -> torch.Tensor:
        """Read it into fresh memory.

        Raises:
            CheckpointError: the file changed since its header was checked.
        """
        return self._read(self.shape, [Run(self.offset, self.size)])

    def read_part(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """Read indices [start, stop) of dimension `dim`, and no other bytes, into fresh memory.

        Raises:
            CheckpointError: the file changed since its header was checked.
        """
        assert 0 <= start <= stop <= self.shape[dim], f"[{start}, {stop}) of dimension {dim} of {self.shape}"
        index_bytes = math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize
        row_bytes = self.shape[dim] * index_bytes
        runs = (
            Run(self.offset + row * row_bytes + start * index_bytes, (stop - start) * index_bytes)
            for row in range(math.prod(self.shape[:dim]))
        )
        return self._read((*self.shape[:dim], stop - start, *self.shape[dim + 1 :]), runs)

    def _read(self, shape: tuple[int, ...], runs: "Iterable[Run]") -> torch.Tensor:
        """`runs` of bytes of the file, one after the other, as a tensor of `shape`."""
        data = torch.empty(math.prod(shape) * self.dtype.itemsize, dtype=torch.uint8)
        target, filled, wanted = memoryview(data.numpy().data), 0, 0
        try:
            with self.path.open("rb", buffering=0) as file:
                for run in runs:
                    filled += _read_into(file, run.offset, target[wanted : wanted + run.size])
                    wanted += run.size
        except OSError as error:
            raise CheckpointError(f"{self.path}: tensor {shown(self.name)} cannot be read: {error.strerror}") from error
        if filled != wanted:
            raise CheckpointError(f"{self.path} was truncated while tensor {shown(self.name)} was read")
        return data.view(self.dtype).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransposedColumns:
    """Implements `ReadableTensor`: columns [start, stop) of a stored matrix [inputs, outputs], outputs first."""

    name: str
    stored: StoredTensor
    start: int
    stop: int

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.stored.path

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs first."""
        return (self.stop - self.start, self.stored.shape[0])

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The stored matrix."""
        return (self.stored,)

    def read_part(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """See `ReadableTensor.read_part`."""
        if dim == 0:
            return self.stored.read_part(1, self.start + start, self.start + stop).t()
        return self.stored.read_part(0, start, stop)[:, self.start : self.stop].t()


class Run(NamedTuple):
    """Neighbouring bytes of a file."""

    offset: int
    size: int


def _read_into(file: "FileIO", offset: int, target: memoryview) -> int:
    """Fill `target` from `offset` on; fewer bytes than it holds only where the file ends. One read may give less."""
    done = 0
    while done < len(target):
        count = os.preadv(file.fileno(), [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    path: Path
    data_start: int
    data_size: int
    fields: dict[str, object]


def read_header(path: Path, *, max_bytes: int = MAX_HEADER) -> dict[str, StoredTensor]:
    """The tensors of a file by name, whose header has at most `max_bytes`.

    Raises:
        CheckpointError: anything about the file is not as the format demands; names file and tensor.
    """
    header = _open_header(path, max_bytes)
    tensors = [_parse_tensor(header, name, value) for name, value in header.fields.items() if name != "__metadata__"]
    _require_back_to_back(header, tensors)
    return {tensor.name: tensor for tensor in tensors}


def _open_header(path: Path, max_bytes: int) -> _Header:
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file, file_size, max_bytes)
            fields = parse_json_object(file.read(length), where=f"the header of {path}")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    data_start = LENGTH_FIELD + length
    return _Header(path=path, data_start=data_start, data_size=file_size - data_start, fields=fields)


def _header_length(path: Path, file: BinaryIO, file_size: int, max_bytes: int) -> int:
    if file_size < LENGTH_FIELD:
        raise CheckpointError(f"{path} is empty or truncated ({file_size} bytes); download it again")
    length = int.from_bytes(file.read(LENGTH_FIELD), "little")
    if length > file_size - LENGTH_FIELD:
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: its header claims {length} bytes, "
            f"the file has {file_size}; download it again"
        )
    if length > max_bytes:
        raise CheckpointError(f"{path}: a header of {length} bytes exceeds the bound of {max_bytes}")
    return length


def _parse_tensor(header: _Header, name: str, value: object) -> StoredTensor:
    if not isinstance(value, dict):
        _refuse(header, name, f"must be described by an object, got {shown(value)}")
    dtype = _parse_dtype(header, name, value.get("dtype"))
    shape = _parse_counts(header, name, "shape", value.get("shape"))
    offsets = _parse_counts(header, name, "data_offsets", value.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(header, name, f"has data_offsets {shown(offsets)}; expected a begin and an end after it")
    begin, end = offsets
    if end > header.data_size:
        _refuse(header, name, f"ends at byte {end} of {header.data_size} bytes of data; the file is truncated")
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        _refuse(header, name, f"of shape {shown(shape)} needs {shown(expected)} bytes but has {end - begin}")
    return StoredTensor(
        path=header.path,
        name=name,
        dtype=dtype,
        shape=shape,
        offset=header.data_start + begin,
        size=end - begin,
    )


def _parse_dtype(header: _Header, name: str, value: object) -> torch.dtype:
    dtype = DTYPES.get(value) if isinstance(value, str) else None
    if dtype is None:
        _refuse(header, name, f"has dtype {shown(value)}; supported are {', '.join(DTYPES)}")
    return dtype


def _parse_counts(header: _Header, name: str, field: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_RANK:
        _refuse(header, name, f"has {field} {shown(value)}; expected a list of at most {MAX_RANK} integers")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 63:
            _refuse(header, name, f"has {field} {shown(value)}; expected integers from 0 to 2**63 - 1")
    return tuple(value)


def _require_back_to_back(header: _Header, tensors: list[StoredTensor]) -> None:
    """No tensor may share bytes with another, and no byte may belong to none."""
    position, previous = header.data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset < position:
            _refuse(header, tensor.name, f"overlaps {shown(previous)}")
        if tensor.offset > position:
            _refuse(header, tensor.name, f"leaves {tensor.offset - position} unused bytes before it")
        position, previous = tensor.offset + tensor.size, tensor.name
    unused = header.data_start + header.data_size - position
    if unused:
        raise CheckpointError(f"{header.path} has {unused} bytes that belong to no tensor")


def _refuse(header: _Header, name: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{header.path}: tensor {shown(name)} {problem}")


def open_tensors(directory: ModelDirectory) -> dict[str, StoredTensor]:
    """Read and check all headers; no tensor data. As in transformers, a single file wins over an index.

    Raises:
        CheckpointError: weights are absent, in another format, broken, or disagree with their index.
    """
    if directory.has(SINGLE):
        return read_header(directory.file(SINGLE))
    if directory.has(INDEX):
        return _open_shards(directory)
    for name in PICKLED:
        if directory.has(name):
            raise CheckpointError(
                f"{directory.path / name} is in pickle format, which can run code when loaded, and is never "
                "read; convert the checkpoint to safetensors"
            )
    raise CheckpointError(f"no {SINGLE} and no {INDEX} in {directory.path}")


def _open_shards(directory: ModelDirectory) -> dict[str, StoredTensor]:
    index = directory.file(INDEX)
    weight_map = read_weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_header(directory.file(shard, named_by=str(index))).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {shown(name)} stands in two shards: {tensors[name].path} and {tensor.path}"
                )
            tensors[name] = tensor
    _require_agreement(index, weight_map, tensors)
    return tensors


def _require_agreement(index: Path, weight_map: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(f"{index} puts tensor {shown(name)} into {shown(shard)}, which lacks it")
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{tensor.path} holds tensor {shown(name)}, which {index} does not name")
