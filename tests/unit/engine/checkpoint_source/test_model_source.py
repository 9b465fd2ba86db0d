"""What a user may name as a model, and folders that are refused before anything starts."""

import json
import struct

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.examination import examine_folder
from tandem_engine.checkpoint_source.gguf_header import MAX_BYTES, read_facts
from tandem_engine.checkpoint_source.source import parse
from tandem_engine.config import ModelImpl
from tandem_testing.checkpoint_files import write_checkpoint

COMMIT = "0123456789" * 4


def refusal(folder, impl=ModelImpl.AUTO):
    with pytest.raises(ConfigError) as caught:
        examine_folder(folder, impl=impl)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main"),
        ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main"),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        (f"org/name@{COMMIT}", "org/name", COMMIT),
    ],
)
def test_hub_id_is_read(text, repo, revision):
    source = parse(text)
    assert (source.folder, source.repo, source.revision) == (None, repo, revision)
    assert source.is_pinned == (revision == COMMIT)


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "a/b/c", "org/", "@main", "org/na me", "org/name@", "org/..", "org/name@../x", "org/a--b"),
        *("org/name@x/", "org/name\n", "x" * 5000, "org/" + "n" * 96, "https://huggingface.co/org/name", "a/b\0"),
    ],
)
def test_name_without_a_model_is_rejected(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no hub id|after @"):
        parse(text)


def test_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse("org/name").folder is not None
    assert parse("hf://org/name").repo == "org/name"


@pytest.mark.parametrize("text", ["./org/name", "../x", "/x/y", "~/x", "."])
def test_path_like_name_is_a_path(text):
    assert parse(text).folder is not None


def test_model_name_maps_to_another_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    aliases = {"mini": "/opt/mini", "big": "org/big@v2"}
    assert str(parse("mini", aliases).folder) == "/opt/mini"
    assert parse("big", aliases).revision == "v2"
    with pytest.raises(ConfigError, match=r"no name \(mini, big\)"):
        parse("bigg", aliases)


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def write_gguf(path, *, kind=15, url="https://huggingface.co/Qwen/Qwen3-4B"):
    tokens = struct.pack("<IIQ", 9, 8, 2) + string("a") + string("b")
    fields = [
        string("general.architecture") + struct.pack("<I", 8) + string("qwen3"),
        string("general.temperature") + struct.pack("<If", 6, 0.5),
        string("tokenizer.ggml.tokens") + tokens,
        string("general.file_type") + struct.pack("<II", 4, kind),
        string("general.base_model.0.repo_url") + struct.pack("<I", 8) + string(url),
    ]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 7, len(fields)) + b"".join(fields))
    return path


def test_gguf_file_is_refused_with_its_checkpoint(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    assert refusal(path) == (
        "m.gguf is GGUF (qwen3, Q4_K_M), which Tandem does not read; made of Qwen/Qwen3-4B: "
        "tandem serve Qwen/Qwen3-4B --quantization int8"
    )
    assert "tandem serve Qwen/Qwen3-4B --quant" in refusal(tmp_path)


def test_plain_weights_in_gguf_need_no_rounding(tmp_path):
    assert refusal(write_gguf(tmp_path / "m.gguf", kind=32)).endswith("tandem serve Qwen/Qwen3-4B")


def test_gguf_file_of_unknown_origin_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", url="https://huggingface.co/; rm -rf /")
    assert refusal(path).endswith("name the safetensors checkpoint that it was made of")


def test_every_beginning_of_a_gguf_file_is_refused(tmp_path):
    """Facts that are cut off stay empty."""
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    for size in range(4, len(data)):
        (tmp_path / "m.gguf").write_bytes(data[:size])
        assert "which Tandem does not read" in refusal(tmp_path / "m.gguf")


def test_lengths_in_a_gguf_file_are_not_believed(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 7, 2**63) + struct.pack("<Q", 2**63) + b"x" * 2 * MAX_BYTES)
    assert read_facts(path).architecture == ""


def test_adapter_names_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-4B"}))
    assert "is an adapter (PEFT), not a model: merge it into Qwen/Qwen3-4B" in refusal(tmp_path)


def test_folder_without_weights_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no weights" in refusal(tmp_path)
    examine_folder(tmp_path, impl=ModelImpl.AUTO, weights=False)


def test_folder_with_another_architecture_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OddForCausalLM"]}))
    assert "LlamaForCausalLM" in refusal(tmp_path, ModelImpl.TANDEM)


@pytest.mark.parametrize("name", ["absent", "file"])
def test_path_without_directory_is_rejected(tmp_path, name):
    (tmp_path / "file").write_text("text")
    assert str(tmp_path / name) in refusal(tmp_path / name)
