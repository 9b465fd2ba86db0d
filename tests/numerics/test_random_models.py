"""Random models of every family: sizes and options that no other test has. `make random-models` draws many more."""

import pytest

from tandem_engine.model.families.registry import FAMILIES
from tandem_testing.mutated_configs.comparison import Outcome
from tandem_testing.random_models.draws import DRAWS, NATIVE, draw
from tandem_testing.random_models.run import by_paths, compared
from tandem_testing.random_models.through_transformers import PLAIN, WITH_STATES
from tandem_testing.random_models.towers import TOWERS
from tandem_testing.tiny_checkpoints import FALLBACK_MODELS, STATEFUL_MODELS, TOWER_MODELS, write_checkpoint

COMPILED = ("llama", "mistral", "phi3", "seed_oss", "ernie4_5", "qwen2", "qwen2-tower", "qwen3", "qwen3-tower")
"""Steps of these are compiled for the sizes of each model, which takes longer than all others together."""
ON_ENGINES = (("gpt_oss", 3), ("qwen3_next", 0))
"""Draws that take paths of `tandem verify`: with windows, and with states. A path takes a second of CPU."""


@pytest.mark.parametrize("family", [family for family in DRAWS if family not in COMPILED])
def test_random_models_give_the_logits_of_transformers(family):
    results = dict(compared([family], [1]))
    assert {name: (result.outcome, result.detail) for name, result in results.items()} == {
        f"{family}#1": (Outcome.EQUAL, "")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), ON_ENGINES, ids=[family for family, _ in ON_ENGINES])
def test_random_models_give_the_tokens_of_transformers(family, seed, tmp_path):
    result = by_paths(write_checkpoint(draw(family, seed), tmp_path, seed=seed))
    assert (result.outcome, result.detail) == (Outcome.EQUAL, "")


def test_every_family_of_the_table_is_drawn():
    assert set(NATIVE) == {family.name for family in FAMILIES}
    assert (set(TOWERS), set(PLAIN), set(WITH_STATES)) == (
        set(TOWER_MODELS),
        set(FALLBACK_MODELS),
        set(STATEFUL_MODELS),
    )


def test_draw_is_the_same_for_the_same_seed():
    first, again, other = (draw("gpt_oss", seed) for seed in (5, 5, 6))
    assert first == again != other
