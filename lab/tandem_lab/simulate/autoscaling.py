"""Autoscaling in the simulator: workers that start and leave during a run, by several scalers in comparison.

    each period   arrivals, queued and running requests → `Load` → the scaler → workers that start, flip, or leave
    start         a worker is requested, and joins after `start_s`; it costs from the request on
    flip          a worker leaves its role when it has finished its requests, and joins the other after `flip_s`
    leave         the emptiest first; it costs until it has finished its requests

The scalers are the operator's policy (`Law`, with the operator's own code of `tandem_operator.scaling`), by queues or
by latency objectives, one like an HPA's (`Hpa`), and a constant number (`Static`). All get the same load at the same
times.

`SeenLatency` has what gateways export about latencies, in the same buckets. Predictions are not simulated: factors
are 1.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf
from statistics import linear_regression
from typing import Protocol

from tandem_engine.config import Role
from tandem_lab.bench.load import Slo
from tandem_lab.simulate.fleet import Fleet, FleetShape
from tandem_lab.simulate.gateway import Held
from tandem_lab.simulate.worker import ModelledWorker
from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.scaling.distribution import Distribution
from tandem_operator.scaling.load import Load
from tandem_operator.scaling.policy import RoleBounds, ScalingConfig, ScalingState, Window, decide
from tandem_operator.telemetry.latency_metrics import LatencyTotals, StepFit
from tandem_operator.telemetry.latency_window import LatencyWindow
from tandem_operator.telemetry.pod_metrics import GatewayFigures, GatewayTotals, WorkerFigures
from tandem_operator.telemetry.samples import Demand, Gain, Sizes, decoding_of, load_of
from tandem_services.common.metrics import PROMPT_TOKENS, REQUEST_SECONDS, TOKEN_SECONDS

Counts = dict[RoleName, int]
HPA_TOLERANCE = 0.1

HPA_DOWN_WINDOW_S = 300.0
"""Both as the HorizontalPodAutoscaler has them by default."""


class Scaler(Protocol):
    """Asked once a period."""

    def decide(self, load: Load, there: Mapping[RoleName, int]) -> tuple[Counts, int]:
        """Workers wanted of each role, and how many change from decode to prefill (negative: the other way)."""
        ...


@dataclass(slots=True)
class Law:
    """The operator's."""

    config: ScalingConfig
    _memory: ScalingState = field(default_factory=ScalingState)

    def decide(self, load: Load, there: Mapping[RoleName, int]) -> tuple[Counts, int]:
        outcome = decide(load, there, self._memory, self.config)
        self._memory = outcome.memory
        return dict(outcome.wanted), outcome.flips


def config_of_objectives(config: ScalingConfig, slo: Slo, percentile: float) -> ScalingConfig:
    """`config` with the bounds of `slo` as objectives."""

    def seconds(bound_ms: float | None) -> float | None:
        return None if bound_ms is None else bound_ms / 1e3

    def with_latency(role: RoleBounds, latency_s: float | None) -> RoleBounds:
        return replace(role, targets=replace(role.targets, latency_s=latency_s, percentile=percentile))

    return replace(
        config,
        prefill=with_latency(config.prefill, seconds(slo.ttft_ms)),
        decode=with_latency(config.decode, seconds(slo.itl_ms)),
    )


@dataclass(slots=True)
class Hpa:
    """Each role for itself: replicas in proportion to a metric over its target, as Kubernetes computes it.

    The metric of prefill is queued tokens per worker, with the queue that a worker clears within the target time as
    its target; that of decode is the share of places in use.
    """

    config: ScalingConfig
    _windows: dict[RoleName, Window] = field(default_factory=dict)

    def decide(self, load: Load, there: Mapping[RoleName, int]) -> tuple[Counts, int]:
        prefill, decode = load.prefill, load.decode
        per_worker = prefill.worker_tokens_per_s * self.config.prefill.targets.queue_seconds
        ratios: dict[RoleName, float] = {
            "prefill": prefill.queued_tokens / max(1.0, per_worker * there["prefill"]),
            "decode": (decode.running + decode.waiting) / max(1.0, decode.worker_places * there["decode"]) / 0.8,
        }
        return {role: self._replicas(role, ratios[role], there[role], load.at) for role in ROLES}, 0

    def _replicas(self, role: RoleName, ratio: float, now: int, at: float) -> int:
        wanted = now if abs(ratio - 1.0) <= HPA_TOLERANCE else ceil(now * ratio)
        bounds = self.config.bounds(role)
        wanted = min(max(wanted, bounds.least, 1), bounds.most)
        window = self._windows.get(role, Window()).add(at, wanted, HPA_DOWN_WINDOW_S)
        self._windows[role] = window
        # At most double, or four more, in one period.
        return min(window.most(at, HPA_DOWN_WINDOW_S), max(now * 2, now + 4))


