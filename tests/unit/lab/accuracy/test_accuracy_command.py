"""`tandem-engine accuracy` on tiny checkpoints: against transformers, and what bits cost."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem_engine.base.errors import ConfigError
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_lab.__main__ import main
from tandem_lab.accuracy import cut, read_text
from tandem_testing.checkpoint_files import write_checkpoint
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

TOKENS, WINDOW = 100, 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint("llama-llama3-rope", tmp_path_factory.mktemp("accuracy"))


def measured(capsys, checkpoint, *flags):
    argv = ["accuracy", "--model", str(checkpoint), "--json", "--tokens", str(TOKENS), "--window", str(WINDOW), *flags]
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_baseline_has_the_perplexity_that_transformers_gives(capsys, checkpoint):
    report = measured(capsys, checkpoint, "--dtype", "float32", "--kv-cache-dtype", "auto")
    assert report["variants"] == []
    assert report["predicted_tokens"] == TOKENS - 3
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    windows = cut(TextTokenizer.load(checkpoint).encode(read_text(None)), WINDOW, at_most=TOKENS)
    assert [len(window) for window in windows] == [40, 40, 20]
    with torch.no_grad():
        ids = [torch.tensor([window]) for window in windows]
        surprise = sum(float(model(each, labels=each).loss) * (each.shape[1] - 1) for each in ids)
    expected = torch.tensor(surprise / (TOKENS - 3)).exp()
    assert report["baseline"]["perplexity"] == pytest.approx(float(expected), rel=1e-4)
    assert report["baseline"]["mean_kl"] == pytest.approx(0.0, abs=1e-6)


def test_fewer_bits_diverge_further(capsys, checkpoint, tmp_path):
    other = write_tiny_checkpoint("llama-llama3-rope", tmp_path, seed=1)
    flags = ("--dtype", "float32", "--kv-cache-dtype", "bfloat16", "fp8_e4m3", "fp8_e5m2", "--compare", str(other))
    rows = measured(capsys, checkpoint, *flags)["variants"]
    assert [row["kv_dtype"] for row in rows] == ["bfloat16", "float8_e4m3fn", "float8_e5m2"] * 2
    bits = [row["mean_kl"] for row in rows]
    assert 0.0 < bits[0] < bits[1] < bits[2] < 0.2 < bits[3]
    assert [row["kv_bytes_per_token"] for row in rows[:2]] == [2 * 192, 192]
    assert rows[0]["top1_agreement"] > 0.9 > rows[3]["top1_agreement"]


def test_projections_of_eight_bits_are_a_variant(capsys, checkpoint):
    flags = ("--dtype", "float32", "--quantization", "auto", "int8", "--kv-cache-dtype", "auto")
    (row,) = measured(capsys, checkpoint, *flags)["variants"]
    assert row["quantization"] == "int8"
    assert row["held"] != ""
    assert 0.0 < row["mean_kl"] < 0.1


def test_only_models_of_one_vocabulary_are_compared(capsys, checkpoint, tmp_path):
    write_checkpoint(tmp_path)
    argv = ["accuracy", "--model", str(checkpoint), "--compare", str(tmp_path), "--dtype", "float32", "--window", "40"]
    assert main([*argv, "--tokens", "50", "--kv-cache-dtype", "auto"]) == 2
    assert "only models of one vocabulary can be compared" in capsys.readouterr().err


def test_text_needs_a_tokenizer_and_two_tokens(capsys, tmp_path):
    write_checkpoint(tmp_path)
    assert main(["accuracy", "--model", str(tmp_path), "--window", "40"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the text has 1 tokens"):
        cut([5], 40, at_most=10)
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        read_text(tmp_path)
