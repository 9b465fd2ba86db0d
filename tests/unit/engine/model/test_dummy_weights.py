"""`--load-format dummy`: a model of random weights from its config.json alone, the same in every process."""

import pytest
import torch

from tandem_engine import LLM, SamplingParams
from tandem_engine.base.errors import ConfigError
from tandem_engine.config import LoadFormat, ModelImpl
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.loader import DummyWeights
from tandem_engine.model.tensor_names import EMBEDDING, FINAL_NORM
from tandem_engine.parallel.group import SingleRank
from tandem_engine.parallel.sharding import INPUTS, OUTPUTS, VOCABULARY
from tandem_testing.checkpoint_files import COMPUTED, write_checkpoint, write_config

GATE, UP, DOWN = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SHAPES = {GATE: (24, 16), UP: (24, 16), DOWN: (16, 24), EMBEDDING: (33, 16), FINAL_NORM: (16,)}


def weights(group=None, dtype=torch.float32) -> DummyWeights:
    return DummyWeights(shapes=SHAPES, dtype=dtype, device=torch.device("cpu"), group=group or SingleRank())


def test_matrices_are_stacked_drawn_apart_and_the_same_each_time():
    stacked = weights().stacked(GATE, UP)
    assert stacked.shape == (48, 16)
    assert torch.equal(stacked, weights().stacked(GATE, UP))
    assert not torch.equal(weights().stacked(GATE), weights().stacked(UP))
    assert 0.01 < float(stacked.std()) < 0.03


def test_weights_of_norms_lie_around_one():
    norm = weights().stacked(FINAL_NORM)
    assert 0.9 < float(norm.mean()) < 1.1


@pytest.mark.parametrize(
    ("name", "split", "shape"),
    [(GATE, OUTPUTS, (12, 16)), (DOWN, INPUTS, (16, 12)), (EMBEDDING, VOCABULARY, (17, 16))],
)
def test_dummy_weights_of_each_rank_are_a_different_part(name, split, shape):
    first, second = (weights(SingleRank(rank=rank, size=2)).stacked(name, split=split) for rank in range(2))
    assert first.shape == second.shape == shape
    assert not torch.equal(first, second)


def test_engine_without_weight_files_generates(tmp_path):
    write_config(tmp_path, **COMPUTED)
    options = {"load_format": "dummy", "num_pages": 16, "page_size": 4}
    outputs = []
    for _ in range(2):
        with LLM(tmp_path, progress=False, **options) as llm:
            (answer,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
            outputs.append(answer.outputs[0].token_ids)
    assert len(outputs[0]) == 8
    assert outputs[0] == outputs[1]


def test_dummy_weights_have_another_fingerprint_than_the_checkpoint(tmp_path):
    write_checkpoint(tmp_path, **COMPUTED)
    dummy = read_model_config(tmp_path, load_format=LoadFormat.DUMMY)
    assert dummy.fingerprint
    assert dummy.fingerprint != read_model_config(tmp_path).fingerprint


def test_code_of_transformers_needs_weights(tmp_path):
    write_config(tmp_path, **COMPUTED)
    with pytest.raises(ConfigError, match="--load-format dummy"):
        read_model_config(tmp_path, impl=ModelImpl.TRANSFORMERS, load_format=LoadFormat.DUMMY)
