"""Prometheus metrics of a worker, computed at each scrape from the last statistics of the engine.

Names follow vLLM's where vLLM has one, with the prefix `tandem_worker_`; `vllm:lora_requests_info` has vLLM's own, for
routers that read it. One process is one engine, so there are few
labels: role, reason of waiting, cache tier, time of kernel compilation, peer of a link. Each help text can be read
without the others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_engine.base.release import WINDOW
from tandem_engine.config import Role
from tandem_engine.messages.control import AdapterMemory, EngineReady
from tandem_engine.messages.kv_events import Tier
from tandem_engine.messages.stats import EngineStats, LinkReport, SpeculationStats, StateAnchorStats, StepFit
from tandem_services.router.keys import worker_id_of

PREFIX = "tandem_worker_"


def _usage(stats: EngineStats) -> float:
    if stats.total_pages == 0:
        return 0.0
    return 1.0 - (stats.free_pages + stats.evictable_pages) / stats.total_pages


def _hit_rate(stats: EngineStats) -> float:
    return stats.cached_tokens_total / stats.prompt_tokens_total if stats.prompt_tokens_total else 0.0


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda s: s.running),
    ("num_requests_waiting", "Requests waiting to be scheduled.", lambda s: s.waiting),
    ("num_requests_transferring", "Requests waiting for KV pages from a peer.", lambda s: s.transferring),
    (
        "num_requests_waiting_for_adapter",
        "Requests whose LoRA adapter is being loaded or waits for memory.",
        lambda s: s.waiting_for_adapter,
    ),
    ("num_requests_inflight", "Requests whose KV pages are being sent to a peer.", lambda s: s.inflight),
    ("waiting_prompt_tokens", "Prompt tokens not yet computed.", lambda s: s.waiting_tokens),
    ("oldest_wait_seconds", "Wait so far of the oldest request that has not started.", lambda s: s.oldest_wait_s),
    ("kv_cache_usage_perc", "Share of KV pages that are neither free nor evictable, 0 to 1.", _usage),
    ("kv_pages", "KV pages of the pool.", lambda s: s.total_pages),
    ("kv_pages_free", "KV pages on the free list.", lambda s: s.free_pages),
    ("kv_pages_evictable", "KV pages that only the prefix cache holds.", lambda s: s.evictable_pages),
    ("kv_pages_quarantined", "KV pages kept until an unresponsive writer is fenced.", lambda s: s.quarantined_pages),
    ("num_requests_swapped", "Requests whose KV is in host memory.", lambda s: s.swapped),
    ("host_pages", "Pages of host memory for KV.", lambda s: s.host_pages),
    ("host_pages_used", "Pages of host memory with cached blocks or swapped requests.", lambda s: s.host_pages_used),
    (
        "host_load_pages_per_second",
        "Measured rate of copies from host memory, in KV pages per second.",
        lambda s: s.host_load_pages_per_s,
    ),
    ("stored_blocks", "KV blocks in files.", lambda s: s.stored_blocks),
    ("gen_throughput", "Output tokens per second, over the last report interval.", lambda s: s.output_tokens_per_s),
    ("cache_hit_rate", "Share of prompt tokens found in the prefix cache since start, 0 to 1.", _hit_rate),
    ("num_requests_leaving", "Running requests that will migrate to other workers.", lambda s: s.leaving),
    ("paused", "1 while an administrator has paused generation.", lambda s: s.paused),
    ("decode_step_seconds", "Recent mean duration of a decode step.", lambda s: s.decode_step_s),
    ("step_base_seconds", "Duration of a step whatever it computes; 0 if not measured.", lambda s: s.step_base_s),
)

_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("scheduler_steps", "Iterations of the scheduler loop.", lambda s: s.loop_count),
    ("prompt_tokens", "Prompt tokens of finished prefills.", lambda s: s.prompt_tokens_total),
    (
        "prefix_cache_unusable_tokens",
        "Prompt tokens computed although cached: no state was kept to continue from, or pages of a window were gone.",
        lambda s: s.unusable_tokens_total,
    ),
    ("generation_tokens", "Output tokens.", lambda s: s.output_tokens_total),
    ("requests", "Requests accepted.", lambda s: s.requests_total),
    ("requests_aborted", "Requests aborted.", lambda s: s.aborted_total),
    ("requests_failed", "Requests ended by an error.", lambda s: s.failed_total),
    ("requests_refused", "Requests rejected before they used memory.", lambda s: s.refused_total),
    ("step_errors", "Steps that raised.", lambda s: s.engine_errors_total),
    (
        "step_fit_errors",
        "Steps that could not be fitted to predict the duration of others.",
        lambda s: s.step_fit_errors_total,
    ),
    (
        "recording_errors",
        "Errors in what only records or estimates; requests continued without it.",
        lambda s: s.recording_errors_total,
    ),
    (
        "poison_requests",
        "Requests ended because their step fails whenever they run.",
        lambda s: s.poison_requests_total,
    ),
    ("corrupted_requests", "Requests ended because of NaN or infinite logits.", lambda s: s.corrupted_requests_total),
    (
        "audit_failures",
        "Audits in idle times that found a page without exactly one owner.",
        lambda s: s.audit_failures_total,
    ),
    ("num_preemptions", "Retractions of running requests.", lambda s: s.retracted_total),
    ("num_priority_preemptions", "Retractions for a more important request.", lambda s: s.preempted_total),
    ("swapped_out", "Retracted requests whose KV was copied to host memory.", lambda s: s.swapped_out_total),
    ("swapped_in", "Swapped requests whose KV was copied back from host memory.", lambda s: s.swapped_in_total),
    ("swap_misses", "Swapped requests that were computed again.", lambda s: s.swap_misses_total),
    ("kv_blocks_not_stored", "KV blocks that were not written to files.", lambda s: s.blocks_not_stored_total),
    ("kv_transfers", "KV transfers committed.", lambda s: s.transfers_total),
    ("kv_transfer_failures", "KV transfers that failed.", lambda s: s.transfer_failures_total),
    (
        "kv_transfer_unexpected_errors",
        "Unexpected errors in the transfer thread.",
        lambda s: s.transfer_unexpected_errors_total,
    ),
    ("kv_transfer_bytes", "Bytes of committed KV transfers.", lambda s: s.transfer_bytes_total),
    ("kv_handovers", "Prompts computed here whose KV was sent to a peer.", lambda s: s.handed_over_total),
    ("kv_exposed_seconds", "Time of handoffs after their prompts were computed.", lambda s: s.transfer_exposed_s),
    ("kv_digest_mismatches", "Transferred pages whose digest did not match.", lambda s: s.digest_mismatches_total),
    ("prefix_fetch_requested", "Prefixes requested from other workers.", lambda s: s.prefix_fetch.requested_total),
    ("prefix_fetch_fetched", "Prefixes that arrived, complete or in part.", lambda s: s.prefix_fetch.fetched_total),
    ("prefix_fetch_missed", "Requested prefixes that the source had evicted.", lambda s: s.prefix_fetch.missed_total),
    (
        "prefix_fetch_failed",
        "Prefixes that were late, incomplete, rejected or lost.",
        lambda s: s.prefix_fetch.failed_total,
    ),
    (
        "prefix_fetch_skipped",
        "Prefixes selected by a gateway and not requested.",
        lambda s: s.prefix_fetch.skipped_total,
    ),
    ("prefix_fetch_pages", "KV pages fetched from other workers.", lambda s: s.prefix_fetch.pages_total),
    ("prefix_fetch_bytes", "Bytes of KV pages fetched from other workers.", lambda s: s.prefix_fetch.bytes_total),
    ("prefix_fetch_wait_seconds", "Time from requesting prefixes to the end of each.", lambda s: s.prefix_fetch.wait_s),
    ("prefix_fetch_served", "Prefixes sent to workers that requested them.", lambda s: s.prefix_fetch.served_total),
    (
        "prefix_fetch_served_pages",
        "KV pages sent to workers that requested them.",
        lambda s: s.prefix_fetch.served_pages_total,
    ),
    ("lora_loads", "LoRA adapters loaded for requests.", lambda s: s.adapter_loads_total),
    ("lora_load_failures", "LoRA adapters that could not be loaded.", lambda s: s.adapter_load_failures_total),
    ("lora_load_seconds", "Time spent on loading LoRA adapters.", lambda s: s.adapter_load_s_total),
    ("lora_evictions", "LoRA adapters evicted for others.", lambda s: s.adapter_evictions_total),
    ("requests_moved", "Running requests that migrated to another worker with their KV.", lambda s: s.moved_total),
    ("request_moves_failed", "Requests that other workers continue without their KV.", lambda s: s.move_failures_total),
    ("schedule_seconds", "Time spent scheduling.", lambda s: s.schedule_s),
    ("plan_seconds", "Scheduling time spent on choosing what to compute.", lambda s: s.plan_s),
    ("launch_seconds", "Scheduling time spent on building batches.", lambda s: s.launch_s),
    ("settle_seconds", "Scheduling time spent on processing results.", lambda s: s.settle_s),
    ("schedule_hidden_seconds", "Scheduling time that overlapped a forward pass.", lambda s: s.overlap_hidden_s),
    ("step_wait_seconds", "Time the scheduler waited for steps.", lambda s: s.wait_s),
)

_FORMER_NAMES = {
    "poison_requests": "requests_convicted",
    "corrupted_requests": "requests_unsound",
    "kv_transfer_unexpected_errors": "kv_transfer_mishaps",
    "prefix_fetch_requested": "prefix_fetch_asked",
    "prefix_fetch_served": "prefix_fetch_lent",
    "prefix_fetch_served_pages": "prefix_fetch_lent_pages",
}
"""Counters → their names in release 0, for dashboards and alerts written for it. They are exported as long as workers
of release 0 may serve in the same fleet."""

LAST_OF_FORMER_NAMES = WINDOW
"""The last release that works with release 0, and has its names."""

_SPECULATION: tuple[tuple[str, str, Callable[[SpeculationStats], float]], ...] = (
    ("spec_decode_num_drafts", "Drafted runs verified.", lambda s: s.runs_total),
    ("spec_decode_num_draft_tokens", "Tokens proposed and verified.", lambda s: s.drafted_total),
    ("spec_decode_num_accepted_tokens", "Proposed tokens accepted.", lambda s: s.accepted_total),
    ("spec_decode_propose_seconds", "Time spent on proposing.", lambda s: s.propose_s),
)
"""Exported by engines with speculative decoding, in addition to their recent acceptance length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceNumbers:
    """What the worker service itself counts."""

    registered: bool
    offered: bool
    index_replays: int
    redis_failures: int
    role: Role
    draining_s: float | None
    """For how long it has been draining; None while it is not."""
    standby: bool = False
    stats_age_s: float = 0.0
    """Of the engine's last report."""
    ready: EngineReady | None = None
    """The engine's report when it became ready; None before."""