@dataclass(frozen=True, slots=True)
class Static:
    """As many as the fleet begins with."""

    def decide(self, load: Load, there: Mapping[RoleName, int]) -> tuple[Counts, int]:
        del load
        return {role: there[role] for role in ROLES}, 0


ROLE_OF: dict[RoleName, Role] = {"prefill": Role.PREFILL, "decode": Role.DECODE}


@dataclass(slots=True)
class _Histogram:
    """As a gateway has it."""

    bounds: Sequence[float]
    counts: list[float] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0.0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def distribution(self) -> Distribution:
        return Distribution.of((*self.bounds, inf), self.counts, self.sum)


@dataclass(slots=True)
class SeenLatency:
    """What all gateways export about latencies since the start of a run. Objectives are judged by the report."""

    gap_square_s: float = 0.0
    output_tokens: float = 0.0
    uncached: _Histogram = field(default_factory=lambda: _Histogram(PROMPT_TOKENS))
    ttft_s: _Histogram = field(default_factory=lambda: _Histogram(REQUEST_SECONDS))
    itl_s: _Histogram = field(default_factory=lambda: _Histogram(TOKEN_SECONDS))
    _asked_at: float | None = None

    def asked(self, at: float) -> None:
        """A choice has come."""
        if self._asked_at is not None:
            self.gap_square_s += (at - self._asked_at) ** 2
        self._asked_at = at

    def ended(self, *, ttft_s: float, gap_s: float, output_tokens: int) -> None:
        """The last token of a request is out. `gap_s`: mean time between its tokens."""
        self.ttft_s.observe(ttft_s)
        self.output_tokens += output_tokens
        if output_tokens > 1:
            self.itl_s.observe(gap_s, output_tokens - 1)

    def totals(self) -> LatencyTotals:
        return LatencyTotals(
            gap_square_s=self.gap_square_s,
            output_tokens=self.output_tokens,
            uncached=self.uncached.distribution(),
            ttft_s=self.ttft_s.distribution(),
            itl_s=self.itl_s.distribution(),
        )


@dataclass(slots=True)
class GatewayCounters:
    """All gateways' together, since the start of a run. Names are those of `GatewayTotals`."""

    choices: int = 0
    requested_tokens: int = 0
    predicted_tokens: int = 0
    first_token_s: float = 0.0
    first_tokens: int = 0
    finished_s: float = 0.0
    finished: int = 0

    def asked(self, prompt_tokens: int) -> None:
        """A request has come."""
        self.choices += 1
        self.requested_tokens += prompt_tokens

    def admitted(self, cached_tokens: int) -> None:
        """It has a worker, which is predicted to have so many of its tokens cached."""
        self.predicted_tokens += cached_tokens

    def began(self, ttft_s: float) -> None:
        """Its first token is out."""
        self.first_tokens += 1
        self.first_token_s += ttft_s

    def ended(self, e2e_s: float) -> None:
        """Its last token is out."""
        self.finished += 1
        self.finished_s += e2e_s

    def totals(self) -> GatewayTotals:
        return GatewayTotals(**asdict(self))


@dataclass(kw_only=True, slots=True)
class SeenLoad:
    """One run's."""

    fleet: Fleet
    held: Callable[[], Held]
    """What waits at gateways."""
    sizes: Sizes
    counters: GatewayCounters = field(default_factory=GatewayCounters)
    latency: SeenLatency = field(default_factory=SeenLatency)
    demand: Demand = field(default_factory=Demand)
    window: LatencyWindow = field(default_factory=LatencyWindow)
    _before: GatewayFigures | None = None

    @staticmethod
    def of(fleet: Fleet, shape: FleetShape, held: Callable[[], Held]) -> "SeenLoad":
        """Of a fleet whose workers are like `shape`, also while there is none of a role."""
        sizes = Sizes(
            tokens_per_s=shape.times.prefill_rate,
            places=shape.max_sequences,
            pages=shape.cache_blocks,
            step_fit=_step_fit(shape),
        )
        return SeenLoad(fleet=fleet, held=held, sizes=sizes)

    def load(self, period_s: float) -> Load:
        """Now; `period_s` after the last time."""
        workers = [_worker(role, each) for role in ROLES for each in self.fleet.offered(ROLE_OF[role])]
        self.sizes.take(workers)
        gateway = self._gateway()
        gain = self._gain(gateway, period_s)
        self._before = gateway
        self.demand.take([gain])
        self.window.take([gain.traffic("simulated")], [], decoding_of(workers, [gateway], self.sizes))
        return load_of(
            at=self.fleet.redis.events.now(),
            age_s=0.0,
            workers=workers,
            gateways=[gateway],
            rates=self.demand.rates([gain]),
            sizes=self.sizes,
            latency=self.window,
        )

    def _gateway(self) -> GatewayFigures:
        """All of them, as one."""
        held = self.held()
        return GatewayFigures(
            answering=held.requests + sum(each.outstanding for each in self.fleet.workers.values()),
            waiting=held.requests,
            held=held.without_worker,
            waiting_tokens=held.prompt_tokens,
            oldest_wait_s=held.oldest_wait_s,
            totals=self.counters.totals(),
            latency=self.latency.totals(),
        )

    def _gain(self, now: GatewayFigures, seconds: float) -> Gain:
        if self._before is None:
            return Gain(totals=now.totals, seconds=seconds, waiting_tokens=now.waiting_tokens, latency=now.latency)
        return Gain(
            totals=now.totals.since(self._before.totals),
            seconds=seconds,
            waiting_tokens=now.waiting_tokens - self._before.waiting_tokens,
            latency=now.latency.since(self._before.latency),
        )


