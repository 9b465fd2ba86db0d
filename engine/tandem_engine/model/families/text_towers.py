"""The text part of checkpoints of models that take images too, read as a model of a family that is served.

Such a config.json has the fields of the text part in `text_config` (of the first Qwen2.5-VL at the top), those of the
image part in others. Prompts are text alone, for which the image part computes nothing: its weights are skipped by
their names, and an image in a request is rejected by the gateway. All tokens of a text have the same position in each
of the three sections of an `mrope` rotation, which is then an ordinary one.

The outer object is a closed world too (`known_fields`): a field that is not known to concern images alone is not
overlooked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.families.registry import FAMILIES
from tandem_engine.model.known_fields import NO_EFFECT

TEXT = "text_config"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """A model with a text part, and how to read that part."""

    name: str
    """As in `model_type` of config.json."""
    architecture: str
    """As in `architectures` of config.json."""
    texts: Mapping[str, str]
    """`model_type` of the text part, to our family."""
    image_fields: frozenset[str]
    """Outer fields without an effect on text."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What absent fields of the text part stand for, where the family has no default."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Fields of the text part that a family reads and this model does not: their only values."""
    ties: bool = False
    """Whether an absent `tie_word_embeddings` means true."""
    flat: bool = False
    """Whether the fields of the text part may stand at the top, without `text_config`."""
    sections: bool = False
    """Whether the rotation has sections for time, height and width (mrope)."""


_QWEN_IMAGES = frozenset(
    {
        "image_token_id",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    }
)

TOWERS = (
    Tower(
        name="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        texts={"gemma3_text": "gemma3_text"},
        image_fields=frozenset(
            {"boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config"}
        ),
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "vocab_size": 262_208,
        },
        only={"final_logit_softcapping": (None,)},
        ties=True,
    ),
    Tower(
        name="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        texts={"gemma4_text": "gemma4_text"},
        image_fields=frozenset(
            {
                "audio_config",
                "audio_token_id",
                "boa_token_id",
                "boi_token_id",
                "eoa_token_id",
                "eoa_token_index",
                "eoi_token_id",
                "image_token_id",
                "video_token_id",
                "vision_config",
                "vision_soft_tokens_per_image",
            }
        ),
        ties=True,
    ),
    Tower(
        name="llama4",
        architecture="Llama4ForConditionalGeneration",
        texts={"llama4_text": "llama4_text"},
        image_fields=frozenset({"boi_token_index", "eoi_token_index", "image_token_index", "vision_config"}),
    ),
    Tower(
        name="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        texts={"mistral": "mistral", "ministral3": "ministral3"},
        image_fields=frozenset(
            {
                "image_token_index",
                "multimodal_projector_bias",
                "projector_hidden_act",
                "spatial_merge_size",
                "vision_config",
                "vision_feature_layer",
            }
        ),
        ties=True,
    ),
    Tower(
        name="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        texts={"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"},
        image_fields=_QWEN_IMAGES,
        defaults={"max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        flat=True,
        sections=True,
    ),
    Tower(
        name="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        texts={"qwen3_vl_text": "qwen3"},
        image_fields=_QWEN_IMAGES,
        defaults={"rope_theta": 500_000.0},
        only={"use_sliding_window": (False, None), "sliding_window": (None,), "layer_types": (None,)},
        sections=True,
    ),
    Tower(
        name="qwen3_5",
        architecture="Qwen3_5ForConditionalGeneration",
        texts={"qwen3_5_text": "qwen3_5_text"},
        image_fields=_QWEN_IMAGES,
        sections=True,
    ),
    Tower(
        name="qwen3_5_moe",
        architecture="Qwen3_5MoeForConditionalGeneration",
        texts={"qwen3_5_moe_text": "qwen3_5_moe_text"},
        image_fields=_QWEN_IMAGES,
        sections=True,
    ),
)

_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
"""Outer fields that are about the text part where it does not have them itself."""

IMAGE_WEIGHTS = (
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.multi_modal_projector.",
    "model.vision_tower.",
    "model.visual.",
    "multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "visual.",
)
"""Beginnings of the names of tensors that no text needs."""

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def tower_of(config: ConfigFields) -> Tower | None:
    """The one that `architectures` names."""
    architectures = config.items("architectures")
    return next((tower for tower in TOWERS if tower.architecture in architectures), None)


def text_part(config: ConfigFields) -> ConfigFields:
    """The fields of the text part, as a family reads them; `config` itself where it is not a model of `TOWERS`.

    Raises:
        UnsupportedVariantError: a field may have an effect on text, or the text part is of another family.
        CheckpointError: a field has the wrong type.
    """
    tower = tower_of(config)
    if tower is None:
        return config
    if config.values.get("model_type", tower.name) != tower.name:
        config.refuse("model_type", f"must be {tower.name}, as architectures names {tower.architecture}")
    inner = _inner(config, tower)
    kind = inner.values.get("model_type", next(iter(tower.texts)))
    family = next((family for family in FAMILIES if family.name == tower.texts.get(str(kind))), None)
    if family is None:
        inner.defer("model_type", f"must be one of {', '.join(tower.texts)}, whose text part is served")
    _require_values(inner, tower)
    given = {name: value for name, value in inner.values.items() if name not in tower.only}
    shared = {name: config.values[name] for name in _SHARED if name in config.values and not inner.has(name)}
    values = {
        **tower.defaults,
        **given,
        **shared,
        "tie_word_embeddings": _ties(config, inner, tower),
        "architectures": [family.architecture],
        "model_type": family.name,
    }
    return replace(inner, values=_without_sections(values) if tower.sections else values)


def _inner(config: ConfigFields, tower: Tower) -> ConfigFields:
    """The text part, of an outer object that has nothing else with an effect on it."""
    if tower.flat and not config.has(TEXT):
        values = {name: value for name, value in config.values.items() if name not in tower.image_fields}
        return replace(config, values=values)
    known = tower.image_fields | NO_EFFECT | {*_SHARED, TEXT, "architectures", "model_type", "tie_word_embeddings"}
    for name, value in config.values.items():
        if name not in known and value is not None:
            config.defer(name, "is a field that is not known to have no effect on the text part of this model")
    inner = config.inner(TEXT)
    values = {name: value for name, value in inner.values.items() if name not in tower.image_fields}
    return replace(inner, values=values)


def _require_values(inner: ConfigFields, tower: Tower) -> None:
    for name, allowed in tower.only.items():
        if name in inner.values and inner.values[name] not in allowed:
            inner.defer(name, "has no effect that is known on the text part of this model")


def _ties(config: ConfigFields, inner: ConfigFields, tower: Tower) -> bool:
    """The outer field counts; a true one of the text part does where the outer one is false."""
    outer = config.flag("tie_word_embeddings", default=tower.ties)
    return outer or inner.flag("tie_word_embeddings", default=False)


def _without_sections(values: dict[str, object]) -> dict[str, object]:
    """With an ordinary rotation for one in sections, if there is one."""
    result = dict(values)
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        if isinstance(rope, dict):
            plain = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
            kinds = {key: "default" for key in ("rope_type", "type") if plain.get(key) == "mrope"}
            result[name] = {**plain, **kinds}
    return result


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Those of the text part of a model of `TOWERS`, under the names of a model that is nothing else."""
    return {_text_name(name): tensor for name, tensor in tensors.items() if not name.startswith(IMAGE_WEIGHTS)}


def _text_name(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
