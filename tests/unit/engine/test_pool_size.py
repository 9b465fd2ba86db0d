"""Ranks agree on the number of pages, and one of them says what it is."""

import logging
from dataclasses import replace

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import CacheConfig, EngineConfig, HostConfig, ParallelConfig, SchedulerConfig
from tandem_engine.disaggregation.packed_pages import SLOT_BYTES, SLOTS
from tandem_engine.engine import assembly
from tandem_engine.engine.loaded_model import load
from tandem_engine.executor import memory_profile
from tandem_engine.executor.memory_profile import Footprint, plan_pool
from tandem_engine.forward.batch import ForwardResult
from tandem_engine.parallel.group import Parallel
from tandem_testing.rank_threads import on_ranks
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

MIB = 1 << 20
CONFIG = EngineConfig(
    model_path="model",
    scheduler=SchedulerConfig(context_length=64),
    parallel=ParallelConfig(tp_size=2),
)


class Meter:
    """A machine of 1000 MiB with 600 MiB left, and a process that has 100 MiB and needs 20 MiB more for a step."""

    def total(self) -> int:
        return 1000 * MIB

    def available(self) -> int:
        return 600 * MIB

    def used(self) -> int:
        return 100 * MIB

    def peak_growth(self, run) -> int:
        run()
        return 20 * MIB


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(memory_profile, "meter_for", lambda _: Meter())


def pages(
    parallel: Parallel,
    cache: CacheConfig,
    *,
    page_bytes: tuple[int, ...] = (MIB, MIB),
    drafted: int = 0,
    ring: int = 0,
) -> int:
    footprint = Footprint(
        weight_bytes=50 * MIB,
        page_bytes=page_bytes[parallel.rank],
        host_page_bytes=page_bytes[parallel.rank],
        threads=1,
        drafted_bytes=drafted,
        ring_bytes=ring,
        forward_over=lambda _: lambda batch: ForwardResult(step=batch.step, next_token_ids=()),
    )
    config = replace(CONFIG, cache=cache, parallel=ParallelConfig(tp_size=parallel.size))
    return plan_pool(config, footprint, parallel).pages


def test_ranks_use_minimum_page_count_and_log_it_once(caplog):
    cache = CacheConfig(mem_fraction_static=0.7)
    with caplog.at_level(logging.INFO, logger=memory_profile.__name__):
        # For two ranks: 350 MiB each, of which process, step and compiled products leave 70.
        assert on_ranks(2, lambda parallel: pages(parallel, cache, page_bytes=(MIB, 2 * MIB))) == [35, 35]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("each of 2 ranks, memory ")
    assert "(35 pages, 544 tokens)" in line


def test_states_of_drafts_leave_fewer_pages():
    cache = CacheConfig(mem_fraction_static=0.7)
    alone = Parallel()
    assert pages(alone, cache) - pages(alone, cache, drafted=30 * MIB) == 30


@pytest.mark.parametrize(
    ("checkpoint", "has_peers", "ring"),
    [
        ("qwen3", True, SLOTS * SLOT_BYTES),
        ("qwen3", False, 0),
        # One head of latents, which is on every rank.
        ("deepseek-v3", True, 0),
    ],
)
def test_ring_is_counted_where_peers_may_need_it(tmp_path, monkeypatch, checkpoint, has_peers, ring):
    """Regression: a ring of 256 MiB that the memory plan had not counted was made at the first handoff."""
    planned: list[Footprint] = []

    def plan(_config, footprint, _parallel):
        planned.append(footprint)
        raise ConfigError("as far as needed")

    monkeypatch.setattr(assembly, "plan_pool", plan)
    loaded = load(EngineConfig(model_path=str(write_tiny_checkpoint(checkpoint, tmp_path / "model"))), progress=False)
    with pytest.raises(ConfigError, match="as far as needed"):
        assembly.make_parts(loaded, loaded.config, sink=None, platform=None, has_peers=has_peers)
    assert [footprint.ring_bytes for footprint in planned] == [ring]


def test_available_memory_is_divided_among_ranks():
    # 300 MiB for each of two ranks, of which compiled products take 160.
    assert on_ranks(2, lambda parallel: pages(parallel, CacheConfig(num_pages=140))) == [140, 140]
    with pytest.raises(ConfigError, match=r"--num-pages 141 needs 0.14 GiB .* 0.29 GiB is available, .* at most 140"):
        on_ranks(2, lambda parallel: pages(parallel, CacheConfig(num_pages=141)))


def test_ring_of_packed_pages_leaves_fewer_pages():
    cache = CacheConfig(mem_fraction_static=0.7)
    assert pages(Parallel(), cache) - pages(Parallel(), cache, ring=30 * MIB) == 30


@pytest.mark.parametrize(
    ("ranks", "cache", "available", "fitting"),
    [
        # Of what is available, a rank's step takes 20 MiB, and compiled products 160.
        (2, CacheConfig(), 600, 300 - 180),
        (4, CacheConfig(), 1700, 425 - 180),
        (1, CacheConfig(host=HostConfig(enable_cache=True, size_bytes=1536 * MIB)), 2100, 2100 - 1536 - 180),
    ],
)
def test_default_pool_shrinks_for_other_ranks_and_host_memory(monkeypatch, ranks, cache, available, fitting):
    monkeypatch.setattr(Meter, "available", lambda _: available * MIB)
    assert on_ranks(ranks, lambda parallel: pages(parallel, cache, page_bytes=(MIB,) * ranks)) == [fitting] * ranks


def test_pool_of_a_given_size_is_not_measured(monkeypatch):
    def measured(_meter, _run):
        raise AssertionError

    monkeypatch.setattr(Meter, "peak_growth", measured)
    assert on_ranks(2, lambda parallel: pages(parallel, CacheConfig(num_pages=140))) == [140, 140]
