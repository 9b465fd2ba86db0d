"""Quantized matrices under the names and shapes of plain ones, so that a model loader reads both in the same way.

    tensors of the files ─▶ those of one matrix found by their suffixes, compared with each other and with the config
                         ─▶ one `DequantizedTensor` named …weight ─▶ read: all its parts, put together in float32

Matrices are read one at a time. A layer that can multiply by quantized weights takes `levels`; every other layer reads
the matrix as a plain one, and holds it in the model's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor
from tandem_engine.model.checkpoint_folder import shown
from tandem_engine.model.quantization.levels import Levels
from tandem_engine.model.quantization.scheme import WeightFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class DequantizedTensor:
    """Implements `ReadableTensor`: a matrix that several stored tensors make."""

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    parts: Mapping[str, StoredTensor]
    """By suffix."""

    @property
    def path(self) -> Path:
        """Of its first part."""
        return self.parts[self.format.required[0]].path

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read."""
        return torch.float32

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """In the order of their suffixes."""
        return tuple(part for _, part in sorted(self.parts.items()))

    @property
    def size(self) -> int:
        """Bytes in the files."""
        return sum(part.size for part in self.parts.values())

    def read_part(self, dim: int, start: int, stop: int) -> Tensor:
        """See `ReadableTensor.read_part`. The whole matrix is put together first."""
        return self.levels().values().narrow(dim, start, stop - start)

    def levels(self) -> Levels:
        """The whole matrix as it is. Raises `CheckpointError` for contents that no writer would write."""
        stored = {suffix: part.read() for suffix, part in self.parts.items()}
        try:
            return self.format.levels(stored)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {shown(self.name)} cannot be put together: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class DequantizedRows:
    """Implements `ReadableTensor`: some outputs of a matrix that is stored with those of others."""

    name: str
    whole: DequantizedTensor
    start: int
    stop: int

    @property
    def path(self) -> Path:
        """Of the whole."""
        return self.whole.path

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read."""
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.whole.shape[1:])

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """Of the whole."""
        return self.whole.sources

    @property
    def size(self) -> int:
        """Its share of the bytes of the whole."""
        return self.whole.size * (self.stop - self.start) // self.whole.shape[0]

    def read_part(self, dim: int, start: int, stop: int) -> Tensor:
        """See `ReadableTensor.read_part`. The whole matrix is put together first."""
        return self.levels().values().narrow(dim, start, stop - start)

    def levels(self) -> Levels:
        """As `DequantizedTensor.levels`."""
        return self.whole.levels().outputs(slice(self.start, self.stop))


def dequantized(tensors: Mapping[str, StoredTensor], scheme: WeightFormat | None) -> dict[str, ReadableTensor]:
    """`tensors` with one for each matrix of `scheme`; all others as they are.

    Raises:
        CheckpointError: a part of a matrix is missing, or does not fit the others or the config.
    """
    if scheme is None:
        return dict(tensors)
    found: dict[str, ReadableTensor] = {}
    taken: set[str] = set()
    for prefix in _prefixes(tensors, scheme):
        parts = {
            suffix: tensors[f"{prefix}.{suffix}"]
            for suffix in (*scheme.required, *scheme.optional)
            if f"{prefix}.{suffix}" in tensors
        }
        for suffix in scheme.required:
            if suffix not in parts:
                first = parts[scheme.required[0]]
                raise CheckpointError(f"{first.path}: tensor {shown(first.name)} has no matching {prefix}.{suffix}")
        name = f"{prefix}.weight"
        found[name] = DequantizedTensor(name=name, shape=scheme.shape(parts), format=scheme, parts=parts)
        taken.update(f"{prefix}.{suffix}" for suffix in parts)
    return {name: tensor for name, tensor in tensors.items() if name not in taken} | found


def _prefixes(tensors: Mapping[str, StoredTensor], scheme: WeightFormat) -> list[str]:
    """Of the matrices. Where a plain matrix is called as the first part is, the second one tells them apart."""
    marker = scheme.required[1] if scheme.required[0] == "weight" else scheme.required[0]
    prefixes = [name.removesuffix(f".{marker}") for name in tensors if name.endswith(f".{marker}")]
    if marker == scheme.required[1]:
        lonely = next((prefix for prefix in prefixes if f"{prefix}.weight" not in tensors), None)
        if lonely is not None:
            scale = tensors[f"{lonely}.{marker}"]
            raise CheckpointError(
                f"{scale.path}: tensor {shown(scale.name)} scales nothing: {lonely}.weight is missing"
            )
    return prefixes
