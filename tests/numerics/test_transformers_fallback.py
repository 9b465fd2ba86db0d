"""Models that transformers computes with attention over our pages equal transformers alone, or are refused."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelImpl
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.fallback_check import main as fallback_check
from tandem_engine.model.fallback_examination import examine
from tandem_engine.model.loader import load_model
from tandem_engine.model.long_context import default_context, fingerprint_of
from tandem_testing.dense_attention import DenseAttend
from tandem_testing.exactness import (
    CACHED,
    CHUNKED,
    CONTINUED,
    DISAGGREGATED,
    FILES,
    HOST,
    MIXED,
    RETRACTED,
    SWAPPED,
    run_paths,
)
from tandem_testing.tiny_checkpoints import FALLBACK_MODELS, write_tiny_checkpoint


def edit_config(directory, **changes) -> None:
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value != "absent"}))


def load(directory, impl: ModelImpl = ModelImpl.AUTO):
    return load_model(directory, read_model_config(directory, impl=impl), torch.float32, progress=False)


def refusal(directory) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    return str(caught.value)


@pytest.fixture
def arcee(tmp_path):
    return write_tiny_checkpoint("arcee", tmp_path)


@pytest.mark.parametrize("name", FALLBACK_MODELS)
def test_greedy_output_and_logprobs_are_those_of_transformers(name, tmp_path):
    results = run_paths(write_tiny_checkpoint(name, tmp_path), [MIXED, CACHED])
    assert [result.difference for result in results] == [None, None]


@pytest.mark.parametrize("name", ["cohere2", "granite"])
def test_fallback_outputs_are_exact_on_paths_that_move_pages(name, tmp_path):
    checkpoint = write_tiny_checkpoint(name, tmp_path)
    results = run_paths(checkpoint, [CHUNKED, RETRACTED, DISAGGREGATED], impl=ModelImpl.TRANSFORMERS)
    assert [result.difference for result in results] == [None] * 3


@pytest.mark.parametrize("name", ["cohere2", "granite"])
def test_fallback_outputs_are_exact_through_lower_tiers(name, tmp_path):
    checkpoint = write_tiny_checkpoint(name, tmp_path)
    results = run_paths(checkpoint, [SWAPPED, HOST, FILES, CONTINUED], impl=ModelImpl.TRANSFORMERS)
    assert [result.difference for result in results] == [None] * 4


@pytest.mark.parametrize("name", ["llama-bias", "gemma2", "qwen3-moe"])
def test_families_of_ours_can_be_computed_by_transformers_too(name, tmp_path):
    results = run_paths(write_tiny_checkpoint(name, tmp_path), [MIXED], impl=ModelImpl.TRANSFORMERS)
    assert [result.difference for result in results] == [None]


def test_transformers_layers_report_attention_windows(tmp_path):
    model = load(write_tiny_checkpoint("cohere2", tmp_path), ModelImpl.TRANSFORMERS)
    assert [spec.window for spec in model.attention] == [20, None, 20]
    assert model.config.impl is ModelImpl.TRANSFORMERS
    assert (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim) == (4, 2, 16)


def test_soft_cap_reaches_our_attention(tmp_path):
    model = load(write_tiny_checkpoint("gemma2", tmp_path), ModelImpl.TRANSFORMERS)
    assert [(spec.window, spec.soft_cap) for spec in model.attention] == [(20, 3.0), (None, 3.0), (20, 3.0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_examination_allows_for_rounding(arcee, dtype):
    model = load_model(arcee, read_model_config(arcee, impl=ModelImpl.AUTO), dtype, progress=False)
    hidden = torch.zeros(2, 64, dtype=dtype)
    with torch.inference_mode():
        assert model.logits(hidden).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "attention interface 0 times; where layers keep states, others must call it"),
        ("bloom", "calls transformers' attention interface 0 times"),
        ("minimax", "uses cache of its own"),
        ("kimi-linear", "has keys of 36 and values of 12 dimensions"),
        ("nemotron", "its attention cannot be replaced"),
        ("bart", "calls transformers' attention interface 12 times"),
        ("falcon", "transformers cannot load"),
        ("stablelm", "its attention cannot be replaced"),
        ("roberta", "computes other logits than transformers by itself"),
        ("xlm-roberta", "computes other logits than transformers by itself"),
    ],
)
def test_model_that_does_more_than_paged_attention_is_refused(name, reason, tmp_path):
    assert reason in refusal(write_tiny_checkpoint(name, tmp_path))


def test_sinks_are_refused_where_transformers_is_to_compute_them(tmp_path):
    path = write_tiny_checkpoint("gpt-oss", tmp_path)
    with pytest.raises(CheckpointError, match="requires s_aux"):
        load_model(path, read_model_config(path, impl=ModelImpl.TRANSFORMERS), torch.float32, progress=False)


def test_chunks_are_refused_where_transformers_is_to_compute(tmp_path):
    path = write_tiny_checkpoint("llama4", tmp_path)
    with pytest.raises(CheckpointError, match="layer_types may name only full_attention, sliding_attention, conv"):
        read_model_config(path, impl=ModelImpl.TRANSFORMERS)


def test_keys_and_values_of_two_sizes_are_refused(tmp_path):
    checkpoint = write_tiny_checkpoint("deepseek-v3", tmp_path)
    with pytest.raises(CheckpointError, match="keys of 36 and values of 12"):
        load(checkpoint, ModelImpl.TRANSFORMERS)


def test_state_layers_are_found_regardless_of_config_format(tmp_path):
    """LFM2 mixes attention with short convolutions."""
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        full_attn_idxs=[0],
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types="absent", full_attn_idxs=[0])
    facts = load(tmp_path).config
    assert (facts.attention_layers, [part.layer for part in facts.state_parts]) == (1, [1])


def test_model_mixing_tokens_outside_attention_is_rejected(arcee):
    model = load(arcee)
    facts = model.config

    def shift(_module, _inputs, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, dims=1)

    model.body.layers[1].register_forward_hook(shift)
    with pytest.raises(CheckpointError, match="does something between tokens"):
        examine(
            model.body,
            model.head,
            num_layers=facts.num_layers,
            vocab_size=facts.vocab_size,
            max_position=facts.max_position,
        )


def test_code_in_a_checkpoint_is_never_run(arcee):
    edit_config(arcee, model_type="evil", architectures=["EvilForCausalLM"], auto_map={"AutoConfig": "evil.Config"})
    (arcee / "evil.py").write_text("raise SystemExit('this ran')")
    message = refusal(arcee)
    assert "auto_map" in message
    assert "never run" in message


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model_type": "nobody_knows"}, "model_type"),
        ({"model_type": "absent"}, "model_type"),
        ({"model_type": "vit"}, "model_type"),
        ({"model_type": "gemma3"}, "model_type"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"layer_types": ["conv"] * 3}, "layer_types"),
        ({"sliding_window": 16}, "sliding_window"),
    ],
)
def test_config_that_cannot_work_is_refused_by_name(arcee, changes, name):
    edit_config(arcee, architectures=["ArceeForCausalLM"], **changes)
    assert name in refusal(arcee)


def test_unknown_architecture_is_rejected_by_tandem_impl(arcee):
    with pytest.raises(CheckpointError, match="architectures must name a supported architecture"):
        read_model_config(arcee, impl=ModelImpl.TANDEM)


def test_config_is_checked_without_its_weights(arcee, capsys):
    for file in arcee.glob("*.safetensors"):
        file.unlink()
    assert (fallback_check(str(arcee)), capsys.readouterr().out) == (0, "")
    config = json.loads((arcee / "config.json").read_text())
    (arcee / "config.json").write_text(json.dumps(config | {"model_type": "odd"}))
    assert fallback_check(str(arcee)) == 1
    assert "model_type is not known to transformers" in capsys.readouterr().out


def test_missing_weights_are_refused_by_name(arcee):
    from safetensors.torch import load_file, save_file

    tensors = load_file(arcee / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, arcee / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(arcee)


def test_config_change_with_equal_weights_changes_fingerprint(arcee):
    before = read_model_config(arcee, impl=ModelImpl.AUTO).fingerprint
    edit_config(arcee, rms_norm_eps=1e-3)
    assert read_model_config(arcee, impl=ModelImpl.AUTO).fingerprint != before


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("impl", [ModelImpl.TANDEM, ModelImpl.TRANSFORMERS])
@pytest.mark.parametrize(("context", "length"), [(64, 50), (256, 100)])
def test_longrope_has_the_angles_of_its_context(tmp_path, context, length, impl):
    """Up to the original context the short ones, with a longer one those of prompts beyond it."""
    write_tiny_checkpoint("phi3", tmp_path)
    edit_config(tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=64, sliding_window="absent")
    config = read_model_config(tmp_path, impl=impl)
    assert config.max_position == 512
    assert default_context(config, 4096) == 64
    model = load_model(tmp_path, config, torch.float32, context_length=context, progress=False)
    ids = torch.randint(259, (length,), generator=torch.Generator().manual_seed(3))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    attend = DenseAttend(specs=model.attention)
    with torch.inference_mode():
        parts = []
        for start, stop in ((0, 20), (20, length)):
            attend.extend_lens = [stop - start]
            span = torch.arange(start, stop)
            parts.append(model.logits(model.forward(ids[start:stop], span, attend, span - start)))
        expected = theirs(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


def test_longrope_workers_of_other_angles_differ_in_identity(tmp_path):
    write_tiny_checkpoint("phi3", tmp_path)
    edit_config(tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=64)
    config = read_model_config(tmp_path, impl=ModelImpl.TRANSFORMERS)
    assert fingerprint_of(config, 64) == config.fingerprint
    assert fingerprint_of(config, 65) == fingerprint_of(config, 512) != config.fingerprint


def test_dynamic_rope_bounds_the_context_of_the_fallback(tmp_path):
    write_tiny_checkpoint("arcee", tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert load(tmp_path).config.max_position == 512


@pytest.mark.parametrize("reach", [512, 16])
def test_windows_that_only_masks_apply_are_refused(tmp_path, monkeypatch, reach):
    """Layers keep their window from the interface: found by a prompt beyond it, and by a shorter window."""
    model = load(write_tiny_checkpoint("olmo3", tmp_path), ModelImpl.TRANSFORMERS)
    for layer in model.body.layers:
        layer.self_attn.sliding_window = None
    monkeypatch.setattr("tandem_engine.model.fallback_examination.LONGEST", reach)
    facts = model.config
    with pytest.raises(CheckpointError, match="computes other logits than transformers by itself"):
        examine(model.body, model.head, num_layers=3, vocab_size=facts.vocab_size, max_position=facts.max_position)


@pytest.mark.parametrize(
    "changes", [{"hidden_act": 3}, {"hidden_size": "64"}, {"rope_parameters": 3}, {"pad_token_id": 1 << 40}]
)
def test_errors_of_transformers_are_one_sentence(arcee, changes):
    edit_config(arcee, **changes)
    assert "\n" not in refusal(arcee)


def test_only_the_fallback_imports_transformers(tmp_path):
    write_tiny_checkpoint("llama-bias", tmp_path)
    program = (
        "import sys, torch; from tandem_engine.config import ModelImpl;"
        "from tandem_engine.model.checkpoint import read_model_config;"
        "from tandem_engine.model.loader import load_model;"
        f"config = read_model_config({str(tmp_path)!r}, impl=ModelImpl.AUTO);"
        f"load_model({str(tmp_path)!r}, config, torch.float32, progress=False);"
        "raise SystemExit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
