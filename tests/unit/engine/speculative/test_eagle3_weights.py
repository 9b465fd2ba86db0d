"""Which layers an EAGLE-3 head reads, and what is no such head of this model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import SpecAlgorithm, SpecConfig
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.speculative.assembly import read_draft
from tandem_engine.speculative.eagle3 import load_eagle3, read_eagle3
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_eagle3

NESTED = "eagle_config"
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def facts(target):
    return read_model_config(target)


@pytest.fixture
def head(target, tmp_path):
    return write_tiny_eagle3(target, tmp_path / "head")


def change(head, **fields):
    path = head / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return str(head)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (0, 1, 2)),  # 2, 3 // 2 and 3 - 3
        ({NESTED: {IDS: [0, 1, 2], "use_aux_hidden_state": True}}, (1, 2, 3)),
        ({IDS: [0, 1, 3]}, (0, 1, 3)),
        ({NESTED: {IDS: None}, IDS: [3, 2, 1]}, (1, 2, 3)),
    ],
)
def test_layers_are_named_by_outputs_or_by_inputs(head, facts, fields, layers):
    assert read_eagle3(change(head, **fields), facts)[1].layers == layers


def test_ids_of_the_head_lead_to_those_of_the_model(head, facts):
    config, own = read_eagle3(str(head), facts)
    loaded = load_eagle3(str(head), config, own, dtype=torch.float32, device="cpu", positions=64)
    state = torch.randn(2, facts.hidden_size)
    logits = loaded.logits(state)
    assert logits.shape == (2, facts.vocab_size)
    assert logits.isfinite()[0].nonzero().squeeze(1).tolist() == [*range(0, facts.vocab_size, 3)]
    torch.testing.assert_close(logits[:, ::3], loaded.scores(loaded.norm(state)))


def test_head_with_an_embedding_uses_it(head, facts):
    tensors = load_file(head / "model.safetensors")
    table = torch.randn(facts.vocab_size, facts.hidden_size)
    save_file({**tensors, "embed_tokens.weight": table}, head / "model.safetensors")
    config, own = read_eagle3(str(head), facts)
    loaded = load_eagle3(str(head), config, own, dtype=torch.float32, device="cpu", positions=64)
    assert loaded.embedding is not None
    assert torch.equal(loaded.embedding, table)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, "hidden_size must be that of the model, 64"),
        ({"target_hidden_size": 32}, "target_hidden_size must be that of the model, 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"draft_vocab_size": 300}, r"draft_vocab_size must be at most vocab_size \(259\)"),
        ({IDS: [0, 1, 4]}, f"{IDS} must name layers of the model, which has 3"),
        ({NESTED: {IDS: [0, 1, 3]}}, f"{NESTED}.{IDS} must name layers"),
        ({NESTED: {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        ({NESTED: {"new": 1}}, f"{NESTED}.new is no field of a draft head"),
        ({IDS: [0, 1]}, r"fc.weight has shape \[64, 192\]; config.json implies \[64, 128\]"),
        ({"norm_before_residual": True}, "norm_before_residual is a field that is not known"),
    ],
)
def test_field_of_another_head_is_refused(head, facts, fields, message):
    with pytest.raises(CheckpointError, match=message):
        read_eagle3(change(head, **fields), facts)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("midlayer.hidden_norm.weight"), "lacks tensor model.layers.0.hidden_norm.weight"),
        (lambda tensors: tensors.pop("d2t"), "lacks tensor d2t"),
        (lambda tensors: tensors["d2t"].fill_(1000), "d2t must lead to different ids below 259"),
        (lambda tensors: tensors["d2t"][:2].copy_(torch.tensor([1, 0])), "d2t must lead to different ids"),
        (lambda tensors: tensors.update({"extra": torch.zeros(1)}), "'extra' of shape .* is no part of a draft head"),
    ],
)
def test_tensors_are_those_of_an_eagle3_head(head, facts, edit, message):
    tensors = load_file(head / "model.safetensors")
    edit(tensors)
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_eagle3(str(head), facts)


def test_memory_of_an_eagle3_head_is_counted(target, head, facts):
    spec = SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=str(head))
    draft = read_draft(spec, target=facts, target_path=str(target))
    assert draft is not None
    tensors = load_file(head / "model.safetensors")
    expected = sum(tensor.nbytes for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    assert draft.weight_bytes(torch.float32, target_path=str(target), target_is_whole=True) == expected
    assert draft.page_bytes(16, torch.float32) == (2 * 2 * 16 + facts.hidden_size) * 16 * 4
