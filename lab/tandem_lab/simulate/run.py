"""A whole simulation: one replay for each policy, or for each scaler, on one trace, one fleet and one Redis."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import cast

from tandem_lab.bench.load import Slo
from tandem_lab.simulate.block_cache import infinite_cache, pooled_lru
from tandem_lab.simulate.clock import PATIENCE_S, PRICE_ALL
from tandem_lab.simulate.fleet import FleetShape
from tandem_lab.simulate.gateway import GatewayShape
from tandem_lab.simulate.replay import Scaled, replay
from tandem_lab.simulate.report import (
    PolicyReport,
    Report,
    ScalerReport,
    ScalingReport,
    TraceLimits,
    over_hpa,
    policy_report,
    scaler_report,
)
from tandem_lab.simulate.requests import SimulatedRequest
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.policies import PolicyNames


class CandidateLimit(StrEnum):
    """Which workers a decision prices."""

    FEW = "few"
    """As the product: all of a small fleet, few of a large one."""
    ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    requests: Sequence[SimulatedRequest]
    shape: FleetShape
    policies: Mapping[str, PolicyNames]
    """By the name that the report uses."""
    local_prefill_tokens: int
    seed: int
    slo: Slo | None = None
    gateways: GatewayShape = field(default_factory=GatewayShape)
    candidates: Sequence[CandidateLimit] = (CandidateLimit.FEW,)
    cells: int = 1

    def names(self) -> dict[str, tuple[PolicyNames, CandidateLimit]]:
        """What is compared, by the name that the report uses."""
        if len(self.candidates) == 1:
            return {name: (policies, self.candidates[0]) for name, policies in self.policies.items()}
        pairs = product(self.policies.items(), self.candidates)
        return {f"{name}, {limit}": (policies, limit) for (name, policies), limit in pairs}

    async def run(self, redis: RedisAddress, on_served: Callable[[str], None]) -> Report:
        """`on_served` is called with a name of `names` for each request. Raises `RedisUnavailableError`."""
        limits, client = self.limits(), RedisClient(redis, timeout_s=PATIENCE_S)
        try:
            return await self._run(redis, on_served, limits, client)
        finally:
            await client.close()

    async def _run(
        self, redis: RedisAddress, on_served: Callable[[str], None], limits: TraceLimits, client: RedisClient
    ) -> Report:
        began, spent_s = time.monotonic(), await _cpu_s(client)
        reports: dict[str, PolicyReport] = {}
        for number, (name, (policies, limit)) in enumerate(self.names().items()):
            outcome = await replay(
                self.requests,
                self.shape,
                redis=redis,
                cluster=f"simulation-{number}",
                policies=policies,
                local_prefill_tokens=self.local_prefill_tokens,
                seed=self.seed,
                on_served=lambda name=name: on_served(name),  # type: ignore[misc]
                gateways=self.gateways,
                constants=PRICE_ALL if limit is CandidateLimit.ALL else {},
                cells=self.cells,
            )
            reports[name] = policy_report(outcome, pooled=limits.pooled_lru_hit_rate, slo=self.slo, cells=self.cells)
        minutes = (time.monotonic() - began) / 60
        simulated_s = sum(each.simulated_s for each in reports.values())
        return Report(
            trace=limits,
            policies=reports,
            requests_per_minute=len(self.requests) * len(reports) / minutes,
            redis_share=(await _cpu_s(client) - spent_s) / (simulated_s * self.cells) if simulated_s else 0.0,
        )

    def limits(self) -> TraceLimits:
        chains = [request.chain for request in self.requests for _ in range(request.choices)]
        capacity = self.shape.cache_blocks * self.shape.computing
        return TraceLimits(
            requests=len(self.requests),
            blocks=sum(len(chain) for chain in chains),
            distinct_blocks=distinct_blocks(self.requests),
            cache_blocks=capacity,
            infinite_cache_hit_rate=infinite_cache(chains).share,
            pooled_lru_hit_rate=pooled_lru(chains, capacity).share,
        )


async def _cpu_s(client: RedisClient) -> float:
    """Of Redis, since it was started. Raises `RedisUnavailableError`."""
    fields = cast("Mapping[str, float]", await client.command("INFO", "cpu"))
    return fields["used_cpu_user"] + fields["used_cpu_sys"]


def distinct_blocks(requests: Sequence[SimulatedRequest]) -> int:
    """Whole blocks of a trace, each counted once."""
    return len({block for request in requests for block in request.chain})


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingSimulation:
    """Scalers side by side, all with one routing policy."""

    simulation: Simulation
    scalers: Mapping[str, Scaled]
    slo: Slo

    async def run(self, redis: RedisAddress, on_served: Callable[[str], None]) -> ScalingReport:
        """As `Simulation.run`; the name is the scaler's."""
        whole = self.simulation
        began, longest = time.monotonic(), 0.0
        reports: dict[str, ScalerReport] = {}
        for number, (name, scaled) in enumerate(self.scalers.items()):
            outcome = await replay(
                whole.requests,
                whole.shape,
                redis=redis,
                cluster=f"scaling-{number}",
                policies=next(iter(whole.policies.values())),
                local_prefill_tokens=whole.local_prefill_tokens,
                seed=whole.seed,
                on_served=lambda name=name: on_served(name),  # type: ignore[misc]
                gateways=whole.gateways,
                scaled=scaled,
            )
            longest = max(longest, outcome.seconds)
            reports[name] = scaler_report(outcome, self.slo)
        minutes = (time.monotonic() - began) / 60
        return ScalingReport(
            requests=len(whole.requests),
            simulated_s=longest,
            scalers=reports,
            over_hpa=over_hpa(reports),
            requests_per_minute=len(whole.requests) * len(self.scalers) / minutes,
        )
