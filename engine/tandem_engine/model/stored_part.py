"""The part of a stored tensor that one rank reads."""

from dataclasses import dataclass

from torch import Tensor

from tandem_engine.model.safetensors_file import ReadableTensor
from tandem_engine.parallel.group import TpGroup
from tandem_engine.parallel.split import Part, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """A range of one dimension of a stored tensor, with zeros behind it where the split is padded."""

    stored: ReadableTensor
    dim: int
    part: Part

    @classmethod
    def of(cls, stored: ReadableTensor, split: Split | None, group: TpGroup) -> "StoredPart":
        """What `group`'s rank holds of `stored`: all of it without a split. Biases have no inputs to split by."""
        if split is None or split.dim >= len(stored.shape):
            return cls(stored=stored, dim=0, part=Part(0, stored.shape[0], stored.shape[0]))
        part = split.part(stored.shape[split.dim], rank=group.rank, size=group.size)
        return cls(stored=stored, dim=split.dim, part=part)

    @property
    def shape(self) -> tuple[int, ...]:
        """Padding included."""
        shape = self.stored.shape
        return (*shape[: self.dim], self.part.length, *shape[self.dim + 1 :])

    def read_into(self, target: Tensor) -> None:
        """Fill `target`, of this shape. Raises `CheckpointError` as `StoredTensor.read` does."""
        start, stop = self.part.start, self.part.stop
        held = stop - start
        target.narrow(self.dim, 0, held).copy_(self.stored.read_part(self.dim, start, stop))
        target.narrow(self.dim, held, self.part.length - held).zero_()
