"""EAGLE-3 heads and layers ahead with adapters and grammars: outputs are those without drafts."""

from pathlib import Path

import pytest
import torch

from tandem_engine.config import AdapterConfig, EngineConfig
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_testing.adapters import ATTENTION, SEVEN, write_adapter
from tandem_testing.draft_heads import SHARED, add_mtp_layer, request, tokens_with
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_eagle3

EAGLE3 = "qwen3"
LAYERS_AHEAD = ("deepseek-v3", "glm4-moe", "glm4-moe-lite", "qwen3-next", "qwen3.5", "qwen3.5-moe")
WITHOUT_ADAPTERS = ("deepseek-v3", "glm4-moe-lite")
"""Models with latents: their adapters are refused."""
WORDS = GrammarSpec(kind=GrammarKind.REGEX, source="[a-e]{3}( [a-e]{2,5}){2,9}")


@pytest.fixture(scope="module", params=[EAGLE3, *LAYERS_AHEAD])
def drafting(request, tmp_path_factory) -> tuple[LoadedModel, Path]:
    """A model, with an adapter if it may have one, and the folder of its head."""
    torch.set_num_threads(1)
    folder, family = tmp_path_factory.mktemp(request.param), request.param
    checkpoint = write_tiny_checkpoint(family, folder / "model")
    adapters = AdapterConfig()
    if family not in WITHOUT_ADAPTERS:
        modules = SEVEN if family == EAGLE3 else ATTENTION
        adapters = AdapterConfig.of({"other": write_adapter(folder / "adapter", checkpoint, modules=modules)})
    if family == EAGLE3:
        head = write_tiny_eagle3(checkpoint, folder / "head", layers=(0, 1, 2))
    else:
        head = add_mtp_layer(checkpoint)
    config = EngineConfig(model_path=str(checkpoint), dtype="float32", adapters=adapters)
    return load(config, progress=False), head


def test_constrained_and_adapted_tokens_with_a_head_are_the_same(drafting):
    """Requests of the model, of its adapter, and under a grammar are in the same steps."""
    loaded, head = drafting
    adapter = loaded.adapters.names.get("other")
    requests = [
        request("plain", SHARED),
        request("words", [*SHARED, 1], grammar=WORDS, ignore_eos=False),
        request("adapted", SHARED, adapter=adapter),
        request("adapted words", SHARED[3:], adapter=adapter, grammar=WORDS, ignore_eos=False),
    ]
    options = {"page_size": 1, "force_retract_every": 5, "max_retractions": 1000}
    without = tokens_with(loaded, None, requests=requests)
    assert tokens_with(loaded, head, requests=requests, **options) == without
    plain, words, adapted, adapted_words = without
    assert (plain != adapted) is (adapter is not None)
    assert all(97 <= token <= 101 or token in (32, 256, 258) for token in (*words, *adapted_words))
