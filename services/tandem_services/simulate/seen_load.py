"""What the operator would make of a simulated fleet: figures as its pods would tell them, and the operator's own
code from there to `Load` (`tandem_operator.telemetry`).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from tandem_engine.config import Role
from tandem_operator.api.roles import ROLES, RoleName
from tandem_operator.scaling.load import Load
from tandem_operator.telemetry.demand import Demand, Gain
from tandem_operator.telemetry.figures import GatewayFigures, GatewayTotals, WorkerFigures
from tandem_operator.telemetry.summing import Sizes, load_of
from tandem_services.simulate.fleet import Fleet, FleetShape
from tandem_services.simulate.gateway import Held
from tandem_services.simulate.worker import ModelledWorker

ROLE_OF: dict[RoleName, Role] = {"prefill": Role.PREFILL, "decode": Role.DECODE}


@dataclass(slots=True)
class GatewayCounters:
    """All gateways' together, since the start of a run. Names are those of `GatewayTotals`."""

    choices: int = 0
    asked_tokens: int = 0
    predicted_tokens: int = 0
    first_token_s: float = 0.0
    first_tokens: int = 0
    finished_s: float = 0.0
    finished: int = 0

    def asked(self, prompt_tokens: int) -> None:
        """A request has come."""
        self.choices += 1
        self.asked_tokens += prompt_tokens

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
    demand: Demand = field(default_factory=Demand)
    _before: GatewayFigures | None = None

    @staticmethod
    def of(fleet: Fleet, shape: FleetShape, held: Callable[[], Held]) -> "SeenLoad":
        """Of a fleet whose workers are like `shape`, also while there is none of a role."""
        sizes = Sizes(tokens_per_s=shape.times.prefill_rate, places=shape.max_sequences, pages=shape.cache_blocks)
        return SeenLoad(fleet=fleet, held=held, sizes=sizes)

    def load(self, period_s: float) -> Load:
        """Now; `period_s` after the last time."""
        workers = [_worker(role, each) for role in ROLES for each in self.fleet.offered(ROLE_OF[role])]
        self.sizes.take(workers)
        gateway = self._gateway()
        gain = self._gain(gateway, period_s)
        self._before = gateway
        self.demand.take([gain])
        return load_of(
            at=self.fleet.redis.events.now(),
            age_s=0.0,
            workers=workers,
            gateways=[gateway],
            rates=self.demand.rates([gain]),
            sizes=self.sizes,
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
        )

    def _gain(self, now: GatewayFigures, seconds: float) -> Gain:
        if self._before is None:
            return Gain(totals=now.totals, seconds=seconds, waiting_tokens=now.waiting_tokens)
        return Gain(
            totals=now.totals.since(self._before.totals),
            seconds=seconds,
            waiting_tokens=now.waiting_tokens - self._before.waiting_tokens,
        )


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
