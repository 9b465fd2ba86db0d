"""Engines of a random model of each kind of memory, whose requests are handed over, moved, swapped and aborted."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.exactness import one_grammar_process
from tandem_testing.random_models.draws import draw
from tandem_testing.random_models.forms import MXFP4, fits_mxfp4, write_draw
from tandem_testing.random_walks import calm, differences, walked

Fields = Mapping[str, Any]
REQUESTS = 18


def short_window(fields: Fields) -> bool:
    return 3 <= fields["sliding_window"] <= 70 and len(set(fields.get("layer_types", ()))) == 2


KINDS: dict[str, tuple[str, Callable[[Fields], bool]]] = {
    "dense": ("granite", lambda fields: fields["num_hidden_layers"] > 1),
    "windows": ("gemma3_text", short_window),
    "chunks": ("llama4_text", lambda fields: 5 <= fields["attention_chunk_size"] <= 100),
    "latents": ("deepseek_v3", lambda fields: fields["num_hidden_layers"] > 1),
    "states": ("qwen3_next", lambda fields: len(set(fields.get("layer_types", ()))) == 2),
    "readers": ("gemma4_text", lambda fields: fields["num_kv_shared_layers"] > 0 and short_window(fields)),
    "sinks": ("gpt_oss", lambda fields: fits_mxfp4(fields) and short_window(fields)),
    "states by transformers": ("falcon-h1", lambda fields: fields["num_hidden_layers"] > 1),
}
"""A family, and what of its draws has that kind of memory."""


FREED = ("windows", "chunks", "readers", "sinks")
"""Kinds whose pages are freed behind a window, in engines without peers and host memory."""
WALKS = [*((kind, True) for kind in KINDS), *((kind, False) for kind in FREED)]


@pytest.fixture(scope="module")
def loaded(request, tmp_path_factory) -> LoadedModel:
    torch.set_num_threads(1)
    family, wanted = KINDS[request.param]
    seed = next(seed for seed in range(1000) if wanted(draw(family, seed).fields))
    written = write_draw(family, seed, tmp_path_factory.mktemp("model"))
    assert (written.form == MXFP4) is (request.param == "sinks")
    return load(EngineConfig(model_path=str(written.checkpoint), dtype="float32"), progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loaded", "paired"),
    WALKS,
    indirect=["loaded"],
    ids=[f"{kind}, {'two engines' if paired else 'one engine'}" for kind, paired in WALKS],
)
def test_random_walk_changes_no_token(loaded, paired, tmp_path):
    with one_grammar_process():
        with walked(loaded, Random(f"{paired} 1"), requests=REQUESTS, paired=paired) as walk:
            problems = [problem for engine in walk.engines for problem in engine.audit().problems]
            assert problems == []
            assert all(engine.audit().held == 0 for engine in walk.engines)
            assert (walk.moved > 0) is paired
            assert any(engine.scheduler.stats().retracted_total for engine in walk.engines)
        assert differences(loaded, walk, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("loaded", ["states"], indirect=True)
def test_wrong_tokens_and_logprobs_are_no_roundings(loaded, tmp_path):
    """The model has experts, so a tie of two of them would be left out."""
    message = GenerateRequest(rid="r", input_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=4, logprobs=0))
    with Engine.build(loaded, calm(loaded.config)) as engine:
        right = engine.generate([message])[0]
    other = (right.token_ids[3] + 1) % loaded.model_config.vocab_size
    far = msgspec.structs.replace(right.logprobs[2], logprob=right.logprobs[2].logprob - 0.01)
    wrong = (
        replace(right, token_ids=(*right.token_ids[:3], other)),
        replace(right, token_ids=right.token_ids[:3]),
        replace(right, logprobs=(*right.logprobs[:2], far, right.logprobs[3])),
    )
    walk = SimpleNamespace(ended=[(message, got, False) for got in (right, *wrong)])
    assert len(differences(loaded, walk, tmp_path)) == len(wrong)
