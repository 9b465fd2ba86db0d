"""How many KV pages this engine's pool gets: the memory of the largest step is measured, the rest can be pages.

    measure   the largest step runs on dummy data: as many prompt tokens as a step may have, in chunks of
              chunked_prefill_size, then decodes; max_running_requests rows of logits, all sampled with every filter
    plan      no step in service needs more than that and the weights [memory-profile]
    agree     the smallest plan of all ranks counts, since pools of different sizes would let their schedulers plan
              different batches; rank 0 logs it

Every rank measures for itself and takes part in the largest step of the others, which has collectives.

`MemoryMeter` is one interface for both kinds of memory that a pool can lie in: how much there is, how much this process
uses, and the peak of a computation. In a container, most interfaces of the system report the machine's memory. The
limit of the process is that of its control groups, so `HostMeter` reads those.
"""

import gc
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Protocol

import torch

from tandem_engine.base.cgroups import CGROUPS, PROC, memory_groups, read_text
from tandem_engine.base.environment import KEPT_BYTES
from tandem_engine.base.names import PADDING_ROW
from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.executor.forward_thread import Forward, ForwardThread
from tandem_engine.forward.batch import ForwardBatch, ForwardMode, ForwardResult, SamplingBatch
from tandem_engine.memory.sizing import HostShare, MemoryFacts, MemoryPlan, plan_memory
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import Parallel

ROOM = 1 << 30
"""Bytes in addition to pool and weights with which a machine is not short of memory."""

RESET_PEAK = "5"
"""Written to clear_refs: the peak of the resident set is reset (proc(5))."""


class MemoryMeter(Protocol):
    """Bytes of one device's memory."""

    def total(self) -> int:
        """What this process could have if it were alone."""
        ...

    def available(self) -> int:
        """What it could still take now, others' use considered."""
        ...

    def used(self) -> int:
        """What it has now, for itself."""
        ...

    def peak_growth(self, run: Callable[[], object]) -> int:
        """Call `run` and return by how much `used` exceeded its earlier value at the peak."""
        ...


def meter_for(device: str | torch.device) -> MemoryMeter:
    """Of the memory that `device` computes in."""
    device = torch.device(device)
    return CudaMeter(device) if device.type == "cuda" else HostMeter()


@dataclass(frozen=True, slots=True)
class HostMeter:
    """Main memory, within the control groups of this process."""

    proc: Path = PROC
    cgroups: Path = CGROUPS

    def total(self) -> int:
        limits = (group.limit for group in memory_groups(proc=self.proc, cgroups=self.cgroups))
        return min((_kib(self.proc / "meminfo", "MemTotal"), *limits))

    def available(self) -> int:
        free = (group.limit - group.used for group in memory_groups(proc=self.proc, cgroups=self.cgroups))
        return max(0, min((_kib(self.proc / "meminfo", "MemAvailable"), *free)))

    def used(self) -> int:
        """Without libraries and other files, which are shared and can be read again."""
        status = self.proc / "self" / "status"
        return _kib(status, "VmRSS") - _kib(status, "RssFile")

    def peak_growth(self, run: Callable[[], object]) -> int:
        status = self.proc / "self" / "status"
        gc.collect()  # garbage that is freed during `run` would hide as much of the growth
        before = _kib(status, "VmRSS")
        resettable = self._reset_peak()
        run()
        # Without a reset the peak is that of the whole life: too low only when loading took more than running.
        peak = _kib(status, "VmHWM") if resettable else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak - before)

    def _reset_peak(self) -> bool:
        try:
            (self.proc / "self" / "clear_refs").write_text(RESET_PEAK)
        except OSError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class CudaMeter:
    """Memory of one GPU, as torch's allocator sees it."""

    device: torch.device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[1])

    def available(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def used(self) -> int:
        """What torch's allocator has, that of graphs included; not what the driver takes for a process."""
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self.device))

    def peak_growth(self, run: Callable[[], object]) -> int:
        """In what torch's allocator takes of the card, which is more than what it has given: it takes large pieces,
        and each stream has its own.
        """
        gc.collect()
        torch.cuda.synchronize(self.device)
        before = self.used()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_reserved(self.device)) - before


def _kib(path: Path, name: str) -> int:
    """Bytes of a field that the kernel gives in KiB; 0 when it does not."""
    for line in read_text(path).splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return 0


def profile_pages(config: SchedulerConfig, page_size: int) -> int:
    """Pages of the pool that `largest_step` runs on, the dummy page included."""
    return 1 + ceil(longest_chunk(config) / page_size)


