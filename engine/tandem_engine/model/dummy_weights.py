"""Random weights of a model's shapes: `--load-format dummy` measures speed and memory without a checkpoint.

They are drawn on the device that they stay on, in seconds for models that would take minutes to read. Each matrix has
a seed of its own, so that two engines of the same config, such as a prefill and a decode worker, have the same
weights. Their scale is that of freshly initialised models: activations stay finite through any number of layers.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem_engine.model.layers.quantized import can_multiply
from tandem_engine.model.quantization.holding import Holding
from tandem_engine.model.quantization.levels import Levels, int8_levels
from tandem_engine.parallel.group import SingleRank, TpGroup
from tandem_engine.parallel.split import Split, part_of, shape_of_part

STD = 0.02
"""`initializer_range` of most families."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DummyWeights:
    """Implements `Weights` for tensors of the named shapes."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    group: TpGroup = field(default_factory=SingleRank)
    holding: Holding = Holding.DTYPE
    """`PACKED` is that of a checkpoint, and means nothing here."""

    def matrix(self, *names: str, split: Split | None = None, rounded: bool = True) -> Tensor | Levels:
        """See `Weights.matrix`."""
        plain = self.stacked(*names, split=split)
        if not (rounded and self.holding is Holding.INT8):
            return plain
        levels = int8_levels(plain)
        return levels if can_multiply(levels, self.device) else plain

    def stacked(self, *names: str, split: Split | None = None) -> Tensor:
        """As `Weights.stacked`: normal with deviation `STD`; weights of norms lie around 1."""
        shapes = [self._held(self.shapes[name], split) for name in names]
        target = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        target.normal_(0.0, STD, generator=self._dice(names, split))
        return target.add_(1.0) if all(name.endswith("norm.weight") for name in names) else target

    def _held(self, shape: tuple[int, ...], split: Split | None) -> tuple[int, ...]:
        return shape_of_part(shape, *part_of(shape, split, rank=self.group.rank, size=self.group.size))

    def _dice(self, names: tuple[str, ...], split: Split | None) -> torch.Generator:
        rank = 0 if split is None else self.group.rank
        digest = hashlib.blake2b(f"{rank} {' '.join(names)}".encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest) >> 1)
