"""The bundled model is what its card and the loader say it is. Reads files only: no torch, no training."""

import hashlib
import importlib
import json
import struct
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType

import jinja2
import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "tandem-mini"
SIZE_LIMIT = 20 << 20


def read_json(name: str) -> dict:
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


def safetensors_header(path: Path) -> dict:
    """The header alone: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def weights() -> dict[str, dict]:
    return {name: entry for path in MODEL.glob("*.safetensors") for name, entry in safetensors_header(path).items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("corpus.mixture")


def render(messages: list[dict], *, add_generation_prompt: bool = False) -> str:
    # trim_blocks and lstrip_blocks are what transformers and the gateway render with
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    template = environment.from_string(read_json("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_directory_stays_small_enough_to_ship():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= SIZE_LIMIT


def test_every_file_may_be_read_by_another_user():
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in MODEL.iterdir())


def test_bundled_model_is_qwen3_with_gqa_and_tied_embeddings():
    config = read_json("config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 4096


def test_weights_are_bfloat16_in_two_shards_that_match_the_index():
    index = read_json("model.safetensors.index.json")
    assert len(set(index["weight_map"].values())) == 2
    assert set(weights()) == set(index["weight_map"])
    assert {entry["dtype"] for entry in weights().values()} == {"BF16"}
    assert "lm_head.weight" not in weights()


def test_shapes_follow_the_config(tokenizer):
    config = read_json("config.json")
    found = {name: entry["shape"] for name, entry in weights().items()}
    assert found["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert found["model.layers.0.self_attn.q_norm.weight"] == [config["head_dim"]]
    rows = config["num_key_value_heads"] * config["head_dim"]
    assert found["model.layers.0.self_attn.k_proj.weight"] == [rows, config["hidden_size"]]


def test_generation_ends_at_either_end_token(tokenizer):
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert read_json("generation_config.json")["eos_token_id"] == ends
    assert read_json("config.json")["eos_token_id"] == ends[0]


@pytest.mark.parametrize("text", [
    "Hello!", "", "  two  spaces\n\n\ttab ", "naïve café — “quotes”", "日本語 한국어 العربية", "👩‍🚀🧪 e\u0301",
    "".join(map(chr, range(0, 256))), "\u200d\ufeff\U0010ffff",
])  # fmt: skip
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_random_code_points_survive_the_tokenizer(tokenizer):
    rng = Random(7)
    points = [rng.choice((rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x110000))) for _ in range(2000)]
    text = "".join(map(chr, points))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_chat_template_renders_every_role_between_special_tokens(tokenizer):
    roles = ("system", "user", "assistant", "tool")
    rendered = render([{"role": role, "content": f"say {role}"} for role in roles])
    assert rendered == "".join(f"<|im_start|>{role}\nsay {role}<|im_end|>\n" for role in roles)
    tokens = tokenizer.encode(rendered).tokens
    assert tokens.count("<|im_start|>") == tokens.count("<|im_end|>") == len(roles)


def test_chat_template_adds_generation_prompt_on_request():
    prompt = render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("content", "text"), [([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"), (None, "")]
)
def test_chat_template_takes_parts_and_null(content, text):
    assert render([{"role": "assistant", "content": content}]) == f"<|im_start|>assistant\n{text}<|im_end|>\n"


def test_card_names_the_licence_and_the_training_text():
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "tools/corpus" in card
    count = sum(_elements(entry["shape"]) for entry in weights().values())
    assert f"{count:,}" in card, f"the card must give the parameter count {count:,}"


def _elements(shape: list[int]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def digest(mixture: ModuleType, seed: int) -> str:
    return hashlib.sha256("".join(islice(mixture.documents(seed), 200)).encode()).hexdigest()


def test_training_text_follows_the_seed_alone(mixture):
    assert digest(mixture, 1) == digest(mixture, 1)
    assert digest(mixture, 1) != digest(mixture, 2)


def test_training_text_leaves_no_slot_unfilled(mixture):
    plain = [document for document in islice(mixture.documents(3), 600) if "```" not in document]
    assert not [document for document in plain if "{a:" in document or "{name" in document or "[" in document]


def test_training_dialogues_equal_rendered_template(mixture):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    assert mixture.render(messages) == render(messages)
