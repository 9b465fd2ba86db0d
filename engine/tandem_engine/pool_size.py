"""How many KV pages the pool of this engine gets: measured, planned, and agreed on by its ranks.

Every rank measures for itself and takes part in the others' largest step, which has collectives. Their pools must be
equal, or their schedulers would plan different batches: the smallest plan counts for all, and rank 0 says in one line
what it is.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tandem_engine.config import CacheConfig, EngineConfig
from tandem_engine.executor.forward_thread import Forward, ForwardThread
from tandem_engine.executor.memory_meter import MemoryMeter, meter_for
from tandem_engine.executor.memory_profile import measure_activations, profile_pages
from tandem_engine.memory.sizing import HostShare, MemoryFacts, MemoryPlan, plan_memory
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import Parallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """What is known of a model once its weights are loaded."""

    weight_bytes: int
    page_bytes: int
    """Of one page on this rank, a draft model's share included."""
    host_page_bytes: int
    """Of the same page in host memory, where no draft model's share is kept."""
    threads: int
    forward_over: Callable[[int], Forward]
    """A forward of the model over a pool of its own with so many pages."""
    graph_bytes: Callable[[], int] = lambda: 0
    """Measures what captured steps will take."""
    draft_bytes: int = 0
    """Of a draft model's weights, yet to be loaded."""


def plan_pool(config: EngineConfig, footprint: Footprint, parallel: Parallel) -> MemoryPlan:
    """Measure and divide the memory; the plan is logged.

    Raises `ConfigError` when pages, or one request of the context length, do not fit.
    """
    meter, cache = meter_for(config.device), _share_of_rank(config)
    measured = cache.mem_fraction_static > 0
    activations = _measure(config, footprint, meter) if measured else None
    graphs = footprint.graph_bytes() if measured else 0
    agreement = Agreement(parallel.schedule)
    # Whoever has loaded first sees memory that others are about to take: what the last one sees is there.
    [available] = agreement.least([meter.available()])
    plan = plan_memory(
        cache,
        MemoryFacts(
            total=meter.total(),
            available=available // _ranks_on_one_memory(config),
            used=meter.used(),
            weights=footprint.weight_bytes,
            activations=activations,
            graphs=graphs,
            draft=footprint.draft_bytes,
        ),
        page_bytes=footprint.page_bytes,
        context_length=config.scheduler.context_length,
        host=HostShare(
            config=cache.host,
            page_bytes=footprint.host_page_bytes,
            beside_pool=torch.device(config.device).type == "cpu",
        ),
    )
    [pages] = agreement.least([plan.pages])
    plan = replace(plan, pages=pages)
    if parallel.rank == 0:
        logger.info("%s%s", f"each of {parallel.size} ranks, " if parallel.size > 1 else "", plan)
    return plan


def _share_of_rank(config: EngineConfig) -> CacheConfig:
    cache = config.cache.for_device(config.device)
    if not cache.mem_fraction_static:
        return cache
    return replace(cache, mem_fraction_static=cache.mem_fraction_static / _ranks_on_one_memory(config))


def _ranks_on_one_memory(config: EngineConfig) -> int:
    """Those of a node that are on a CPU divide it; on accelerators each has its own."""
    return config.parallel.local_size if torch.device(config.device).type == "cpu" else 1


def _measure(config: EngineConfig, footprint: Footprint, meter: MemoryMeter) -> int:
    """Activations of the largest step, run as it would be in service."""
    limits, page_size = config.scheduler, config.cache.page_size
    executor = ForwardThread(footprint.forward_over(profile_pages(limits, page_size)), threads=footprint.threads)
    try:
        return measure_activations(lambda batch: executor.launch(batch).result(), meter, limits, page_size=page_size)
    finally:
        executor.shutdown()
