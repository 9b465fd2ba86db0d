"""Random models of every family: sizes and options that no other test has. `make random-models` draws many more."""

import pytest
import transformers

from tandem_engine.model.families.registry import FAMILIES
from tandem_engine.model.known_fields import IDENTITY, NO_EFFECT, ONE_VALUE
from tandem_engine.model.tensor_aliases import ALIASES
from tandem_testing.each_case import check_each
from tandem_testing.mutated_configs.comparison import Outcome
from tandem_testing.random_models.draws import DRAWS, NATIVE, draw
from tandem_testing.random_models.forms import PREDICT_AHEAD, write_draw
from tandem_testing.random_models.run import by_paths, compared
from tandem_testing.random_models.through_transformers import PLAIN, WITH_STATES
from tandem_testing.random_models.towers import TOWERS
from tandem_testing.tiny_checkpoints import FALLBACK_MODELS, STATEFUL_MODELS, TOWER_MODELS, config_of

COMPILED = ("llama", "mistral", "phi3", "seed_oss", "ernie4_5", "qwen2", "qwen2-tower", "qwen3", "qwen3-tower")
"""Steps of these are compiled for the sizes of each model, which takes longer than all others together."""
ON_ENGINES = (("gpt_oss", 3), ("qwen3_next", 0))
"""Draws that take paths of `tandem verify`: with windows, and with states. A path takes a second of CPU."""


@pytest.mark.parametrize("family", [family for family in DRAWS if family not in COMPILED])
def test_random_models_give_the_logits_of_transformers(family):
    ((name, _form, result),) = compared([family], [1])
    assert (name, result.outcome, result.detail) == (f"{family}#1", Outcome.EQUAL, "")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), ON_ENGINES, ids=[family for family, _ in ON_ENGINES])
def test_random_models_give_the_tokens_of_transformers(family, seed, tmp_path):
    result = by_paths(write_draw(family, seed, tmp_path))
    assert (result.outcome, result.detail) == (Outcome.EQUAL, "")


def test_every_family_of_the_table_is_drawn():
    assert set(NATIVE) == {family.name for family in FAMILIES}
    assert (set(TOWERS), set(PLAIN), set(WITH_STATES)) == (
        set(TOWER_MODELS),
        set(FALLBACK_MODELS),
        set(STATEFUL_MODELS),
    )


SAME_IN_ALL = {
    # By the spelling of config.json (`random_models.spelling`).
    "dtype",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
    # A context longer than prompts, and activations of which families have one.
    "hidden_act",
    "hidden_activation",
    "max_position_embeddings",
    # What transformers writes itself, or takes for another field.
    "per_layer_config",
    "rotary_dim",
}
"""Fields with one value in all draws."""
REFUSED_OTHERWISE = {
    "mistral": {"layer_types"},
    "mixtral": {"layer_types", "num_experts"},
    "gemma2": {"use_bidirectional_attention"},
    "gemma3_text": {"attn_logit_softcapping", "use_bidirectional_attention"},
    "gpt_oss": {"num_experts"},
    "qwen3_moe": {"layer_types", "num_local_experts"},
    "cohere2": {"rms_norm_eps"},
    "deepseek_v2": {"head_dim"},
    "deepseek_v3": {"head_dim"},
    "glm4_moe_lite": {"first_k_dense_replace", "head_dim"},
    # With a smaller epsilon the two forms of the rule differ by more than roundings (`tiny_checkpoints`).
    "qwen3_next": {"rms_norm_eps"},
    "qwen3_5_text": {"rms_norm_eps"},
    "qwen3_5_moe_text": {"rms_norm_eps"},
}
"""Fields of a family that must agree with others, have one value, or are other names of a field."""


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_fields_that_a_family_reads_differ_between_draws(family):
    drawn = [draw(family.name, seed).fields for seed in range(80)]
    values = {name: {repr(fields.get(name)) for fields in drawn} for name in family.fields.implemented}
    same = {name for name, found in values.items() if len(found) == 1}
    assert same - SAME_IN_ALL == REFUSED_OTHERWISE.get(family.name, set())


OF_THE_CLASS = {"attribute_map", "sub_configs", "keys_to_ignore_at_inference", "base_config_key"}
"""Annotations of config classes that are no fields of config.json."""


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_fields_of_transformers_are_known_to_the_family(family):
    config_class = getattr(transformers, draw(family.name, 0).config_class)
    annotated = {name for kind in config_class.__mro__ for name in vars(kind).get("__annotations__", {})}
    own = annotated - set(transformers.PreTrainedConfig.__annotations__) - OF_THE_CLASS
    fields = family.fields
    known = fields.implemented | fields.no_effect | set(fields.one_value) | NO_EFFECT | IDENTITY | set(ONE_VALUE)
    assert {name for name in own - known if not name.startswith("_") and not name.endswith("_plan")} == set()
    assert len(own) > 8


def test_layers_ahead_are_drawn_where_families_have_them():
    assert set(PREDICT_AHEAD) == {name for name, aliases in ALIASES.items() if aliases.can_predict_ahead}


def test_transformers_accepts_the_config_of_every_draw():
    draws = [(family, seed) for family in DRAWS for seed in range(8)]
    check_each(draws, lambda pair: config_of(draw(*pair)), name=lambda pair: f"{pair[0]}#{pair[1]}")


def test_draw_is_the_same_for_the_same_seed():
    first, again, other = (draw("gpt_oss", seed) for seed in (5, 5, 6))
    assert first == again != other
