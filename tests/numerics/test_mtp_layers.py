"""Layers that predict ahead, as draft heads: drafts are those of transformers, and outputs those without drafts."""

import copy
import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import EngineConfig, SpecAlgorithm, SpecConfig
from tandem_engine.engine.loaded_model import load
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.speculative.assembly import read_draft
from tandem_engine.speculative.mtp import load_mtp
from tandem_testing.draft_heads import BESIDE, add_mtp_layer, proposals, tokens_with
from tandem_testing.quantized_files import KINDS
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

FAMILIES = ["deepseek-v3", "glm4-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe"]
"""Over latents, over keys and values, and beside models with states, with experts or without."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return add_mtp_layer(write_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)


class TheirLayer:
    """Of transformers, over whole texts."""

    def __init__(self, checkpoint) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        tensors = load_file(checkpoint / "model.safetensors")
        beside = {name.removeprefix("mtp."): each for name, each in tensors.items() if name.startswith("mtp.")}
        self._run = self._layer_beside(beside) if beside else self._layer_behind()

    def _layer_behind(self):
        from transformers.modeling_layers import MtpModel

        # transformers has the numbers of the layers of published models.
        self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{self.model.config.num_hidden_layers}\."]
        layer = MtpModel.from_pretrained(self.model).eval()
        return lambda ids, before, places: layer.forward_layer(0, before, places, None, input_ids=ids)

    def _layer_beside(self, tensors):
        """transformers does not read these names, but has the parts."""
        from transformers.modeling_layers import MtpLayer

        body, config = self.model.model, copy.deepcopy(self.model.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        layer = MtpLayer(config, type(body.layers[0]), type(body.norm), 0).eval()
        layer.load_state_dict(_of_mtp_layer(tensors))

        def run(ids, before, places):
            embedded = body.embed_tokens(ids)
            return layer(embedded, before, body.rotary_emb(embedded, places), None, places, None)

        return run

    @torch.inference_mode()
    def guesses(self, text: list[int], count: int) -> tuple[int, ...]:
        states = self.model.model(torch.tensor([text])).last_hidden_state
        before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)
        guessed: list[int] = []
        for _ in range(count):
            ids = torch.tensor([[*text, *guessed]])
            out = self._run(ids, before, torch.arange(ids.shape[1])[None])
            guessed.append(int(self.model.lm_head(out[:, -1]).argmax()))
            before = torch.cat((before, out[:, -1:]), dim=1)
        return tuple(guessed)


def _of_mtp_layer(tensors):
    """Tensors of a layer beside a model, as `MtpLayer` has them: experts are stacked."""
    named = {}
    for name, tensor in tensors.items():
        part = next((part for part in BESIDE if name.startswith(part)), "")
        named[name.replace("layers.0.", "mtp_block.") if not part else BESIDE[part] + name.removeprefix(part)] = tensor
    experts = "mtp_block.mlp.experts."
    own = [name for name in named if name.startswith(experts)]
    if own:
        stacked = [
            torch.stack([named[f"{experts}{index}.{kind}_proj.weight"] for index in range(len(own) // 3)])
            for kind in ("gate", "up", "down")
        ]
        named = {name: tensor for name, tensor in named.items() if name not in own}
        named |= {f"{experts}gate_up_proj": torch.cat(stacked[:2], dim=1), f"{experts}down_proj": stacked[2]}
    return named


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "chunked_prefill_size": 16}], ids=["plain", "chunked"])
def test_drafts_are_those_of_transformers(loaded, checkpoint, options):
    theirs = TheirLayer(checkpoint)
    for text, chain in proposals(loaded, checkpoint, **options):
        assert chain == theirs.guesses(text, len(chain))


def test_tokens_with_a_layer_ahead_are_those_without(loaded, checkpoint):
    options = {"page_size": 1, "force_retract_every": 3, "max_retractions": 1000}
    assert tokens_with(loaded, checkpoint, **options) == tokens_with(loaded, None)


def draft_of(path):
    spec = SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=str(path))
    return read_draft(spec, target=read_model_config(path), target_path=str(path))


def test_memory_of_a_layer_ahead_is_that_of_its_file(checkpoint):
    draft, layers = draft_of(checkpoint), read_model_config(checkpoint).num_layers
    tensors = load_file(checkpoint / "model.safetensors")
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    mine = [
        tensor
        for name, tensor in tensors.items()
        if name.startswith((f"model.layers.{layers}.", "mtp.")) and not name.endswith(copies)
    ]
    assert draft is not None
    expected = sum(tensor.nbytes for tensor in mine)
    assert draft.weight_bytes(torch.float32, target_path=str(checkpoint), target_is_whole=True) == expected


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3.5"])
def test_model_without_a_layer_ahead_is_no_draft_head(family, tmp_path):
    path = write_tiny_checkpoint(family, tmp_path)
    with pytest.raises(CheckpointError, match="has no layer that predicts ahead"):
        draft_of(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("hnorm.weight", r"lacks tensor model\.layers\.0\.hnorm\.weight"), (None, "'model.layers.0.more.weight' is no")],
)
def test_tensors_are_those_of_a_layer_ahead(name, message, tmp_path):
    path = add_mtp_layer(write_tiny_checkpoint("glm4-moe", tmp_path))
    tensors = load_file(path / "model.safetensors")
    if name is None:
        tensors["model.layers.3.more.weight"] = torch.zeros(1)
    else:
        del tensors[f"model.layers.3.{name}"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        draft_of(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mtp_num_hidden_layers", 2, "mtp_num_hidden_layers must be 1 for the layer to draft.*got 2"),
        ("num_nextn_predict_layers", 3, "num_nextn_predict_layers must be 1"),
        ("mtp_use_dedicated_embeddings", True, "mtp_use_dedicated_embeddings must be false"),
    ],
)
def test_mtp_layer_of_another_kind_is_rejected_by_its_field(field, value, message, tmp_path):
    path = add_mtp_layer(write_tiny_checkpoint("qwen3-next", tmp_path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError, match=message):
        draft_of(path)


def test_unknown_tensor_of_mtp_layer_is_rejected_by_name(tmp_path):
    path = add_mtp_layer(write_tiny_checkpoint("qwen3.5", tmp_path))
    tensors = load_file(path / "model.safetensors") | {"mtp.embed_tokens_scale.weight": torch.zeros(1)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed_tokens_scale\.weight' is no part of a draft head"):
        draft_of(path)


def test_layer_ahead_of_another_model_is_refused(checkpoint, tmp_path):
    """Another folder is a head, not a checkpoint with more than a layer."""
    target = read_model_config(checkpoint)
    spec = SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=str(checkpoint))
    with pytest.raises(CheckpointError, match="a model of [34] layers"):
        read_draft(spec, target=target, target_path=str(tmp_path))


def rewritten(checkpoint, path, tensors, **config):
    """A copy of `checkpoint` at `path` with other `tensors`, and with more fields in its config.json."""
    shutil.copytree(checkpoint, path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    return path


@pytest.mark.parametrize("kind", ["fp8", "awq"])
def test_quantized_mtp_layer_equals_dequantized_one(kind, checkpoint, tmp_path):
    """The projections of all layers are quantized. `eh_proj` is one of those names, and may be plain or not."""
    write, scheme = KINDS[kind]
    held, worths = {}, {}
    for number, (name, tensor) in enumerate(load_file(checkpoint / "model.safetensors").items()):
        if name.endswith("_proj.weight"):
            quantized = write(tensor, number)
            worths[name] = quantized.worth
            held |= {name.removesuffix("weight") + suffix: part for suffix, part in quantized.parts.items()}
        else:
            held[name] = worths[name] = tensor
    paths = [
        rewritten(checkpoint, tmp_path / "quantized", held, quantization_config=scheme),
        rewritten(checkpoint, tmp_path / "worth", worths),
    ]
    size = read_model_config(checkpoint).hidden_size
    dice = torch.Generator().manual_seed(3)
    embedded, before = (torch.randn(4, size, generator=dice) for _ in range(2))
    states = []
    for path in paths:
        draft = draft_of(path)
        assert draft is not None
        facts, target = draft.config, read_model_config(path)
        width = facts.head_dim if facts.latent is None else facts.latent.rank
        head = load_mtp(str(path), target, facts, dtype=torch.float32, device="cpu", positions=8)
        attend = partial(_queries, width=width)
        states.append(head.forward(embedded, before, torch.arange(4), attend, torch.arange(4)))
    assert torch.equal(*states)


def _queries(layer, q, k, v, *, width):
    return q[..., :width].flatten(1)
