"""Ranks agree on the number of pages, and one of them says what it is."""

import logging
from dataclasses import replace

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from tandem_engine.executor import memory_profile
from tandem_engine.executor.memory_profile import Footprint, plan_pool
from tandem_engine.forward.batch import ForwardResult
from tandem_engine.parallel.group import Parallel
from tandem_testing.rank_threads import on_ranks

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


def pages(parallel: Parallel, cache: CacheConfig, *, page_bytes: tuple[int, int] = (MIB, MIB)) -> int:
    footprint = Footprint(
        weight_bytes=50 * MIB,
        page_bytes=page_bytes[parallel.rank],
        host_page_bytes=page_bytes[parallel.rank],
        threads=1,
        forward_over=lambda _: lambda batch: ForwardResult(step=batch.step, next_token_ids=()),
    )
    return plan_pool(replace(CONFIG, cache=cache), footprint, parallel).pages


def test_every_rank_has_as_many_pages_as_the_one_with_the_fewest_and_one_line_says_so(caplog):
    cache = CacheConfig(mem_fraction_static=0.5)
    with caplog.at_level(logging.INFO, logger=memory_profile.__name__):
        # Half of the machine for two ranks: 250 MiB each, of which 130 are left.
        assert on_ranks(2, lambda parallel: pages(parallel, cache, page_bytes=(MIB, 2 * MIB))) == [65, 65]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("each of 2 ranks, memory ")
    assert "(65 pages, 1024 tokens)" in line


def test_what_is_available_is_divided_among_ranks_on_one_memory():
    assert on_ranks(2, lambda parallel: pages(parallel, CacheConfig(num_pages=300))) == [300, 300]
    with pytest.raises(ConfigError, match="--num-pages 301 needs 0.29 GiB .* 0.29 GiB is available: .* at most 300"):
        on_ranks(2, lambda parallel: pages(parallel, CacheConfig(num_pages=301)))
