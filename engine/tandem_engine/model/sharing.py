"""Whether and how the ranks of a tensor-parallel engine can share a model."""

from collections.abc import Iterator
from typing import NamedTuple

from tandem_engine.config import ModelConfig, ModelImpl
from tandem_engine.errors import ConfigError
from tandem_engine.parallel.split import share_of


class Heads(NamedTuple):
    """Attention heads that one rank computes."""

    query: int
    kv: int
    """With fewer KV heads than ranks, neighbouring ranks hold the same one."""


def heads_of_rank(config: ModelConfig, size: int) -> Heads:
    """Heads of each of `size` ranks, of a model that `require_shareable` has accepted."""
    query, kv = share_of(config.num_heads, size), share_of(config.num_kv_heads, size)
    assert query is not None, f"{config.num_heads} heads on {size} ranks"
    assert kv is not None, f"{config.num_kv_heads} KV heads on {size} ranks"
    return Heads(query=query, kv=kv)


def can_share(config: ModelConfig, size: int) -> bool:
    """Whether `size` ranks can share the model evenly."""
    return _obstacle(config, size) is None


def require_shareable(config: ModelConfig, size: int) -> None:
    """Raise `ConfigError`, naming the sizes that work, when `size` ranks cannot share the model evenly."""
    obstacle = _obstacle(config, size)
    if obstacle is not None:
        possible = ", ".join(str(n) for n in range(1, config.num_heads + 1) if can_share(config, n))
        raise ConfigError(f"--tensor-parallel-size {size} does not fit this model: {obstacle}; it can be {possible}")


def _obstacle(config: ModelConfig, size: int) -> str | None:
    if size > 1 and config.impl is ModelImpl.TRANSFORMERS:
        return "code of transformers computes it, which cannot be shared"
    if config.num_heads % size:
        return f"it does not divide the {config.num_heads} attention heads"
    if share_of(config.num_kv_heads, size) is None:
        return f"it is not a divisor or a multiple of the {config.num_kv_heads} KV heads"
    odd = next((inner for inner in _inner_sizes(config) if inner % size), None)
    return None if odd is None else f"it does not divide the intermediate size of {odd}"


def _inner_sizes(config: ModelConfig) -> Iterator[int]:
    """Of the feed-forward blocks and experts that the model has."""
    if config.moe is None or config.moe.dense_layers:
        yield config.intermediate_size
    if config.moe is not None:
        yield config.moe.intermediate_size
