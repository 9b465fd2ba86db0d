"""Draws of models that take images, whose text part is served."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tandem_testing.random_models import dense, experts
from tandem_testing.random_models.sizes import head_size
from tandem_testing.tiny_checkpoints import TOWER_MODELS, TinyModel

Draw = Callable[[Random], TinyModel]


def _sections(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose sections divide the pairs of dimensions that rotate."""
    kept = {name: value for name, value in fields["rope_parameters"].items() if name == "partial_rotary_factor"}
    part = kept.get("partial_rotary_factor", 1.0)
    pairs = int(head_size(dict(fields)) * part) // 2
    first = pairs - 2 * (pairs // 3)
    sections = [first, pairs // 3, pairs // 3]
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, "mrope_interleaved": True, **kept}


def tower(like: str, text: Draw, *, sections: bool = False, without: tuple[str, ...] = (), **more: Any) -> Draw:
    """Draws text parts by `text`, inside the model of `TOWER_MODELS` named `like`."""
    outer = TOWER_MODELS[like]

    def draw(rng: Random) -> TinyModel:
        fields = {name: value for name, value in text(rng).fields.items() if name not in without} | more
        if sections:
            fields["rope_parameters"] = _sections(fields)
            if like.startswith("qwen2"):
                fields["rope_parameters"].pop("mrope_interleaved")
        vision = dict(outer.vision or {})
        if "out_hidden_size" in vision:
            vision["out_hidden_size"] = fields["hidden_size"]
        return TinyModel(config_class=outer.config_class, fields=fields, vision=vision)

    return draw


SLIDING = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

TOWERS = {
    "gemma3-tower": tower("gemma3-tower", dense.gemma3, without=("final_logit_softcapping",)),
    "gemma4-tower": tower("gemma4-tower", dense.gemma4),
    "llama4-tower": tower("llama4-tower", experts.llama4),
    "mistral3-tower": tower("mistral3-tower", dense.ministral3, model_type="ministral3"),
    # transformers derives the size of its heads in one place and reads it in another.
    "qwen2-tower": tower("qwen2-tower", dense.qwen2, sections=True, without=("head_dim",)),
    "qwen3-tower": tower("qwen3-tower", dense.qwen3, sections=True, without=SLIDING),
    "qwen3.5-tower": tower("qwen3.5-tower", experts.qwen3_5, sections=True),
    "qwen3.5-moe-tower": tower("qwen3.5-moe-tower", experts.qwen3_5_moe, sections=True),
}