class WorkerCollector(Collector):
    """Reads the current numbers at each scrape; before the first statistics only the service's own."""

    def __init__(self, stats: Callable[[], EngineStats | None], service: Callable[[], ServiceNumbers]) -> None:
        self._stats = stats
        self._service = service

    def collect(self) -> Iterator[Metric]:
        numbers = self._service()
        yield _gauge("registered", "1 when a heartbeat was accepted since start.", numbers.registered)
        yield _gauge("offered", "1 when the router may select this worker.", numbers.offered)
        yield _gauge(
            "standby", "1 until the canary of its revision passes: the router does not select it.", numbers.standby
        )
        yield _counter("index_replays", "Replays of the prefix cache to the index.", numbers.index_replays)
        yield _counter("redis_failures", "Redis commands without a usable reply.", numbers.redis_failures)
        yield _gauge(
            "draining",
            "1 while the worker drains: it accepts no new requests and will stop.",
            numbers.draining_s is not None,
        )
        yield _gauge("drain_seconds", "Duration of the drain so far.", numbers.draining_s or 0.0)
        yield _role(numbers.role)
        stats = self._stats()
        if numbers.ready is not None:
            yield from _sizes(numbers.ready, stats)
        if stats is None:
            return
        yield _gauge("stats_age_seconds", "Age of the engine's last report.", numbers.stats_age_s)
        for name, text, value in _GAUGES:
            yield _gauge(name, text, value(stats))
        for name, text, value in _COUNTERS:
            yield _counter(name, text, value(stats))
            if name in _FORMER_NAMES:
                yield _counter(_FORMER_NAMES[name], _former(name), value(stats))
        yield _cache_hits(stats)
        yield _kernel_compiles(stats)
        yield _head_waits(stats.head_waits)
        yield _step_fit(stats.step_fit)
        yield from _links(stats.links)
        if stats.state_anchors is not None:
            yield from _state_anchors(stats.state_anchors)
        if stats.speculation is not None:
            yield from _speculation(stats.speculation)


