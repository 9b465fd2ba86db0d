from dataclasses import replace
from typing import Any

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import CacheConfig, EngineConfig, HostConfig, KvCacheDtype
from tandem_engine.engine.assembly import cache_layout
from tandem_engine.engine.loaded_model import LoadedModel, compat_hash, kv_geometry, load
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

WINDOW = 20


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Two of three layers have a window."""
    checkpoint = write_tiny_checkpoint("gemma3", tmp_path_factory.mktemp("gemma3"))
    return load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)


def windows(
    loaded: LoadedModel, *, has_peers: bool = False, context_length: int = 64, **cache: Any
) -> list[int | None]:
    scheduler = replace(loaded.config.scheduler, context_length=context_length)
    config = replace(loaded.config, cache=CacheConfig(**cache), scheduler=scheduler)
    layout = cache_layout(loaded, kv_geometry(loaded, config), config, has_peers=has_peers)
    return [group.spec.reach.window for group in layout.groups]


def test_layers_with_a_window_are_a_group(gemma: LoadedModel) -> None:
    assert windows(gemma) == [None, WINDOW]


def test_peers_and_host_memory_have_pages_of_all_layers(gemma: LoadedModel) -> None:
    assert windows(gemma, has_peers=True) == [None]
    assert windows(gemma, host=HostConfig(enable_cache=True)) == [None]
    assert windows(gemma, host=HostConfig(swap_bytes=1 << 20)) == [None]


def test_window_that_no_sequence_leaves_is_none(gemma: LoadedModel) -> None:
    assert windows(gemma, context_length=WINDOW) == [None]
    assert windows(gemma, context_length=WINDOW + 1) == [None, WINDOW]


def latent(loaded: LoadedModel) -> LoadedModel:
    specs = tuple(replace(spec, value_width=8, window=None) for spec in loaded.model.attention)
    return replace(loaded, model=replace(loaded.model, attention=specs))


def test_pages_of_latents_have_half_the_bytes(gemma: LoadedModel) -> None:
    plain, ours = (kv_geometry(loaded, gemma.config) for loaded in (gemma, latent(gemma)))
    assert 2 * ours.page_bytes == plain.page_bytes
    assert compat_hash(ours, 1) != compat_hash(plain, 1)


def test_latents_of_float8_are_rejected(gemma: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 is for K and V, and this model stores latents"):
        windows(latent(gemma), dtype=KvCacheDtype.FP8)
