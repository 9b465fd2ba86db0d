"""KV of float8 on every kind of path: stored, moved and read back, pages give what whole prompts without a cache do."""

import pytest

from tandem_engine.config import CacheConfig, EngineConfig, KvCacheDtype
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_testing.exactness import (
    CACHED,
    CHUNKED,
    DISAGGREGATED,
    FILES,
    MIXED,
    RETRACTED,
    SWAPPED,
    UNEQUAL,
    run_paths_of,
)
from tandem_testing.kv_scale_files import add_kv_scales
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PATHS = [CHUNKED, CACHED, MIXED, RETRACTED, "resumed", DISAGGREGATED, SWAPPED, FILES, *UNEQUAL, "drained mid-stream"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    checkpoint = write_tiny_checkpoint("llama-llama3-rope", tmp_path_factory.mktemp("scaled"))
    add_kv_scales(checkpoint, layers=3, heads=2)
    return load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)


def test_every_path_gives_the_tokens_of_whole_prompts(model):
    results = run_paths_of(model, PATHS, kv_dtype=KvCacheDtype.FP8)
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in PATHS]


def geometry_of(model, dtype):
    cache = CacheConfig(num_pages=8, dtype=dtype)
    with Engine.build(model, EngineConfig(model_path=model.config.model_path, cache=cache)) as engine:
        return engine.geometry, engine.compat_hash


def test_compat_hash_depends_on_kv_dtype_and_scales(model, tmp_path):  # [same-kind-paired]
    geometries, hashes = zip(
        *(geometry_of(model, dtype) for dtype in set(KvCacheDtype) - {KvCacheDtype.FLOAT16}), strict=True
    )
    assert len(set(hashes)) == len({geometry.dtype for geometry in geometries}) == 4
    plain = load(
        EngineConfig(model_path=str(write_tiny_checkpoint("llama-llama3-rope", tmp_path)), dtype="float32"),
        progress=False,
    )
    assert geometry_of(plain, KvCacheDtype.AUTO) == geometry_of(model, KvCacheDtype.AUTO)
    mine, theirs = (geometry_of(each, KvCacheDtype.FP8) for each in (model, plain))
    assert mine[0].fingerprint == theirs[0].fingerprint
    assert mine[0].kv_scales != theirs[0].kv_scales == ""
    assert mine[1] != theirs[1]


def test_kv_geometry_includes_model_dtype(model):
    geometry, _ = geometry_of(model, KvCacheDtype.BFLOAT16)
    assert (geometry.dtype, geometry.model_dtype) == ("bfloat16", "float32")


def test_new_weights_bring_their_kv_scales(model, tmp_path):
    other = write_tiny_checkpoint("llama-llama3-rope", tmp_path, seed=1)
    scales = add_kv_scales(other, layers=3, heads=2, seed=6)
    cache = CacheConfig(num_pages=32, dtype=KvCacheDtype.FP8)
    with Engine.build(model, EngineConfig(model_path=model.config.model_path, cache=cache)) as engine:
        before = engine.geometry
        engine.replace_model(load(EngineConfig(model_path=str(other), dtype="float32"), progress=False))
        assert engine._parts.pool.scales.tolist() == scales.tolist()
        assert engine.geometry.kv_scales not in ("", before.kv_scales)
