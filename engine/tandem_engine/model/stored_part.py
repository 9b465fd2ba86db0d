"""The part of a stored tensor that one rank reads."""

from dataclasses import dataclass

from torch import Tensor

from tandem_engine.model.safetensors_file import ReadableTensor
from tandem_engine.parallel.group import TpGroup
from tandem_engine.parallel.split import Part, Split, part_of, shape_of_part


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """A range of one dimension of a stored tensor, with zeros behind it where the split is padded."""

    stored: ReadableTensor
    dim: int
    part: Part

    @classmethod
    def of(cls, stored: ReadableTensor, split: Split | None, group: TpGroup) -> "StoredPart":
        """What `group`'s rank holds of `stored`."""
        dim, part = part_of(stored.shape, split, rank=group.rank, size=group.size)
        return cls(stored=stored, dim=dim, part=part)

    @property
    def shape(self) -> tuple[int, ...]:
        """Padding included."""
        return shape_of_part(self.stored.shape, self.dim, self.part)

    def read_into(self, target: Tensor) -> None:
        """Fill `target`, of this shape. Raises `CheckpointError` as `StoredTensor.read` does."""
        start, stop = self.part.start, self.part.stop
        held = stop - start
        target.narrow(self.dim, 0, held).copy_(self.stored.read_part(self.dim, start, stop))
        target.narrow(self.dim, held, self.part.length - held).zero_()
