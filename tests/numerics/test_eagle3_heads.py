"""EAGLE-3 heads: outputs are those without drafts, and drafts are those of the head computed from the text alone."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_testing.draft_heads import SHARED, engine_with_head, proposals, request, tokens_with
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_eagle3

LAYERS = (0, 1, 2)
"""Of the model, whose outputs the head reads."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def head(model, tmp_path_factory) -> Path:
    return write_tiny_eagle3(model, tmp_path_factory.mktemp("head"), layers=LAYERS)


@pytest.fixture(scope="module")
def loaded(model) -> LoadedModel:
    return load(EngineConfig(model_path=str(model), dtype="float32"), progress=False)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "options",
    [{"enable_overlap": True, "chunked_prefill_size": 16}, {"page_size": 1, "force_retract_every": 3}],
    ids=["overlap, chunked", "page 1, retracted"],
)
def test_tokens_with_a_head_are_those_without(loaded, head, options):
    retried = {"max_retractions": 1000} if "force_retract_every" in options else {}
    assert tokens_with(loaded, head, **options, **retried) == tokens_with(loaded, None)


class PlainHead:
    """The head by operations of torch on its files, and features by transformers."""

    def __init__(self, model: Path, head: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.w = load_file(head / "model.safetensors")

    @torch.inference_mode()
    def guesses(self, text: list[int], count: int) -> tuple[int, ...]:
        """What the head drafts after `text`."""
        states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        # The last entry is behind the final norm: what the last layer returned is taken from the norm's input.
        features = torch.cat([states[layer + 1][0] for layer in LAYERS[:-1]] + [self._last(text)], dim=1)
        before = torch.cat((torch.zeros(1, features.shape[1] // 3), (features @ self.w["fc.weight"].T)[:-1]))
        guessed: list[int] = []
        for _ in range(count):
            state = self._layer(torch.tensor([*text, *guessed]), before)[-1:]
            logits = self._norm(state, "norm") @ self.w["lm_head.weight"].T
            own = int(logits.argmax())
            guessed.append(own + int(self.w["d2t"][own]))
            before = torch.cat((before, state))
        return tuple(guessed)

    def _last(self, text: list[int]) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        self.target(torch.tensor([text]))
        hook.remove()
        return seen[0][0]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], eps=1e-5)

    def _layer(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        embedded = self.target.get_input_embeddings()(ids)
        x = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), self._norm(before, "midlayer.hidden_norm")), 1)
        q, k, v = (
            (x @ self.w[f"midlayer.self_attn.{name}.weight"].T).view(len(ids), -1, 16).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        angles = torch.arange(len(ids))[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
        q, k = (part * cos + torch.cat((-part[..., 8:], part[..., :8]), -1) * sin for part in (q, k))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
        state = before + seen @ self.w["midlayer.self_attn.o_proj.weight"].T
        x = self._norm(state, "midlayer.post_attention_layernorm")
        gate, up = (x @ self.w[f"midlayer.mlp.{name}.weight"].T for name in ("gate_proj", "up_proj"))
        return state + (F.silu(gate) * up) @ self.w["midlayer.mlp.down_proj.weight"].T


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "chunked_prefill_size": 16}], ids=["plain", "chunked"])
def test_drafts_are_those_of_the_text_alone(loaded, model, head, options):
    plain = PlainHead(model, head)
    for text, chain in proposals(loaded, head, **options):
        assert chain == plain.guesses(text, len(chain))


def test_drafts_for_constant_model_are_always_accepted(model, head, tmp_path):
    """A model whose every layer adds nothing and whose states share a direction says one token again and again."""
    answer, own = 21, 7
    target = tmp_path / "target"
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"][:, 0] = 0.5
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"][answer, 0] = 1.0
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})

    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_bytes((head / "config.json").read_bytes())
    weights = load_file(head / "model.safetensors")
    for name in ("fc.weight", "lm_head.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        weights[name].zero_()
    weights["fc.weight"][0, 0], weights["lm_head.weight"][own, 0] = 1.0, 1.0
    assert own + int(weights["d2t"][own]) == answer
    save_file(weights, folder / "model.safetensors")

    answering = load(EngineConfig(model_path=str(target), dtype="float32"), progress=False)
    with engine_with_head(answering, folder) as engine:
        outputs = engine.generate([request("same", SHARED), request("other", range(40, 90))])
        stats = engine.stats().speculation
    assert {token for output in outputs for token in output.token_ids} == {answer}
    assert stats.accepted_total == stats.drafted_total > 0
    assert stats.accept_length > 3.0
