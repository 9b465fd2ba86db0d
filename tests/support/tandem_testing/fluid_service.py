"""A service as a fluid: work comes in, workers drain it, pods take time to start. For the scaling law.

Prefill is tokens per second through a queue. A decode sequence holds a place and pages for `decode_s` seconds.
"""

from dataclasses import dataclass, field

from tandem_operator.api.types import ROLES
from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad, Targets
from tandem_operator.scaling.policy import Outcome, RoleBounds, ScalingConfig, ScalingState, decide

PERIOD_S = 5.0


def config_of(**changes) -> ScalingConfig:
    """Both roles from 1 to 16 workers of one GPU, a queue of one second, quick windows."""
    role = RoleBounds(least=1, most=16, targets=Targets(queue_seconds=1.0, kv_usage=0.85), gpus=1)
    values = {"prefill": role, "decode": role, "scale_down_window_s": 60.0, "cooldown_s": 20.0, **changes}
    return ScalingConfig(**values)


@dataclass
class FluidService:
    """One autoscaled service; `step` is one period of the autoscaler."""

    config: ScalingConfig
    there: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    start_periods: int = 4
    """How long a new pod takes."""
    worker_tokens_per_s: float = 1000.0
    places: float = 32.0
    decode_s: float = 10.0
    queued_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    held: float = 0.0
    arrived_tokens: float = 0.0
    arrived: float = 0.0
    memory: ScalingState = field(default_factory=ScalingState)
    now: float = 0.0
    coming: list[tuple[float, str]] = field(default_factory=list)
    """Pods on their way: when, and of which role."""
    history: list[dict[str, int]] = field(default_factory=list)

    def ready(self, role: str) -> int:
        return self.there[role] - sum(1 for _, one in self.coming if one == role)

    def load(self, age_s: float = 0.5) -> Load:
        return Load(
            at=self.now,
            age_s=age_s,
            prefill=PrefillLoad(
                queued_tokens=self.queued_tokens,
                oldest_wait_s=self.queued_tokens / self.worker_tokens_per_s,
                arrived_tokens_per_s=self.arrived_tokens,
                worker_tokens_per_s=self.worker_tokens_per_s,
            ),
            decode=DecodeLoad(
                running=self.running,
                waiting=self.waiting,
                oldest_wait_s=0.0,
                arrived_per_s=self.arrived,
                seconds_each=self.decode_s,
                worker_places=self.places,
                used_pages=self.running * 10,
                worker_pages=self.places * 20,
            ),
            held=self.held,
        )

    def step(self, tokens_per_s: float, requests_per_s: float) -> Outcome:
        """Work for one period, then decide."""
        self.now += PERIOD_S
        self.coming = [one for one in self.coming if one[0] > self.now]
        can = self.ready("prefill") * self.worker_tokens_per_s * PERIOD_S
        work = self.queued_tokens + tokens_per_s * PERIOD_S
        done = min(can, work)
        self.arrived_tokens, self.queued_tokens = tokens_per_s, work - done
        self.arrived = requests_per_s
        self.waiting += requests_per_s * PERIOD_S
        self.running = max(0.0, self.running - self.running * PERIOD_S / self.decode_s)
        admitted = min(self.waiting, max(0.0, self.ready("decode") * self.places - self.running))
        self.running, self.waiting = self.running + admitted, self.waiting - admitted
        incomplete = not (self.ready("prefill") and self.ready("decode"))
        self.held = self.waiting if incomplete else 0.0
        outcome = decide(self.load(), self.there, self.memory, self.config)  # type: ignore[arg-type]
        self.memory = outcome.memory
        self._carry_out(outcome)
        self.history.append(dict(self.there))
        return outcome

    def _carry_out(self, outcome: Outcome) -> None:
        giver, taker = ("decode", "prefill") if outcome.flips > 0 else ("prefill", "decode")
        self.there[giver] -= abs(outcome.flips)
        self.there[taker] += abs(outcome.flips)
        for role in ROLES:
            change = outcome.wanted[role] - self.there[role]
            self.coming += [(self.now + self.start_periods * PERIOD_S, role)] * max(0, change)
            for _ in range(max(0, -change)):
                newest = next((one for one in reversed(self.coming) if one[1] == role), None)
                if newest is not None:
                    self.coming.remove(newest)
            self.there[role] = outcome.wanted[role]