def _step_fit(shape: FleetShape) -> StepFit:
    """The line of least squares through the steps of all batches, as an engine fits it to those that it has had."""
    batches = range(1, shape.max_sequences + 1)
    steps = [shape.times.decode_step_s(batch) for batch in batches]
    if len(steps) == 1:
        return StepFit(steps[0], 0.0, 0.0)
    each, base_s = linear_regression(batches, steps)
    return StepFit(max(0.0, base_s), max(0.0, each), 0.0)


def _worker(role: RoleName, worker: ModelledWorker) -> WorkerFigures:
    """Sequences beyond a worker's places wait. How long its prompts have waited is not modelled."""
    load, cache = worker.load(), worker.cache
    return WorkerFigures(
        serves=role,
        draining=False,
        age_s=0.0,
        running=min(load.sequences, load.max_sequences),
        waiting=max(0.0, load.sequences - load.max_sequences),
        transferring=0.0,
        inflight=0.0,
        leaving=0.0,
        waiting_tokens=load.queue_tokens,
        oldest_wait_s=0.0,
        places=load.max_sequences,
        tokens_per_s=load.prefill_rate,
        pages=cache.capacity,
        used_pages=cache.capacity - cache.room,
    )


FLIP_S = 1.0
"""A live worker changes its role without loading anything (docs/worker-commands.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingCosts:
    """What scaling takes."""

    period_s: float = 5.0
    start_s: float = 60.0
    """From the decision to a worker that takes requests: pod, image, weights, warming up."""


@dataclass(slots=True)
class Autoscaling:
    """One run's. `begin` plans the first look."""

    fleet: Fleet
    scaler: Scaler
    costs: ScalingCosts
    seen: SeenLoad
    starting: Counts = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    cancelled: Counts = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    """Of those that start, as many are not wanted any more when they are there."""
    worker_seconds: float = 0.0
    most: int = 0
    changes: int = 0

    def begin(self) -> None:
        self.fleet.redis.events.after(self.costs.period_s, self._look)

    def there(self) -> Counts:
        """Workers of each role, those that start included."""
        return {role: len(self.fleet.offered(ROLE_OF[role])) + self._coming(role) for role in ROLES}

    async def _look(self) -> None:
        if self.fleet.closing:
            return
        paid = len(self.fleet.workers) + sum(self.starting.values())
        self.worker_seconds += paid * self.costs.period_s
        self.most = max(self.most, paid)
        await self.fleet.redis.follow()
        there = self.there()
        wanted, flips = self.scaler.decide(self.seen.load(self.costs.period_s), there)
        self.changes += wanted != there
        giver: RoleName = "decode" if flips > 0 else "prefill"
        taker: RoleName = "prefill" if flips > 0 else "decode"
        for _ in range(abs(flips)):
            await self._flip(giver, taker)
        now = self.there()
        for role in ROLES:
            for _ in range(wanted[role] - now[role]):
                self._start(role, self.costs.start_s)
            for _ in range(now[role] - wanted[role]):
                await self._stop(role)
        self.fleet.redis.events.after(self.costs.period_s, self._look)

    def _coming(self, role: RoleName) -> int:
        return self.starting[role] - self.cancelled[role]

    def _start(self, role: RoleName, seconds: float) -> None:
        if self.cancelled[role]:
            self.cancelled[role] -= 1
            return
        self.starting[role] += 1
        self.fleet.redis.events.after(seconds, lambda: self._join(role))

    async def _join(self, role: RoleName) -> None:
        self.starting[role] -= 1
        if self.cancelled[role]:
            self.cancelled[role] -= 1
            return
        if self.fleet.closing:
            return
        await self.fleet.redis.follow()
        await self.fleet.join(ROLE_OF[role])

    async def _stop(self, role: RoleName) -> None:
        if self._coming(role):
            self.cancelled[role] += 1
            return
        worker = self._emptiest(role)
        if worker is not None:
            await self.fleet.leave(worker)

    async def _flip(self, giver: RoleName, taker: RoleName) -> None:
        worker = self._emptiest(giver)
        if worker is not None:
            await self.fleet.leave(worker)
            self._start(taker, FLIP_S)

    def _emptiest(self, role: RoleName) -> ModelledWorker | None:
        return min(self.fleet.offered(ROLE_OF[role]), key=lambda each: each.outstanding, default=None)
