"""Families beyond the plain decoder on a real GPU, against transformers: latents, states, sinks, chunks, heads."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_testing.device_families import DEVICE_FAMILIES, differences_of
from tandem_testing.exactness import DISAGGREGATED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def loaded(name: str, folder: Path, dtype: str = "float32") -> LoadedModel:
    checkpoint = DEVICE_FAMILIES[name].write(folder)
    return load(EngineConfig(model_path=str(checkpoint), dtype=dtype, device="cuda"), progress=False)


@pytest.mark.parametrize("name", DEVICE_FAMILIES)
def test_paths_of_a_family_give_the_tokens_of_transformers(name, tmp_path):
    paths = DEVICE_FAMILIES[name].paths
    assert differences_of(loaded(name, tmp_path), paths) == dict.fromkeys(paths)


@pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl")
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "deepseek-v3", "llama4"])
def test_family_on_one_card_hands_over_by_nixl(name, tmp_path):
    assert differences_of(loaded(name, tmp_path), [DISAGGREGATED]) == {DISAGGREGATED: None}


@pytest.mark.parametrize("name", [name for name, family in DEVICE_FAMILIES.items() if family.rounded])
def test_bfloat16_of_a_family_is_within_the_stated_bounds(name, tmp_path):
    """Of what transformers makes of the same tokens in float32, on the CPU."""
    paths = DEVICE_FAMILIES[name].rounded
    assert differences_of(loaded(name, tmp_path, "bfloat16"), paths) == dict.fromkeys(paths)
