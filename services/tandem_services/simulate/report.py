"""What a run is judged by: one `PolicyReport` for each policy, and the trace's own limits beside them.

Equal inputs give equal reports, byte for byte: nothing in them depends on the machine but `requests_per_minute`,
which stands apart.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from tandem_engine.config import Role
from tandem_services.gateway.access.tenants import EVERYBODY
from tandem_services.loadgen.summary import Percentiles, Slo, percentiles
from tandem_services.simulate.replay import Outcome, Served


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The busiest worker over the mean, of workers that compute prompts; 1 is even."""

    outstanding: float
    """By requests at the moment, in the mean over time."""
    prompt_tokens: float
    """By prompt tokens computed in the whole run."""
    requests: float
    """By prompts in the whole run, whatever was cached of them."""


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant got. Times are milliseconds."""

    requests: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Percentiles | None
    e2e_ms: Percentiles | None


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's figures. Times are milliseconds."""

    requests: int
    refused: int
    refusals: dict[str, int]
    """Choices that were refused, by reason; those that left the queue with them are not counted."""
    gateway_wait_ms: Percentiles | None
    """In a gateway's queue, of those that got a worker."""
    block_hit_rate: float
    of_pooled_lru: float
    """`block_hit_rate` over that of one pooled LRU cache as large as all caches that save computing."""
    fetched_block_rate: float
    """Blocks that came from another worker, by those of all prompts."""
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    goodput_requests_per_s: float | None
    """None when no SLO was given."""
    output_tokens_per_s: float
    simulated_s: float
    """From the first arrival to the last token."""
    balance: Balance
    utilisation: float
    """Share of the simulated time that the workers spent in steps."""
    placements: dict[str, int]
    tenants: dict[str, TenantReport]
    """Empty where the trace names none."""


class TraceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace alone says."""

    requests: int
    blocks: int
    """Whole blocks of all prompts."""
    distinct_blocks: int
    cache_blocks: int
    """Of all workers that compute prompts, together."""
    infinite_cache_hit_rate: float
    pooled_lru_hit_rate: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    trace: TraceLimits
    policies: dict[str, PolicyReport]
    requests_per_minute: float
    """Replayed by this machine, all policies together."""


def policy_report(outcome: Outcome, *, pooled: float, slo: Slo | None) -> PolicyReport:
    """`pooled`: block hit rate of the pooled LRU cache."""
    computing = [worker.done for worker in outcome.workers if worker.role is not Role.DECODE]
    blocks = sum(worker.done.prompt_blocks for worker in outcome.workers)
    hits = sum(worker.done.hit_blocks for worker in outcome.workers)
    hit_rate = hits / blocks if blocks else 0.0
    seconds = outcome.seconds or math.inf
    gaps: Counter[float] = Counter()
    for worker in outcome.workers:
        gaps.update(worker.done.gaps)
    good = [served for served in outcome.served if slo is not None and is_good(served, slo)]
    return PolicyReport(
        requests=len(outcome.served),
        refused=len(outcome.refused),
        refusals=dict(sorted(outcome.refusals.items())),
        gateway_wait_ms=percentiles(outcome.gateway_waits),
        block_hit_rate=hit_rate,
        of_pooled_lru=hit_rate / pooled if pooled else 1.0,
        fetched_block_rate=sum(worker.fetches.blocks for worker in outcome.workers) / blocks if blocks else 0.0,
        ttft_ms=percentiles([served.ttft_s for served in outcome.served]),
        itl_ms=weighted_percentiles(gaps),
        e2e_ms=percentiles([served.e2e_s for served in outcome.served]),
        goodput_requests_per_s=None if slo is None else len(good) / seconds,
        output_tokens_per_s=sum(served.request.total_output_tokens for served in outcome.served) / seconds,
        simulated_s=outcome.seconds,
        balance=Balance(
            outstanding=_ratio(outcome.outstanding_most, outcome.outstanding_mean),
            prompt_tokens=busiest_over_mean([done.computed_tokens for done in computing]),
            requests=busiest_over_mean([done.requests for done in computing]),
        ),
        utilisation=sum(worker.done.busy_s for worker in outcome.workers) / len(outcome.workers) / seconds,
        placements={placement.value: count for placement, count in sorted(outcome.placements.items())},
        tenants=_by_tenant(outcome),
    )


def _by_tenant(outcome: Outcome) -> dict[str, TenantReport]:
    refused = Counter(request.tenant.name for request in outcome.refused)
    served: dict[str, list[Served]] = {name: [] for name in refused}
    for each in outcome.served:
        served.setdefault(each.request.tenant.name, []).append(each)
    return {
        name: TenantReport(
            requests=len(found),
            refused=refused[name],
            prompt_tokens=sum(each.request.prompt_tokens for each in found),
            output_tokens=sum(each.request.total_output_tokens for each in found),
            ttft_ms=percentiles([each.ttft_s for each in found]),
            e2e_ms=percentiles([each.e2e_s for each in found]),
        )
        for name, found in sorted(served.items())
        if name != EVERYBODY
    }


def is_good(served: Served, slo: Slo) -> bool:
    """Whether a request met every bound; ITL by its mean, as in `tandem bench serve`."""
    bounds = ((slo.ttft_ms, served.ttft_s), (slo.itl_ms, served.mean_gap_s), (slo.e2e_ms, served.e2e_s))
    return all(limit is None or value * 1e3 <= limit for limit, value in bounds)


def weighted_percentiles(counts: Mapping[float, int]) -> Percentiles | None:
    """`percentiles` of values (seconds) that occur as often as `counts` says."""
    total = sum(counts.values())
    if not total:
        return None
    ranked = sorted(counts)

    def rank(share: float) -> float:
        wanted, passed = math.ceil(share * total), 0
        for value in ranked:
            passed += counts[value]
            if passed >= wanted:
                return value * 1e3
        return ranked[-1] * 1e3

    mean = sum(value * 1e3 * count for value, count in counts.items()) / total
    return Percentiles(mean=mean, p50=rank(0.5), p90=rank(0.9), p99=rank(0.99), max=ranked[-1] * 1e3)


def busiest_over_mean(values: Sequence[float]) -> float:
    """1 when nobody has done anything."""
    return _ratio(max(values) * len(values), sum(values))


def _ratio(value: float, mean: float) -> float:
    return value / mean if mean else 1.0
