"""What an engine serves, and what workers must share to exchange its KV. Another value once weights are replaced."""

from dataclasses import asdict, dataclass, replace
from typing import Self

import msgspec
import torch

from tandem_engine.config import EngineConfig, ModelConfig
from tandem_engine.errors import ConfigError
from tandem_engine.kv_shape import compat_hash, dtype_name, kv_geometry, kv_scales_name
from tandem_engine.loaded_model import LoadedModel
from tandem_engine.messages.control import KvGeometry

ANOTHER_WITH_OTHER_WEIGHTS = ("fingerprint", "dtype")
"""Of a `ModelConfig`: the dtype on disk says nothing about the one in memory, and the fingerprint is what changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Of one rank."""

    loaded_with: EngineConfig
    model_config: ModelConfig
    geometry: KvGeometry
    peer_group: str

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig) -> Self:
        return cls(
            loaded_with=loaded.config,
            model_config=loaded.model_config,
            geometry=kv_geometry(loaded, config),
            peer_group=config.disagg.peer_group,
        )

    @property
    def compat_hash(self) -> str:
        """Workers with different ones exchange no KV."""
        return compat_hash(self.geometry, self.model_config.num_kv_heads, self.peer_group)

    def with_weights(self, loaded: LoadedModel, kv_dtype: torch.dtype) -> "Served":
        """The same with the weights of `loaded`, over pages of `kv_dtype`."""
        geometry = msgspec.structs.replace(
            self.geometry,
            fingerprint=loaded.model_config.fingerprint,
            kv_scales=kv_scales_name(loaded, kv_dtype),
        )
        return replace(self, loaded_with=loaded.config, model_config=loaded.model_config, geometry=geometry)

    def require_same_architecture(self, loaded: LoadedModel) -> None:
        """Raise `ConfigError` unless `loaded` can take the place of what is served."""
        path, dtype = loaded.config.model_path, dtype_name(loaded.dtype)
        served = self.geometry.model_dtype or self.geometry.dtype
        if dtype != served:
            raise ConfigError(f"{path} loads as {dtype}, but the engine serves {served}: restart with --dtype")
        old, new = asdict(self.model_config), asdict(loaded.model_config)
        differing = [name for name in old if old[name] != new[name] and name not in ANOTHER_WITH_OTHER_WEIGHTS]
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{path} has {name} {new[name]}, served is {old[name]}: a reload keeps the architecture, "
                "start a worker for another one"
            )
