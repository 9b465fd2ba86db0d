"""The adapters of one engine: read with its model, each in a slot that steps name it by."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.config import AdapterConfig, ModelConfig
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.messages.kv_events import DIGEST_BYTES
from tandem_engine.messages.requests import AdapterRef
from tandem_engine.model.adapters.arena import together
from tandem_engine.model.adapters.checkpoint import open_adapter
from tandem_engine.model.adapters.weights import AdapterWeights, load_adapter
from tandem_engine.parallel.agreement import Least
from tandem_engine.parallel.group import TpGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedAdapters:
    """Immutable."""

    names: Mapping[str, AdapterRef] = field(default_factory=dict)
    """What a name stands for. Adapters with the same content share a slot."""
    weights: tuple[AdapterWeights, ...] = ()
    """By slot."""
    served: tuple[ServedAdapter, ...] = ()
    """What a worker reports of them."""
    folders: Mapping[bytes, str] = field(default_factory=dict)
    """Path of each, as it was given, by digest."""
    seconds: float = 0.0
    """That reading and checking them took."""

    @classmethod
    def load(
        cls,
        config: AdapterConfig,
        base: ModelConfig,
        *,
        dtype: torch.dtype,
        device: str,
        group: TpGroup,
        keeps_halves: bool = False,
    ) -> Self:
        """Read all adapters of `config`: the part of this rank of `group`, without a collective.

        `keeps_halves`: see `load_adapter`.

        Raises:
            ConfigError: adapters cannot be computed on `device`.
            CheckpointError: a folder has no adapter for `base`. The message names the adapter.
        """
        if config.sources and torch.device(device).type != "cpu":
            raise ConfigError(f"adapters are computed on a CPU only, got --device {device}: leave out adapters")
        begun = time.monotonic()
        names: dict[str, AdapterRef] = {}
        by_digest: dict[bytes, AdapterWeights] = {}
        served = []
        for source in config.sources:
            try:
                checkpoint = open_adapter(config.located(source.path), base, max_rank=config.max_rank)
                weights = load_adapter(checkpoint, base, dtype=dtype, group=group, keeps_halves=keeps_halves)
                weights = replace(weights, sites=together(weights.sites))
            except CheckpointError as error:
                raise CheckpointError(f"adapter {source.name!r}: {error}") from error
            names[source.name] = AdapterRef(name=source.name, digest=weights.digest)
            root = _root_of(checkpoint.path)
            served.append(
                ServedAdapter(
                    name=source.name,
                    digest=weights.digest.hex(),
                    rank=weights.rank,
                    root=root,
                    size=checkpoint.num_bytes,
                )
            )
            by_digest.setdefault(weights.digest, weights)
        return cls(
            names=names,
            weights=tuple(by_digest.values()),
            served=tuple(served),
            folders={names[source.name].digest: source.path for source in config.sources},
            seconds=time.monotonic() - begun,
        )

    @property
    def slots(self) -> Mapping[bytes, int]:
        """By digest."""
        return {weights.digest: slot for slot, weights in enumerate(self.weights)}


CACHED = "models--"
"""Begins the folder of a repository in the cache of huggingface_hub."""


def _root_of(folder: Path) -> str:
    """What responses say of it: its name; in the cache of a hub, repository and commit."""
    repo = folder.parent.parent.name
    cached = folder.parent.name == "snapshots" and repo.startswith(CACHED)
    name = f"{repo.removeprefix(CACHED).replace('--', '/')}@{folder.name}" if cached else folder.name
    return name.encode("utf-8", "replace").decode()


def require_same_content(names: Mapping[str, AdapterRef], least: Least) -> None:
    """Raise `CheckpointError` where ranks have read different content under one of `names`.

    A folder that changed between two ranks' reads would divide their schedulers.
    """
    mine = [byte for ref in names.values() for byte in ref.digest]
    both = least([*mine, *(-byte for byte in mine)])
    differs = [low != -high for low, high in zip(both[: len(mine)], both[len(mine) :], strict=True)]
    for number, name in enumerate(names):
        if any(differs[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]):
            raise CheckpointError(f"adapter {name!r}: its files changed while they were read; load it again")
