"""The host memory of an engine: its pages, and what they are used for."""

from pathlib import Path

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import CacheConfig
from tandem_engine.engine.loaded_model import compat_hash
from tandem_engine.executor.platform import Platform
from tandem_engine.memory.group_pools import GroupPools
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.host.storage import DiskStorage
from tandem_engine.memory.page_copies import CopyQueue, parts_of_state
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.messages.control import KvGeometry


def make_host_pool(pools: GroupPools, config: CacheConfig, platform: Platform) -> HostPool | None:
    """Pages of host memory for the cache and for swapping; None without either.

    Raises:
        ConfigError: what is for swapping holds not one request, or the cache not one state.
    """
    if not config.host.enabled:
        return None
    pool = pools.first
    cached = config.host.cache_pages(device_pages=pool.num_pages, page_bytes=pool.page_bytes)
    swapped, state = config.host.swap_pages(pool.page_bytes), _state_pages(pools)
    if config.host.swap_bytes and swapped < state + bool(state):
        raise ConfigError(
            f"--swap-space {config.host.swap_bytes / (1 << 30):g} holds not one request: a state and one KV page "
            f"take {(state + 1) * pool.page_bytes} bytes: raise it"
        )
    if cached and cached < state + bool(state):
        raise ConfigError(
            f"the hierarchical cache has {cached * pool.page_bytes} bytes and holds not one state: it and one KV page "
            f"take {(state + 1) * pool.page_bytes}: raise --hicache-size or --hicache-ratio"
        )
    return platform.host_pool(num_pages=cached + swapped, page_bytes=pool.page_bytes)


def make_host_memory(
    pool: HostPool | None,
    pools: GroupPools,
    copies: CopyQueue,
    config: CacheConfig,
    geometry: KvGeometry,
    anchors: StateAnchors | None,
) -> HostMemory | None:
    """What `pool` is used for, files below it included."""
    if pool is None:
        return None
    storage = None
    if config.host.storage_dir:
        storage = DiskStorage(
            Path(config.host.storage_dir),
            fingerprint=bytes.fromhex(compat_hash(geometry, geometry.num_kv_heads)),
            page_bytes=pool.page_bytes,
            max_bytes=config.host.storage_bytes,
        )
    return HostMemory.build(
        pool,
        copies,
        config.host,
        page_size=config.page_size,
        storage=storage,
        state_pages=_state_pages(pools),
        anchors=anchors,
    )


def _state_pages(pools: GroupPools) -> int:
    """Host pages that hold the state of a request; 0 where no layer keeps one."""
    states = pools.states
    return 0 if states is None else parts_of_state(states.page_bytes, pools.first.page_bytes)
