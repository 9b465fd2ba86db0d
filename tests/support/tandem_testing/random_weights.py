"""Random tensors for a model of any config, without a checkpoint."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem_engine.config import ModelConfig, RopeConfig
from tandem_engine.model.tensor_names import expected_shapes
from tandem_engine.parallel.group import SingleRank
from tandem_engine.parallel.sharding import Split


def small_config(**fields: object) -> ModelConfig:
    """Two plain layers, with `fields` instead of those of the default."""
    defaults: dict[str, object] = {
        "family": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 2048,
        "rms_eps": 1e-6,
        "rope": RopeConfig(),
        "tie_embeddings": True,
    }
    return ModelConfig(**{**defaults, **fields})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class RandomWeights:
    """Implements `Weights`."""

    config: ModelConfig
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: SingleRank = field(default_factory=SingleRank)

    def stacked(self, *names: str, split: Split | None = None) -> Tensor:
        """Norms around 1, everything else around 0; the same for a name every time."""
        assert split is None or self.group.size == 1, "one rank has everything"
        return torch.cat([self._tensor(name) for name in names])

    def matrix(self, *names: str, split: Split | None = None, rounded: bool = True) -> Tensor:
        """Plain, as `stacked`."""
        return self.stacked(*names, split=split)

    def exact(self, name: str) -> Tensor:
        """As `stacked`, in float32."""
        return self.stacked(name).float()

    def _tensor(self, name: str) -> Tensor:
        shapes = expected_shapes(self.config)
        values = torch.randn(shapes[name], generator=torch.Generator().manual_seed(sorted(shapes).index(name)))
        return (1 + values / 10 if "norm" in name else values / 5).to(device=self.device, dtype=self.dtype)
