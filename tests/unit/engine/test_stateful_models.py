"""Engines of models whose layers keep states: what they refuse, and how memory is divided."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.config import (
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    HostConfig,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
)
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stateful_models import unsupported
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.speculative.assembly import read_draft
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PLAIN = EngineConfig(model_path="", disagg=DisaggConfig(transport="none"))
SCHEDULER = SchedulerConfig(context_length=128, max_running_requests=4, audit_every_step=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    checkpoint = write_tiny_checkpoint("qwen3.5", tmp_path_factory.mktemp("hybrid"))
    return load(replace(PLAIN, model_path=str(checkpoint), dtype="float32"), progress=False)


def engine(loaded: LoadedModel, **cache: Any) -> Engine:
    return Engine.build(loaded, replace(loaded.config, scheduler=SCHEDULER, cache=CacheConfig(**cache)))


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (replace(PLAIN, cache=CacheConfig(host=HostConfig(enable_cache=True))), "--enable-hierarchical-cache"),
        (replace(PLAIN, cache=CacheConfig(host=HostConfig(swap_bytes=1 << 20))), "--swap-space"),
        (replace(PLAIN, speculative=SpecConfig(algorithm=SpecAlgorithm.NGRAM)), "--speculative-algorithm NGRAM"),
    ],
)
def test_what_continues_from_pages_alone_is_refused(hybrid, config, flag):
    with pytest.raises(ConfigError, match=f"qwen3_5_text: its layers keep states, .*{flag}"):
        load(replace(config, model_path=hybrid.config.model_path), progress=False)


def test_peers_are_refused_before_weights_are_read(hybrid):
    with pytest.raises(ConfigError, match="--transport none"):
        load(hybrid.config, progress=False, has_peers=True)


def test_a_model_without_states_refuses_nothing(hybrid):
    dense = replace(hybrid.model_config, delta=None)
    config = replace(PLAIN, cache=CacheConfig(host=HostConfig(swap_bytes=1 << 20)))
    assert unsupported(dense, config, has_peers=True) is None


def test_a_draft_with_states_is_refused_by_its_family(hybrid):
    config = SpecConfig(algorithm=SpecAlgorithm.DRAFT, draft_model_path=hybrid.config.model_path)
    with pytest.raises(CheckpointError, match="is a qwen3_5_text, whose layers keep states"):
        read_draft(config, target=hybrid.model_config, target_path=hybrid.config.model_path)


def test_each_request_that_may_run_has_a_state(hybrid):
    with engine(hybrid, num_pages=40) as built:
        assert built.memory.rows.max_rows == 8
        assert built.memory.allocator.num_pages == 40
        assert built.geometry.num_layers == 1


def test_memory_by_size_is_divided_into_pages_and_states(hybrid):
    size = 2 << 20
    with engine(hybrid, kv_cache_bytes=size) as built:
        pools = built._parts.pools
        assert pools.states is not None
        used = pools.first.total_bytes + pools.states.total_bytes
        assert size - pools.first.page_bytes < used <= size
        assert (pools.states.rows, len(pools.states.anchor_slots)) == (8, 8)


def test_short_memory_lets_fewer_requests_run_and_all_finish(hybrid, caplog):
    with engine(hybrid, kv_cache_bytes=180_000) as built:
        assert 1 <= built.memory.rows.max_rows < SCHEDULER.max_running_requests
        requests = [
            GenerateRequest(rid=f"r{n}", input_ids=(n, n + 1, n + 2), sampling=SamplingParams(max_tokens=5))
            for n in range(6)
        ]
        assert [len(each.token_ids) for each in built.generate(requests)] == [5] * 6
    assert "requests run at once, not 4" in caplog.text


def test_memory_below_one_request_is_refused_with_its_need(hybrid):
    with pytest.raises(ConfigError, match="one request needs .* GiB for KV pages and states"):
        engine(hybrid, kv_cache_bytes=40_000)


def test_a_prompt_seen_before_continues_at_its_anchor(hybrid):
    with engine(hybrid, num_pages=40) as built:
        [first], [again] = (built.generate([request(rid, range(100))]) for rid in ("a", "b"))
        assert (first.cached_tokens, again.cached_tokens) == (0, 64)
        assert first.token_ids == again.token_ids


def test_the_next_turn_computes_at_most_two_grains(hybrid):
    scheduler = replace(SCHEDULER, context_length=400)
    with Engine.build(hybrid, replace(hybrid.config, scheduler=scheduler, cache=CacheConfig(num_pages=80))) as built:
        [first] = built.generate([request("a", range(150), max_tokens=60)])
        turn = [*range(150), *first.token_ids, *range(30)]
        [second] = built.generate([request("b", turn)])
        assert second.cached_tokens >= len(turn) - 128
    with Engine.build(hybrid, replace(hybrid.config, scheduler=scheduler, cache=CacheConfig(num_pages=80))) as fresh:
        [alone] = fresh.generate([request("b", turn)])
        assert (alone.cached_tokens, alone.token_ids) == (0, second.token_ids)


def test_without_a_prefix_cache_there_are_no_anchors(hybrid):
    with engine(hybrid, num_pages=40, enable_prefix_cache=False) as built:
        pools = built._parts.pools
        assert pools.states is not None
        assert (pools.states.rows, len(pools.states.anchor_slots), built.memory.anchors) == (8, 0, None)
        outputs = [built.generate([request(rid, range(100))])[0] for rid in ("a", "b")]
        assert [each.cached_tokens for each in outputs] == [0, 0]


def test_steps_that_raise_change_no_token(hybrid):
    """A state that a lost step has changed is not the settled one."""
    requests = [request(f"r{n}", range(n, n + 70 + n), max_tokens=8) for n in range(3)]
    with engine(hybrid, num_pages=60) as built:
        expected = [each.token_ids for each in built.generate(requests)]
    scheduler = replace(SCHEDULER, force_fault_every=7)
    config = replace(hybrid.config, scheduler=scheduler, cache=CacheConfig(num_pages=60))
    with Engine.build(hybrid, config) as faulty:
        assert [each.token_ids for each in faulty.generate(requests)] == expected
        assert faulty.scheduler.stats().engine_errors_total > 0


def request(rid: str, tokens: Sequence[int], *, max_tokens: int = 2) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=tuple(tokens), sampling=SamplingParams(max_tokens=max_tokens))