def _role(role: Role) -> Metric:
    metric = GaugeMetricFamily(PREFIX + "role", "1 for the role that the router uses it in.", labels=["role"])
    metric.add_metric([role.value], 1.0)
    return metric


def _sizes(ready: EngineReady, stats: EngineStats | None) -> Iterator[Metric]:
    """What a worker can do, as far as it is known: it is, before it has done anything."""
    measured = 0.0 if stats is None else stats.prefill_tokens_per_s
    yield _gauge("max_running_requests", "Requests that may run at once.", ready.max_running_requests)
    yield _gauge(
        "prefill_tokens_per_second",
        "Measured prefill rate: that of the self-test at start until prompts have been computed.",
        measured or ready.prefill_tokens_per_s,
    )
    adapters = GaugeMetricFamily(
        PREFIX + "lora_adapter_loaded",
        "1 for each LoRA adapter that new requests may have.",
        labels=["adapter_name", "rank"],
    )
    for adapter in ready.adapters:
        adapters.add_metric([adapter.name, str(adapter.rank)], 1.0)
    yield adapters
    if ready.adapter_memory is not None and (ready.adapters or ready.adapter_memory.resident):
        yield _gauge("lora_adapters_resident", "LoRA adapters in memory.", len(ready.adapter_memory.resident))
    if ready.adapter_memory is not None and ready.adapter_memory.failed:
        yield _failed_adapters(ready.adapter_memory)
    if ready.adapters or (stats is not None and stats.adapter_loads_total):
        yield _adapters_of_requests(ready, stats)


