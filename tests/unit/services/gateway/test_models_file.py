"""The models file: what an entry may say, what it takes from the flags, and what is refused by name."""

import json
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.common.redis_client import RedisAddress
from tandem_services.gateway.config import ModelConfig
from tandem_services.gateway.models.file import MAX_FILE_BYTES, MAX_MODELS, check_models, read_models
from tandem_services.gateway.objectives import Objectives, SloMode

FLAGS = ModelConfig(
    path=Path(),
    names=("unused",),
    redis=RedisAddress(url="redis://shared:6379"),
    cluster="default",
    max_waiting=7,
    reasoning_parser="qwen3",
)


@pytest.fixture
def write(tmp_path):
    for name in ("llama", "qwen"):
        (tmp_path / name).mkdir()

    def write(*entries: dict, name: str = "models.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"models": [*entries]}), encoding="utf-8")
        return path

    return write


def test_absent_entry_fields_default_to_flags(write, tmp_path):
    entry = {
        "model": "llama",
        "served_model_name": ["llama", "gpt-4o-mini"],
        "cluster": "one",
        "tool_call_parser": "llama3_json",
        "router_policy": "round_robin",
        "queue_timeout": 5,
        "prefill_fallback": False,
        "parse_special_tokens": False,
        "curve_keys": "one.json",
        "slo_ttft_ms": 1500,
        "slo_percentile": 0.9,
        "slo_admission": "shed",
    }
    llama, qwen = read_models(write(entry, {"model": "qwen", "cluster": "two"}), FLAGS)
    assert (llama.path, llama.names, llama.name) == (tmp_path / "llama", ("llama", "gpt-4o-mini"), "llama")
    assert (llama.cluster, llama.tool_call_parser, llama.room_s) == ("one", "llama3_json", 5.0)
    assert (llama.prefill_fallback, llama.curve_keys) == (False, tmp_path / "one.json")
    assert llama.policies != FLAGS.policies
    assert (llama.objectives, llama.slo_percentile, llama.slo_admission) == (Objectives(ttft_s=1.5), 0.9, SloMode.SHED)
    assert (qwen.objectives, qwen.slo_admission) == (FLAGS.objectives, FLAGS.slo_admission)
    assert (llama.parse_special_tokens, qwen.parse_special_tokens) == (False, True)
    assert (qwen.names, qwen.cluster, qwen.curve_keys) == (("qwen",), "two", None)
    for model in (llama, qwen):
        assert (model.max_waiting, model.reasoning_parser, model.redis) == (7, "qwen3", FLAGS.redis)


def test_toml_models_file_is_read_like_a_json_one(write, tmp_path):
    write()
    path = tmp_path / "models.toml"
    path.write_text('[[models]]\nmodel = "llama"\nserved_model_name = "a"\n', encoding="utf-8")
    [model] = read_models(path, FLAGS)
    assert (model.path, model.names) == (tmp_path / "llama", ("a",))


def test_redis_of_its_own_does_not_take_the_others_password(write, tmp_path):
    (tmp_path / "secret").write_text("s", encoding="utf-8")
    shared = RedisAddress(url="redis://a", password_file=tmp_path / "secret")
    flags = ModelConfig(path=Path(), names=("x",), redis=shared)
    entries = {"model": "llama", "redis_url": "redis://b"}, {"model": "qwen", "redis_password_file": "secret"}
    llama, qwen = read_models(write(*entries), flags)
    assert (llama.redis.url, llama.redis.password_file) == ("redis://b", None)
    assert (qwen.redis.url, qwen.redis.password_file) == ("redis://a", tmp_path / "secret")


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([], "models is empty"),
        ([{}], "missing required field `model`"),
        ([{"model": "absent"}], r"models\[0\].model: .*absent is no folder"),
        ([{"model": "llama", "modle": "x"}], "unknown field `modle`"),
        ([{"model": "llama", "queue_timeout": 0}], "queue_timeout"),
        ([{"model": "llama", "served_model_name": []}], "served_model_name"),
        ([{"model": "llama", "served_model_name": ""}], "served_model_name"),
        ([{"model": "llama", "cluster": "a b"}], "--cluster must be"),
        ([{"model": "llama", "tool_call_parser": "x"}], r"models\[0\].tool_call_parser must be one of auto"),
        ([{"model": "llama", "reasoning_parser": "x"}], r"models\[0\].reasoning_parser must be one of auto"),
        ([{"model": "llama", "router_policy": "x"}], "router-policy"),
        ([{"model": "llama", "served_model_name": ["a", "a"]}], "the name a is given twice"),
        (
            [{"model": "llama", "cluster": "1"}, {"model": "qwen", "served_model_name": ["q", "llama"]}],
            "the name llama is given twice",
        ),
        ([{"model": "llama"}, {"model": "qwen"}], "qwen and llama have the same cluster default"),
        ([{"model": "llama"}] * (MAX_MODELS + 1), f"length <= {MAX_MODELS}"),
    ],
)
def test_file_that_is_no_good_is_refused_by_name(write, entries, sentence):
    path = write(*entries)
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_models(path, FLAGS)
    assert str(path) in str(caught.value) or "--" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("m.json", b"{", "not valid JSON"),
        ("m.json", b"\xff", "not valid JSON"),
        ("m.toml", b"=", "not valid TOML"),
        ("m.toml", b"\xff", "not valid TOML"),
        ("m.json", b" " * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_invalid_models_document_is_rejected(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        read_models(path, FLAGS)


def test_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*absent"):
        read_models(tmp_path / "absent", FLAGS)


def test_name_must_not_be_empty():
    with pytest.raises(ConfigError, match="--served-model-name: a name must not be empty"):
        check_models([ModelConfig(path=Path(), names=("a", ""))], "--served-model-name")
