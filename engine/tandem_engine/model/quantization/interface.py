"""What a format of quantized weights has to say, so that a loader can read it like any other checkpoint."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from tandem_engine.model.quantization.levels import Levels
from tandem_engine.model.safetensors_file import StoredTensor


class WeightFormat(Protocol):
    """How one matrix is stored as several tensors, which share a prefix."""

    @property
    def required(self) -> tuple[str, ...]:
        """Suffixes of the tensors that a matrix needs; whoever has the first of them is one."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Suffixes that it may have besides."""
        ...

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """[outputs, inputs] of the matrix. Raises `CheckpointError` unless all parts fit each other and the config."""
        ...

    def levels(self, parts: Mapping[str, Tensor]) -> Levels:
        """The matrix. Raises `ValueError` for contents that no writer would write."""
        ...