def _failed_adapters(memory: AdapterMemory) -> Metric:
    metric = GaugeMetricFamily(
        PREFIX + "lora_adapter_load_failed",
        "1 for each LoRA adapter whose last load for a request has failed, within ten minutes.",
        labels=["adapter_name"],
    )
    for name in sorted({failure.name for failure in memory.failed}):
        metric.add_metric([name], 1.0)
    return metric


def _adapters_of_requests(ready: EngineReady, stats: EngineStats | None) -> Metric:
    """For routers that read vLLM's metrics: of several series they take the one with the greatest value."""
    metric = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Unix time of this sample. Labels, as vLLM has them: most adapters in memory, those of running requests and "
        "those of waiting ones, by name and separated by commas.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    running, waiting = ((), ()) if stats is None else (stats.running_adapters, stats.waiting_adapters)
    limit = 0 if ready.adapter_memory is None else ready.adapter_memory.limit
    metric.add_metric([str(limit), ",".join(running), ",".join(waiting)], time.time())
    return metric


def _cache_hits(stats: EngineStats) -> Metric:
    """By where they were: their sum is what did not have to be computed."""
    metric = CounterMetricFamily(
        PREFIX + "prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache: on the device, in host memory or in files.",
        labels=["tier"],
    )
    host, disk = stats.host_cached_tokens_total, stats.disk_cached_tokens_total
    for tier, tokens in ((Tier.DEVICE, stats.cached_tokens_total - host - disk), (Tier.HOST, host), (Tier.DISK, disk)):
        metric.add_metric([tier.value], tokens)
    return metric


