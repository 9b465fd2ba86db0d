"""Models with states: what requests of all kinds get is the same with anchors, faults and retractions as without."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem_engine.config import (
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    HostConfig,
    PreemptionMode,
    SchedulerConfig,
)
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.requests import GenerateRequest, Pooling, PoolingParams, SessionRef
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.poisoned_states import poisoned_states
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PROMPT = tuple(range(150))
PAGES = CacheConfig(num_pages=120)
PLAIN = SchedulerConfig(context_length=400, max_running_requests=8, audit_every_step=True)
DISTURBED = replace(
    PLAIN,
    chunked_prefill_size=48,
    enable_overlap=True,
    force_fault_every=11,
    force_retract_every=7,
    max_retractions=1000,
)
CLOSE = 2e-4
"""Runs of other lengths differ by roundings."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    path = write_tiny_checkpoint("qwen3-next", tmp_path_factory.mktemp("model"))
    config = EngineConfig(model_path=str(path), dtype="float32", disagg=DisaggConfig(transport="none"))
    return load(config, progress=False)


def request(rid: str, tokens=PROMPT, *, max_tokens: int = 20, **fields) -> GenerateRequest:
    sampling = {name: fields.pop(name) for name in ("prompt_logprobs", "seed", "logprobs") if name in fields}
    return GenerateRequest(
        rid=rid, input_ids=tuple(tokens), sampling=SamplingParams(max_tokens=max_tokens, **sampling), **fields
    )


WAVES = (
    [request("first", max_tokens=70)],
    [
        request("same"),
        request("scored", max_tokens=2, prompt_logprobs=0),
        request("mean", max_tokens=1, pooling=PoolingParams(pooling=Pooling.MEAN)),
        request("last", max_tokens=1, pooling=PoolingParams(pooling=Pooling.LAST)),
        *(request(f"choice {seed}", group="choices", seed=seed, logprobs=0) for seed in range(3)),
        request("turn 0", PROMPT[:90], max_tokens=40, session=SessionRef(id="chat", turn=0)),
    ],
    [
        request("turn 1", range(30), session=SessionRef(id="chat", turn=None)),
        request("branch", (*PROMPT[:100], *range(60))),
    ],
)


def outputs(loaded: LoadedModel, scheduler: SchedulerConfig, cache: CacheConfig) -> dict[str, Generation]:
    with Engine.build(loaded, replace(loaded.config, scheduler=scheduler, cache=cache)) as engine:
        found = {each.rid: each for wave in WAVES for each in engine.generate(wave)}
        stats = engine.scheduler.stats()
        disturbed = scheduler.force_fault_every > 0
        assert (stats.engine_errors_total > 0) is disturbed
        return found


def test_stateful_outputs_are_unchanged_by_anchors_and_faults(model):
    expected = outputs(model, PLAIN, replace(PAGES, enable_prefix_cache=False))
    found = outputs(model, DISTURBED, PAGES)
    assert {each.finish.reason for each in found.values()} == {each.finish.reason for each in expected.values()}
    for rid, each in expected.items():
        assert found[rid].token_ids == each.token_ids, rid
        if each.embedding is not None:
            mine, theirs = (np.frombuffer(part.embedding, "<f4") for part in (found[rid], each))
            assert np.allclose(mine, theirs, atol=CLOSE), rid
    mine, theirs = ([token and token.logprob for token in each["scored"].prompt_logprobs] for each in (found, expected))
    assert len(mine) == len(PROMPT)
    assert np.allclose(mine[1:], theirs[1:], atol=CLOSE)
    assert found["turn 1"].cached_tokens > 0


SWAPPED = replace(
    PLAIN,
    max_running_requests=3,
    enable_overlap=False,
    force_retract_every=2,
    max_retractions=1000,
    preemption_mode=PreemptionMode.SWAP,
)


@pytest.mark.parametrize("cached", [True, False])
def test_swapped_states_return_in_rows_of_other_requests(model, cached):
    """Every row has NaN when it is given out, so a state that does not come back shows."""
    asked = [request(f"r{n}", range(n, 90 + 9 * n), max_tokens=24) for n in range(6)]
    plain = replace(model.config, scheduler=PLAIN, cache=PAGES)
    with Engine.build(model, plain) as engine:
        expected = [each.token_ids for each in engine.generate(asked)]
    host = HostConfig(swap_bytes=4 << 20)
    cache = replace(PAGES, host=host, enable_prefix_cache=cached)
    with Engine.build(model, replace(plain, scheduler=SWAPPED, cache=cache)) as engine:
        with poisoned_states(engine):
            found = [each.token_ids for each in engine.generate(asked)]
        stats = engine.scheduler.stats()
        assert engine.audit().problems == ()
    assert found == expected
    assert stats.swapped_in_total > 10
    assert stats.engine_errors_total == 0
