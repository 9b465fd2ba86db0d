"""Rejects new requests whose latency objectives are predicted to be missed, if the gateway is set to (`SloMode`).

A request is judged whenever the router offers workers for it, with the time that it has waited so far: queue, prefill
and the sequences of the decode worker are those that it would meet there. One that comes behind others is judged by its
expected wait alone before it takes a seat, so that it is rejected at once and not after the wait.

Idle workers accept any request. The model is corrected by requests that were admitted, so one that predicts too much
would reject all requests for good.

A prompt that takes too long without any queue is rejected without a time to retry. For others `Promises` makes
Retry-After honest. A rejected request is to come back when the work ahead of it has drained. Its own
prompt is booked from then on, so that those rejected together come back one after the other, at the rate at which the
fleet computes. It is booked for its tenant: rejected requests cost nothing, and a flood of them must not make the
times of other tenants later. What is booked drains as time passes. A promise is kept if the first request with
objectives that is judged after its time is predicted to meet them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from tandem_engine.base.clock import Clock
from tandem_services.common.errors import ApiError
from tandem_services.common.metrics import MetricFamilies
from tandem_services.common.recording import estimating, recording
from tandem_services.gateway.objectives import STRICT_FACTOR, Objectives, SloMode
from tandem_services.gateway.observe.metrics import MODEL
from tandem_services.gateway.observe.predictions import Predictions
from tandem_services.router.calibration import split
from tandem_services.router.decision import RouteDecision
from tandem_services.router.latency import DECODE_STEP
from tandem_services.router.scoring import DECODE_ROOM, PREFILL_QUEUE

ITL_DRAIN_TOKENS = 64
"""Tokens after which a sequence is expected to have left a decode worker, where only the time between tokens is too
long."""

BUSY_TERMS = frozenset({PREFILL_QUEUE, "decode_load", DECODE_ROOM})
"""Terms of a price that idle workers do not have."""

MAX_RETRY_S = 3_600.0
MAX_PROMISES = 1_024


@dataclass(kw_only=True, slots=True)
class Promises:
    """When rejected requests are to come back. One per model service."""

    clock: Clock
    _drained_at: dict[str, float] = field(default_factory=dict)
    """When all that is promised to a tenant will be computed."""
    _due: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_PROMISES))

    def make(self, tenant: str, *, drain_s: float, work_s: float) -> float:
        """Seconds until a request of `tenant` may come back whose prompt takes the fleet `work_s`, when `drain_s` of
        other work is ahead of it."""
        now = self.clock.now()
        if len(self._drained_at) >= MAX_PROMISES:
            self._drained_at = {name: end for name, end in self._drained_at.items() if end > now}
        at = min(max(now + drain_s, self._drained_at.get(tenant, -inf)), now + MAX_RETRY_S)
        self._drained_at[tenant] = at + work_s
        self._due.append(at)
        return at - now

    def take_due(self) -> int:
        """Promises whose time has come since the last call."""
        now = self.clock.now()
        due = [at for at in self._due if at <= now]
        if due:
            self._due = deque((at for at in self._due if at > now), maxlen=MAX_PROMISES)
        return len(due)


class SloAdmission:
    """One per model service; belongs to its event loop."""

    def __init__(
        self, families: MetricFamilies, *, model: str, mode: SloMode, clock: Clock, predictions: Predictions
    ) -> None:
        self.mode = mode
        self.promises = Promises(clock=clock)
        self._predictions = predictions
        self._model = model
        self._kept = families.counter(
            "tandem_gateway_retry_promises",
            "Times of Retry-After that have come, by whether a request was predicted to meet its objectives then",
            [MODEL, "kept"],
        )

    @estimating(lambda *_: True)
    def may_reject(self, priority: int) -> bool:
        """Whether a request with objectives may be rejected because of the workers that are offered to it."""
        return self._allowed(priority) < inf

    @recording
    def judge_wait(
        self,
        objectives: Objectives | None,
        *,
        tenant: str,
        priority: int,
        wait_s: float,
        work_s: Callable[[], float],
    ) -> None:
        """Of a request that comes behind others, whose prompt takes the fleet `work_s`. Raises `ApiError` 429."""
        if objectives is None or objectives.ttft_s is None:
            return
        if wait_s > self._allowed(priority) * objectives.ttft_s:
            raise self._unattainable(tenant, drain_s=wait_s - objectives.ttft_s, work_s=work_s())

    @estimating(lambda *_, **__: None)
    def judge(
        self,
        decision: RouteDecision,
        objectives: Objectives | None,
        *,
        tenant: str,
        priority: int,
        waited_s: float,
        work_s: Callable[[], float],
    ) -> ApiError | None:
        """The rejection of a request that would have the workers of `decision`, after `waited_s` here."""
        if objectives is None or self.mode is SloMode.OBSERVE:
            return None
        predicted = self._predictions.predict(decision, gateway_wait_s=0.0)
        if predicted is None:
            return None
        ttft_s = waited_s + predicted.ttft_s * predicted.margin
        itl_s = (predicted.itl_s or 0.0) * predicted.itl_margin
        late_s = ttft_s - (inf if objectives.ttft_s is None else objectives.ttft_s)
        slow_s = itl_s - (inf if objectives.itl_s is None else objectives.itl_s)
        self._note_due(met=late_s <= 0.0 and slow_s <= 0.0)
        factor = self._allowed(priority)
        misses_ttft = objectives.ttft_s is not None and ttft_s > factor * objectives.ttft_s
        misses_itl = objectives.itl_s is not None and itl_s > factor * objectives.itl_s
        if not (misses_ttft or misses_itl) or _is_idle(decision):
            return None
        queue_s, _ = split(predicted.terms)
        step_s = sum(term.seconds for term in predicted.terms if term.name == DECODE_STEP)
        alone_s = (predicted.ttft_s - predicted.queue * queue_s - predicted.compute * step_s) * predicted.margin
        if objectives.ttft_s is not None and alone_s > factor * objectives.ttft_s:
            return _too_long(objectives.ttft_s)
        drain_s = max(late_s if misses_ttft else 0.0, ITL_DRAIN_TOKENS * itl_s if misses_itl else 0.0)
        return self._unattainable(tenant, drain_s=drain_s, work_s=work_s())

    def _allowed(self, priority: int) -> float:
        """Times an objective that a request may be predicted to take."""
        match self.mode:
            case SloMode.STRICT:
                return STRICT_FACTOR
            case SloMode.SHED if priority < 0:
                return 1.0
            case _:
                return inf

    def _note_due(self, *, met: bool) -> None:
        due = self.promises.take_due()
        if due:
            self._kept.series(self._model, "true" if met else "false").inc(due)

    def _unattainable(self, tenant: str, *, drain_s: float, work_s: float) -> ApiError:
        return ApiError(
            429,
            "The latency objectives of the request cannot be met now. Try again later, or relax x-slo-ttft-ms, "
            "x-slo-tpot-ms or slo.",
            kind="RateLimitError",
            reason="slo_unattainable",
            retry_after=self.promises.make(tenant, drain_s=max(drain_s, 0.0), work_s=work_s),
        )


def _too_long(ttft_s: float) -> ApiError:
    """Waiting helps nothing, so there is no time to retry."""
    return ApiError(
        429,
        f"The prompt cannot be computed within the objective of {1000 * ttft_s:g} ms to the first token, even by idle "
        "workers. Shorten it, or relax x-slo-ttft-ms or slo.",
        kind="RateLimitError",
        reason="slo_unattainable",
    )


def _is_idle(decision: RouteDecision) -> bool:
    """Whether the workers that are cheapest for a request have nothing to do: then no other time is better, and what it
    takes there corrects the model."""
    return all(term.seconds <= 0.0 for term in decision.terms if term.name in BUSY_TERMS)