def _state_anchors(stats: StateAnchorStats) -> Iterator[Metric]:
    text = "Bytes of copies of states at which cached prefixes continue, of one rank: {}."
    for name, what, copies in (
        ("state_anchor_pool_bytes", "all that there is memory for", stats.slots),
        ("state_anchor_bytes", "those in use", stats.kept + stats.provisional),
        ("state_anchor_trial_bytes", "those that no request has continued from, within prompts", stats.provisional),
    ):
        yield _gauge(name, text.format(what), copies * stats.slot_bytes)
    yield _counter("state_anchors_replaced", "Copies of states that made room for others.", stats.replaced_total)


def _kernel_compiles(stats: EngineStats) -> Metric:
    metric = CounterMetricFamily(
        PREFIX + "kernel_compiles",
        "GPU kernels compiled: starting, before the engine served; serving, while requests waited.",
        labels=["when"],
    )
    metric.add_metric(["starting"], stats.kernels_compiled_starting)
    metric.add_metric(["serving"], stats.kernels_compiled_serving)
    return metric


def _head_waits(reason: str) -> Metric:
    metric = GaugeMetricFamily(
        PREFIX + "queue_head_waits",
        "1 for the reason why the first waiting request was not admitted.",
        labels=["reason"],
    )
    if reason:
        metric.add_metric([reason], 1.0)
    return metric


def _links(links: Sequence[LinkReport]) -> Iterator[Metric]:
    """By worker id: at most `MAX_LINKS` of them at a time, and a restarted peer keeps its own."""
    rate = GaugeMetricFamily(
        "tandem_link_bytes_per_second", "Bytes per second of KV writes to a peer.", labels=["peer", "transport"]
    )
    latency = GaugeMetricFamily(
        "tandem_link_latency_seconds", "Duration of a write of one KV page to a peer.", labels=["peer"]
    )
    broken = GaugeMetricFamily("tandem_link_broken", "1 when the last write to a peer failed.", labels=["peer"])
    conditions = GaugeMetricFamily(
        "tandem_link_conditions", "1 when the link to a peer is slower than --expect-transport.", labels=["peer"]
    )
    for link in links:
        peer = worker_id_of(link.peer)
        if link.bytes_per_s > 0.0:
            rate.add_metric([peer, link.transport], link.bytes_per_s)
            latency.add_metric([peer], link.latency_s)
        broken.add_metric([peer], link.broken)
        conditions.add_metric([peer], bool(link.condition))
    yield from (rate, latency, broken, conditions)


def _step_fit(fit: StepFit | None) -> Metric:
    """Without samples until there is a fit."""
    metric = GaugeMetricFamily(
        PREFIX + "step_fit_seconds",
        "Fitted duration of a step that decodes: base, and for each sequence, token of KV and prompt token in it.",
        labels=["part"],
    )
    if fit is not None:
        for name in fit.__struct_fields__:
            metric.add_metric([name.removesuffix("_s")], getattr(fit, name))
    return metric


def _speculation(stats: SpeculationStats) -> Iterator[Metric]:
    yield _gauge("spec_decode_accept_length", "Recent mean of tokens per drafted run.", stats.accept_length)
    for name, text, value in _SPECULATION:
        yield _counter(name, text, value(stats))


def _former(name: str) -> str:
    """The help text of the former name of counter `name`."""
    return f"Former name of {PREFIX}{name}_total; the last release that exports it is {LAST_OF_FORMER_NAMES}."


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)
