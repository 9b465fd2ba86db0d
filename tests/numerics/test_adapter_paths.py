"""Engines answer the model alone and two adapters in one batch as transformers does, on paths of `tandem verify`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import AdapterConfig, EngineConfig
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_lab.verify.paths import DraftPaths, make_paths, on_ranks
from tandem_lab.verify.reference import PromptSet, References, TransformersReference, generate_references, make_prompts
from tandem_lab.verify.verification import Verification
from tandem_testing.adapters import ATTENTION, SEVEN, STATES, write_adapter
from tandem_testing.exactness import (
    CACHED,
    CHUNKED,
    DISAGGREGATED,
    MIXED,
    MOVED,
    RETRACTED,
    SHARED,
    one_grammar_process,
)
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

TOKENS = 12
FAMILIES = ["qwen3", "mixtral", *STATES]
PATHS = [CHUNKED, MIXED, CACHED, RETRACTED, DISAGGREGATED, MOVED, SHARED, "n-gram drafts"]
WHY = "another family takes this path, and qwen3 takes all of them"


def loaded(checkpoint: Path, **folders: Path) -> LoadedModel:
    config = EngineConfig(model_path=str(checkpoint), dtype="float32", adapters=AdapterConfig.of(folders))
    return load(config, progress=False)


def references_of(model: LoadedModel) -> References:
    prompts = make_prompts(model.config.model_path, model.model_config.vocab_size, quick=True).prompts[2::2]
    reference = TransformersReference(model.config.model_path)
    return generate_references(reference, model, PromptSet(prompts=prompts, max_tokens=TOKENS), progress=False)


@pytest.fixture(scope="module")
def verification(request, tmp_path_factory) -> Iterator[Verification]:
    folder, family = tmp_path_factory.mktemp("paths"), request.param
    checkpoint = write_tiny_checkpoint(family, folder / "model")
    # Without blocks that are no experts; experts that are chosen by what an adapter adds make more of rounding.
    sparse = family in ("mixtral", "qwen3.5-moe")
    states, own, strength = STATES.get(family, ()), ATTENTION if sparse else SEVEN, 0.2 if sparse else 0.5
    one = write_adapter(folder / "one", checkpoint, seed=1, modules=(*own, *states), strength=0.2)
    modules = ["q_proj", own[-1], *states[:1]]
    two = write_adapter(folder / "two", checkpoint, seed=2, modules=modules, rank=1, strength=strength)
    with one_grammar_process():
        model = loaded(checkpoint, one=one, two=two)
        made = references_of(model)
        yield Verification(model=model, references=made.outputs, max_tokens=TOKENS, edited=made.edited)


def cases() -> Iterator[Any]:
    """Family and path: all of one family, and half of each of the others."""
    for place, family in enumerate(FAMILIES):
        for number, name in enumerate(PATHS):
            taken = place == 0 or number % 2 == place % 2
            yield pytest.param(family, name, marks=[] if taken else pytest.mark.long(WHY))


@pytest.mark.parametrize(("verification", "name"), cases(), indirect=["verification"], scope="module")
def test_adapters_and_base_equal_transformers(verification: Verification, name: str) -> None:
    longest = max(len(each.prompt) for each in verification.references) + TOKENS
    paths = make_paths(
        context_length=longest + 1,
        longest=longest,
        num_prompts=len(verification.references),
        quick=True,
        drafts=DraftPaths(itself=verification.model.config.model_path),
    )
    [path] = [path for path in [*paths, *on_ranks(paths, 2, quick=True)] if path.name == name]
    assert {each.adapter and each.adapter.name for each in verification.references} == {None, "one", "two"}
    result = verification.run(path)
    assert (result.difference, result.not_exercised) == (None, None)


def test_adapter_without_effect_is_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint("qwen3", tmp_path / "model")
    with one_grammar_process():
        model = loaded(checkpoint, idle=write_adapter(tmp_path / "idle", checkpoint, strength=0.0))
        with pytest.raises(ConfigError, match="--adapter idle changes none of the outputs"):
            references_of(model)
