"""States of layers that transformers computes follow a request wherever the engine takes it."""

from collections import Counter

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import EngineConfig, ModelImpl, SpecAlgorithm, SpecConfig, StatePart
from tandem_engine.engine.loaded_model import load
from tandem_engine.memory.state_pool import ALIGNMENT, StatePool, parted_spec
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.fallback import FallbackModel
from tandem_engine.model.loader import load_model
from tandem_testing.exactness import (
    CACHED,
    CHUNKED,
    DISAGGREGATED,
    FAULTY,
    FETCHED,
    FILES,
    HOST,
    MIXED,
    MOVED,
    RETRACTED,
    SWAPPED,
    run_paths,
)
from tandem_testing.tiny_checkpoints import STATEFUL_MODELS, write_tiny_checkpoint

PATHS = [CHUNKED, CACHED, MIXED, RETRACTED, DISAGGREGATED, SWAPPED, MOVED, FAULTY, HOST, FILES, FETCHED]
ROUNDED = {("zamba2", CHUNKED)}
"""Its tokens are equal, and a logprob is off by 1.3e-4, where 1e-4 is the bound."""
SAMPLED = "lfm2"


def load_tiny(name, folder) -> FallbackModel:
    checkpoint = write_tiny_checkpoint(name, folder)
    facts = read_model_config(checkpoint, impl=ModelImpl.TRANSFORMERS)
    model = load_model(checkpoint, facts, torch.float32, progress=False)
    assert isinstance(model, FallbackModel)
    return model


def test_model_with_short_convolutions_is_exact(tmp_path):
    results = run_paths(write_tiny_checkpoint(SAMPLED, tmp_path), [CACHED, RETRACTED, DISAGGREGATED])
    assert [result.difference for result in results] == [None] * 3


def paths_of(name) -> list[str]:
    """A third of the paths: each is taken by three families."""
    third = list(STATEFUL_MODELS).index(name) % 3
    return [path for path in PATHS[third::3] if (name, path) not in ROUNDED]


def test_each_path_is_taken_by_several_families():
    taken = Counter(path for name in STATEFUL_MODELS for path in paths_of(name))
    assert {path for path, families in taken.items() if families >= 2} == set(PATHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL_MODELS)
def test_model_with_states_is_exact_on_its_paths(name, tmp_path):
    paths = paths_of(name)
    results = run_paths(write_tiny_checkpoint(name, tmp_path), paths, impl=ModelImpl.TRANSFORMERS)
    assert {result.path: result.difference for result in results} == dict.fromkeys(paths)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_states_of_families_of_ours_are_exact_in_transformers(name, tmp_path):
    results = run_paths(write_tiny_checkpoint(name, tmp_path), [CHUNKED, RETRACTED], impl=ModelImpl.TRANSFORMERS)
    assert [result.difference for result in results] == [None, None]


def test_pages_count_layers_with_attention_alone(tmp_path):
    model = load_tiny("lfm2", tmp_path)
    assert (model.config.num_layers, model.config.paged_layers, len(model.attention)) == (3, (0,), 1)
    assert model.config.state_parts == tuple(
        StatePart(layer=layer, kind="conv_states", index=0, shape=(64, 3), dtype="float32") for layer in (0, 2)
    )


def test_mixer_that_forgets_gets_tokens_one_by_one(tmp_path):
    model = load_tiny("jamba", tmp_path)
    assert model.mixers is not None
    assert model.mixers.stepwise == [True]


def test_drafts_are_rejected_for_a_model_with_states(tmp_path):
    config = EngineConfig(
        model_path=str(write_tiny_checkpoint("lfm2", tmp_path)),
        dtype="float32",
        speculative=SpecConfig(algorithm=SpecAlgorithm.NGRAM),
    )
    with pytest.raises(ConfigError, match=r"lfm2: transformers computes its states, .*--speculative-algorithm"):
        load(config, progress=False)


def test_parts_of_a_slot_do_not_overlap():
    parts = [
        StatePart(layer=0, kind="conv_states", index=0, shape=(3, 2), dtype="bfloat16"),
        StatePart(layer=2, kind="recurrent_states", index=0, shape=(2, 5), dtype="float32"),
    ]
    spec = parted_spec(parts)
    assert (spec.slot_bytes, spec.layers, spec.name) == (2 * ALIGNMENT, 2, "3x2 bfloat16, 2x5 float32")
    pool = StatePool(spec, rows=2, device="cpu")
    first, second = pool.views
    first[1], second[1] = 3.0, 5.0
    assert (first[1] == 3.0).all()
    assert (second[1] == 5.0).all()
    assert not pool.bytes_view()[[0, 2]].any()
