"""A draft that does not fit its target is refused before any weights are read."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import SpecAlgorithm, SpecConfig
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.speculative.assembly import read_draft
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_head


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("assembly") / "target")


@pytest.fixture
def facts(target):
    return read_model_config(target)


def draft_by(path) -> SpecConfig:
    return SpecConfig(algorithm=SpecAlgorithm.DRAFT, draft_model_path=str(path))


def test_without_a_draft_there_is_nothing_to_read(facts):
    assert read_draft(SpecConfig(), target=facts, target_path="x") is None
    assert read_draft(SpecConfig(algorithm=SpecAlgorithm.NGRAM), target=facts, target_path="x") is None


def test_draft_memory_of_each_page_is_counted(target, facts, tmp_path):
    model = read_draft(draft_by(target), target=facts, target_path=str(target))
    head = read_draft(
        SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=str(write_tiny_head(target, tmp_path / "head"))),
        target=facts,
        target_path=str(target),
    )
    per_layer = 2 * facts.num_kv_heads * facts.head_dim
    assert model.page_bytes(16, torch.float32) == facts.num_layers * per_layer * 16 * 4
    assert head.page_bytes(16, torch.bfloat16) == (per_layer + facts.hidden_size) * 16 * 2


def test_draft_weight_memory_is_file_size_or_zero_for_target(target, facts, tmp_path):
    head = write_tiny_head(target, tmp_path / "head")
    other = write_tiny_checkpoint("qwen3", tmp_path / "other", seed=7)
    specs = {
        path: draft_by(path)
        if path is not head
        else SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=str(path))
        for path in (target, other, head)
    }
    taken = {
        path: read_draft(spec, target=facts, target_path=str(target)).weight_bytes(
            torch.float32, target_path=str(target), target_is_whole=True
        )
        for path, spec in specs.items()
    }
    in_files = {path: sum(t.nbytes for t in load_file(path / "model.safetensors").values()) for path in (other, head)}
    assert taken == {target: 0, **in_files}


def test_draft_of_another_vocabulary_is_refused(target, facts):
    other = replace(facts, vocab_size=facts.vocab_size + 1)
    with pytest.raises(CheckpointError, match=r"259 token ids.*260.*same tokenizer"):
        read_draft(draft_by(target), target=other, target_path="big")


def test_draft_that_cuts_text_differently_is_refused(target, facts, tmp_path):
    draft = write_tiny_checkpoint("qwen2", tmp_path / "draft")
    assert read_draft(draft_by(draft), target=facts, target_path=str(target)) is not None
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="different tokens"):
        read_draft(draft_by(draft), target=facts, target_path=str(target))


def test_missing_draft_is_named(facts):
    with pytest.raises(CheckpointError, match="/nowhere does not exist"):
        read_draft(draft_by("/nowhere"), target=facts, target_path="big")
