"""Engines of models whose layers keep states: what they refuse, and how memory is divided."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.config import (
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    HostConfig,
    KvCacheDtype,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
    StatePart,
)
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, Served, compat_hash, kv_geometry, load
from tandem_engine.engine.stateful_models import (
    StateShares,
    drafted_bytes,
    require_supported,
    state_shares,
    unsupported,
)
from tandem_engine.memory.group_pools import Demand
from tandem_engine.memory.sizing import MemoryFacts, MemoryPlan
from tandem_engine.memory.state_pool import StatePool, StateSpec
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.parallel.group import Parallel, SingleRank
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


def test_drafts_are_refused_where_transformers_keeps_states(hybrid):
    config = replace(PLAIN, speculative=SpecConfig(algorithm=SpecAlgorithm.NGRAM))
    part = StatePart(layer=0, kind="conv_states", index=0, shape=(4, 3), dtype="float32")
    foreign = replace(hybrid.model_config, delta=None, state_parts=(part,))
    with pytest.raises(ConfigError, match="transformers computes its states, .*--speculative-algorithm NGRAM"):
        require_supported(foreign, config)


def test_models_with_our_own_states_or_none_refuse_nothing(hybrid):
    dense = replace(hybrid.model_config, delta=None)
    drafts = SpecConfig(algorithm=SpecAlgorithm.NGRAM)
    config = replace(PLAIN, cache=CacheConfig(host=HostConfig(swap_bytes=1 << 20)), speculative=drafts)
    assert [unsupported(facts, config) for facts in (dense, hybrid.model_config)] == [None, None]


def test_engines_with_other_states_have_no_common_hash(hybrid):
    own = kv_geometry(hybrid, hybrid.config)
    assert own.states.endswith("float32, 1 of 1 ranks")
    halves = replace(hybrid, parallel=Parallel(forward=replace(SingleRank(), size=2)))
    rounded = replace(hybrid, dtype=torch.bfloat16)
    names = {kv_geometry(each, hybrid.config).states for each in (hybrid, halves, rounded)}
    assert len(names) == 3
    hashes = {
        compat_hash(msgspec.structs.replace(own, states=name), hybrid.model_config.num_kv_heads) for name in names
    }
    assert len(hashes) == 3


def test_numbers_of_ranks_that_divide_states_have_a_common_hash(hybrid):
    halves = replace(hybrid, parallel=Parallel(forward=replace(SingleRank(), size=2)))
    rounded = replace(hybrid, dtype=torch.bfloat16)
    own, half, other = (Served.of(each, hybrid.config).compat_hash for each in (hybrid, halves, rounded))
    assert own == half != other


def test_geometry_without_states_does_not_name_them(hybrid):
    own = msgspec.structs.replace(kv_geometry(hybrid, hybrid.config), states="")
    assert "states" not in msgspec.msgpack.decode(msgspec.msgpack.encode(own))


def test_draft_with_states_is_refused_by_its_family(hybrid):
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


SLOT = StateSpec(layers=1, history=1, channels=64, heads=2, key_size=4, value_size=8, dtype=torch.float32)
PAGE_BYTES, TOTAL = 1024, 1 << 20


def shares(
    *, pages: int, running: int, num_pages: int = 0, context_length: int = 128, spec: StateSpec = SLOT
) -> StateShares:
    """Of a machine with `TOTAL` bytes, in pages of 16 tokens."""
    config = replace(
        PLAIN,
        scheduler=SchedulerConfig(context_length=context_length, max_running_requests=running),
        cache=CacheConfig(num_pages=num_pages),
    )
    facts = MemoryFacts(total=TOTAL, available=TOTAL, used=0, weights=0, activations=None)
    plan = MemoryPlan(facts=facts, pages=pages, page_bytes=PAGE_BYTES, page_size=16)
    return state_shares(plan, spec, Demand(page_size=16, context_length=context_length, chunk=64), config)


def test_drafts_of_models_with_states_take_memory_by_their_bound():
    limits = replace(PLAIN, scheduler=SchedulerConfig(max_running_requests=64))
    drafting = {bound: SpecConfig(algorithm=SpecAlgorithm.NGRAM, disable_by_batch_size=bound) for bound in (0, 8, 100)}
    taken = {bound: drafted_bytes(SLOT, replace(limits, speculative=spec)) for bound, spec in drafting.items()}
    assert taken[0] == taken[100] == 8 * taken[8] > 0
    assert drafted_bytes(SLOT, limits) == drafted_bytes(None, replace(limits, speculative=drafting[0])) == 0


@pytest.mark.parametrize("pages", [1000, 1010, 1019])
def test_number_of_requests_that_an_error_names_fits(pages):
    """Of the smallest ones too, where every request has a spare row."""
    with pytest.raises(ConfigError, match=r"lower it to at most [1-9]") as caught:
        shares(pages=pages, running=64, num_pages=pages)
    fitting = int(re.findall(r"at most (\d+)", str(caught.value))[0])
    assert shares(pages=pages, running=fitting, num_pages=pages).pages == pages
    with pytest.raises(ConfigError):
        shares(pages=pages, running=fitting + 1, num_pages=pages)


def test_error_without_state_memory_names_pages_alone():
    with pytest.raises(ConfigError, match="is available: lower --num-pages$"):
        shares(pages=1024, running=64, num_pages=1024)


def test_states_leave_pages_for_one_full_context_request():
    """Four requests of a usual length have room, but one of 2,100 pages would not fit next to four states."""
    heavy = replace(SLOT, channels=0, heads=100, key_size=16, value_size=16)
    assert heavy.slot_bytes == 100 * PAGE_BYTES
    assert shares(pages=2950, running=64, context_length=16 * 2100, spec=heavy) == (2250, 3, 3)
    assert shares(pages=2950, running=64, context_length=16 * 2000, spec=heavy) == (2050, 4, 4)


def test_prompt_seen_before_continues_at_its_anchor(hybrid):
    with engine(hybrid, num_pages=40) as built:
        [first], [again] = (built.generate([request(rid, range(100))]) for rid in ("a", "b"))
        assert (first.cached_tokens, again.cached_tokens) == (0, 64)
        assert first.token_ids == again.token_ids


def test_next_turn_computes_at_most_two_grains(hybrid):
    scheduler = replace(SCHEDULER, context_length=400)
    with Engine.build(hybrid, replace(hybrid.config, scheduler=scheduler, cache=CacheConfig(num_pages=80))) as built:
        [first] = built.generate([request("a", range(150), max_tokens=60)])
        turn = [*range(150), *first.token_ids, *range(30)]
        [second] = built.generate([request("b", turn)])
        assert second.cached_tokens >= len(turn) - 128
    with Engine.build(hybrid, replace(hybrid.config, scheduler=scheduler, cache=CacheConfig(num_pages=80))) as fresh:
        [alone] = fresh.generate([request("b", turn)])
        assert (alone.cached_tokens, alone.token_ids) == (0, second.token_ids)


def test_prompts_after_an_anchor_do_not_wait_for_each_other(hybrid):
    """They share 36 tokens more, and none of them makes an anchor there."""
    shared = [*range(100)]
    with engine(hybrid, num_pages=60) as built:
        for rid in range(2):
            built.generate([request(f"before {rid}", [*shared, 100 + rid])])
        before = built.scheduler.launched
        found = built.generate([request(f"r{n}", [*shared, 110 + n], max_tokens=1) for n in range(4)])
        assert [each.cached_tokens for each in found] == [64] * 4
        assert built.scheduler.launched - before == 1


def test_model_without_a_prefix_cache_has_no_anchors(hybrid):
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


def test_aborted_request_of_a_failed_step_leaves_no_anchor(hybrid, monkeypatch):
    """The step copies the state after 64 tokens before it computes. It raises first, and the slot has other bytes."""
    prompt, copy, lost = [*range(100)], StatePool.copy, []

    def raising(pool: StatePool, copies: Sequence[tuple[int, int]]) -> None:
        if copies and not lost:
            lost.extend(copies)
            raise RuntimeError("no copy is made")
        copy(pool, copies)

    monkeypatch.setattr(StatePool, "copy", raising)
    scheduler = replace(SCHEDULER, chunked_prefill_size=64, enable_overlap=True)
    with Engine.build(hybrid, replace(hybrid.config, scheduler=scheduler, cache=CacheConfig(num_pages=40))) as built:
        built.add(request("a", prompt))
        while built.scheduler.launched < 2:
            built.step()
        built.abort("a")
        while built.step():
            pass
        assert lost
        [again] = built.generate([request("b", prompt)])
        assert again.cached_tokens == 0


def test_float8_pages_next_to_states_give_the_same_tokens(hybrid):
    prompt = [*range(100)]
    with engine(hybrid, num_pages=40, dtype=KvCacheDtype.FP8) as built:
        assert built._parts.pool.data.dtype is torch.float8_e4m3fn
        first, again, longer = (
            built.generate([request(rid, tokens, max_tokens=20)])[0]
            for rid, tokens in (("a", prompt), ("b", prompt), ("c", prompt[:80]))
        )
    assert (again.cached_tokens, longer.cached_tokens) == (64, 64)
    assert again.token_ids == first.token_ids
    with engine(hybrid, num_pages=40, dtype=KvCacheDtype.FP8, enable_prefix_cache=False) as plain:
        [alone] = plain.generate([request("c", prompt[:80], max_tokens=20)])
    assert alone.token_ids == longer.token_ids


def test_reloaded_weights_continue_from_no_former_state(hybrid):
    prompt = [*range(100)]
    with engine(hybrid, num_pages=40) as built:
        [first] = built.generate([request("a", prompt)])
        reloading = built.reload(hybrid.config.model_path)
        while not reloading.done():
            built.step()
        reloading.result()
        [again] = built.generate([request("b", prompt)])
    assert (again.cached_tokens, again.token_ids) == (0, first.token_ids)


def request(rid: str, tokens: Sequence[int], *, max_tokens: int = 2) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=tuple(tokens), sampling=SamplingParams(max_tokens=max_tokens))


def test_hierarchical_cache_without_room_for_a_state_is_refused(hybrid):
    with pytest.raises(ConfigError, match="the hierarchical cache has .* holds not one state: .* raise --hicache-size"):
        engine(hybrid, num_pages=40, host=HostConfig(enable_cache=True, size_bytes=12_000))


def test_swap_space_without_room_for_a_state_is_refused(hybrid):
    with pytest.raises(ConfigError, match="--swap-space .* holds not one request: a state and one KV page take"):
        engine(hybrid, num_pages=40, host=HostConfig(swap_bytes=12_000))