def measure_activations(
    forward: Callable[[ForwardBatch], ForwardResult],
    meter: MemoryMeter,
    config: SchedulerConfig,
    *,
    page_size: int,
) -> int:
    """Bytes that the largest step takes beyond what was taken before it.

    `forward` runs over a pool of `profile_pages`, where and how forwards run in service.
    """
    batch = largest_step(config, page_size=page_size)
    # Once before: compiled kernels, thread teams and workspaces stay, and are no part of a step.
    forward(largest_step(config, page_size=page_size, tokens=1))
    return meter.peak_growth(lambda: forward(batch))


def largest_step(config: SchedulerConfig, *, page_size: int, tokens: int | None = None) -> ForwardBatch:
    """A step at every limit of `config`, or of `tokens` prompt tokens.

    All sequences lie on the same pages: what they compute means nothing, and the pool stays small.
    """
    lens = _chunks(tokens or config.prefill_budget(decodes=0), longest_chunk(config))
    num_extend = len(lens)
    lens += [1] * (config.max_running_requests - num_extend)
    extend_lens = torch.tensor(lens)
    positions = torch.cat([torch.arange(length) for length in lens])
    pages = torch.arange(1, profile_pages(config, page_size), dtype=torch.int32)
    table = pages.repeat(len(lens), 1)
    return ForwardBatch(
        step=0,
        mode=ForwardMode.MIXED if len(lens) > num_extend else ForwardMode.EXTEND,
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        out_cache_loc=table[0, positions // page_size].long() * page_size + positions % page_size,
        rows=torch.full((len(lens),), PADDING_ROW),
        seq_lens=extend_lens,
        extend_lens=extend_lens,
        page_table=table,
        num_extend=num_extend,
        sample_index=torch.arange(len(lens)),
        sampling=_every_filter(len(lens)),
    )


def longest_chunk(config: SchedulerConfig) -> int:
    """Prompt tokens that a step computes for one request, at most."""
    return min(config.chunk_limit(decodes=0), config.prefill_budget(decodes=0), config.context_length)


def _chunks(tokens: int, longest: int) -> list[int]:
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + ([rest] if rest else [])


def _every_filter(rows: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.full((rows,), 0.9),
        min_p=torch.full((rows,), 0.01),
        seed=torch.zeros(rows, dtype=torch.int64),
        position=torch.ones(rows, dtype=torch.int64),
    )


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
    drafted_bytes: int = 0
    """Of what layers with states keep of the largest step with drafts, which is not run."""
    ring_bytes: int = 0
    """Of the ring that slices for peers of other numbers of ranks are packed in; made when the first is sent."""


def plan_pool(config: EngineConfig, footprint: Footprint, parallel: Parallel) -> MemoryPlan:
    """Measure and divide the memory; the plan is logged.

    Raises `ConfigError` when pages, or one request of the context length, do not fit.
    """
    meter, cache = meter_for(config.device), _share_of_rank(config)
    agreement = Agreement(parallel.schedule)
    by_share, ranks = cache.mem_fraction_static > 0, _ranks_on_one_memory(config)
    host = HostShare(
        config=cache.host,
        page_bytes=footprint.host_page_bytes,
        beside_pool=torch.device(config.device).type == "cpu",
    )
    # The largest step has collectives: all ranks run it, or none. A given size is taken as it is.
    enough = not by_share and (not cache.is_default_size or _roomy(cache, footprint, host, meter.available() // ranks))
    [unmeasured] = agreement.least([int(enough)])
    activations = None if unmeasured else _measure(config, footprint, meter)
    graphs = footprint.graph_bytes() if by_share else 0
    # A rank that loads first still sees memory that other ranks will take: the smallest figure is available.
    [available] = agreement.least([meter.available()])
    plan = plan_memory(
        cache,
        MemoryFacts(
            total=meter.total(),
            available=available // ranks,
            used=meter.used(),
            weights=footprint.weight_bytes,
            activations=activations,
            graphs=graphs,
            draft=footprint.draft_bytes,
            drafted=footprint.drafted_bytes,
            kept=KEPT_BYTES if torch.device(config.device).type == "cpu" else 0,
            ring=footprint.ring_bytes,
        ),
        page_bytes=footprint.page_bytes,
        context_length=config.scheduler.context_length,
        host=host,
    )
    [pages] = agreement.least([plan.pages])
    plan = replace(plan, pages=pages)
    if parallel.rank == 0:
        logger.info("%s%s", f"each of {parallel.size} ranks, " if parallel.size > 1 else "", plan)
    return plan


def _roomy(cache: CacheConfig, footprint: Footprint, host: HostShare, available: int) -> bool:
    """Whether a pool of the default size leaves more than any step takes, so that nothing has to be measured."""
    pages = cache.pages_for(footprint.page_bytes)
    pool = pages * (footprint.page_bytes + host.per_page) + host.fixed
    beside = footprint.draft_bytes + footprint.drafted_bytes + footprint.ring_bytes
    return available >= pool + beside + footprint.weight_bytes // 2 + ROOM


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
