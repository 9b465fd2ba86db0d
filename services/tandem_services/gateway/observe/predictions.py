"""Predicted latencies of requests, and what became of them: the calibration of one model service and its metrics.

    predict     when the workers of a first attempt are chosen: goes into its record, and to the client as a header
    finished    measured against predicted, and against the objectives of the request; what is measured corrects later
                predictions

The calibration learns from requests with one choice, one attempt, an output that has ended, and no error. A retried,
moved or canceled request leaves it as it was, and so does one that has waited for a worker to start.

Predictions are statistics. No error in them may end a request, so errors are counted.
"""

import logging
from collections.abc import Callable, Iterable
from math import isfinite
from typing import NamedTuple

from tandem_engine.base.clock import Clock
from tandem_services.common.metrics import MetricFamilies
from tandem_services.common.recording import estimating, recording
from tandem_services.gateway.objectives import Objectives
from tandem_services.gateway.observe.explain import RequestRecord
from tandem_services.gateway.observe.metrics import MODEL
from tandem_services.router.calibration import Calibration, Factors, Measured, Prediction
from tandem_services.router.decision import Placement, RouteDecision

logger = logging.getLogger(__name__)

HEADER = b"x-tandem-predicted-ttft-ms"

LEARNED_PER_SECOND = 64
"""Of requests that end in the same second: enough to follow any change, and then learning costs a busy gateway
next to nothing."""

TOO_MANY = 429

RATIOS = (0.1, 0.2, 1 / 3, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Buckets of measured over predicted: 1 is right, and 0.8 to 1.25 good."""

FACTORS: dict[str, Callable[[Factors], float]] = {
    "queue": lambda factors: factors.queue,
    "compute": lambda factors: factors.compute,
    "itl": lambda factors: factors.itl,
    "ttft_margin": lambda factors: factors.margin,
    "itl_margin": lambda factors: factors.itl_margin,
}


class Judged(NamedTuple):
    """A request that the calibration learns from."""

    prediction: Prediction
    measured: Measured


def judged(record: RequestRecord) -> Judged | None:
    """None of a request with several choices, attempts or an error, and of one that was canceled, not predicted, or
    came while there was no worker: a minute of waiting for a start would be learned as that of a queue.
    """
    if record.status != 200 or record.error is not None or len(record.choices) != 1:
        return None
    [choice] = record.choices
    if choice.ttft_s is None or choice.finish_reason is None or len(choice.attempts) != 1 or choice.lacked_workers:
        return None
    [attempt] = choice.attempts
    if attempt.predicted is None or attempt.outcome not in {"finished", "stopped"}:
        return None
    queued = None if choice.queue_s is None else (choice.admission_s or 0.0) + choice.queue_s
    measured = Measured(ttft_s=choice.ttft_s, queue_s=queued, prefill_s=choice.prefill_s, itl_s=choice.itl_s)
    return Judged(attempt.predicted, measured)


class Predictions:
    """Of one model service. Belongs to the event loop."""

    def __init__(self, families: MetricFamilies, *, model: str, clock: Clock, percentile: float = 0.95) -> None:
        def ratios(objective: str, text: str) -> Callable[[str], Callable[[float], None]]:
            family = families.histogram(
                f"tandem_gateway_{objective}_prediction_ratio", text, [MODEL, "placement"], buckets=RATIOS
            )
            return lambda placement: family.series(model, placement).observe

        self.calibration = Calibration(percentile=percentile)
        self._model = model
        self._clock = clock
        self._ttft = ratios("ttft", "Measured over predicted time to the first token, of requests with one attempt")
        self._itl = ratios("itl", "Measured over predicted time between tokens, of requests with one attempt")
        self._factors = families.gauge(
            "tandem_gateway_latency_factor",
            "What predicted latencies are multiplied with, by kind of worker and placement: queue, compute and itl "
            "correct them, the margins are those of the percentile over the corrected ones",
            [MODEL, "kind", "placement", "factor"],
        )
        self._calibrated = families.gauge(
            "tandem_gateway_latency_calibrated",
            "1 while no factor of the kind and placement is beyond its bounds of 1/3 and 3; queues may be below",
            [MODEL, "kind", "placement"],
        )
        self._slo = families.counter(
            "tandem_gateway_slo_requests",
            "Requests with a latency objective, by objective (ttft, itl) and result: good or bad; rejected and failed "
            "requests are bad",
            [MODEL, "objective", "result"],
        )
        self._goodput = families.counter(
            "tandem_gateway_goodput_requests", "Requests that met all of their latency objectives", [MODEL]
        ).series(model)
        self._errors = families.counter(
            "tandem_gateway_prediction_errors",
            "Latencies that could not be predicted, or not be compared with what was measured",
            [MODEL],
        ).series(model)
        self._has_logged = False
        self._second = self._learned = 0
        """Requests that ended in that second of the clock and were learned from, or would have been."""
        self._shown: set[tuple[str, Placement]] = set()

    @estimating(lambda *_, **__: None)
    def predict(self, decision: RouteDecision, *, gateway_wait_s: float) -> Prediction | None:
        """Of a first attempt; None where the router predicts nothing, and for figures that are no durations."""
        if decision.latency is None:
            return None
        prediction = self.calibration.predict(decision.latency, decision.placement, gateway_wait_s=gateway_wait_s)
        if isfinite(prediction.ttft_s):
            return prediction
        self._errors.inc()
        return None

    @recording
    def finished(self, record: RequestRecord) -> None:
        """A request has ended, however it did."""
        try:
            self._finished(record)
        except Exception:
            self._errors.inc()
            if not self._has_logged:
                self._has_logged = True
                logger.exception("a latency cannot be compared with its prediction; further errors are only counted")

    def _finished(self, record: RequestRecord) -> None:
        if record.objectives is not None:
            self._count(record, record.objectives)
        if (found := judged(record)) is None:
            return
        prediction, measured = found
        if prediction.ttft_s > 0.0:
            self._ttft(prediction.placement)(measured.ttft_s / prediction.ttft_s)
        if measured.itl_s is not None and prediction.itl_s is not None:
            self._itl(prediction.placement)(measured.itl_s / prediction.itl_s)
        if self._may_learn():
            self.calibration.learn(prediction, measured)
        if (key := (prediction.kind, prediction.placement)) not in self._shown:
            self._show(*key)

    def _count(self, record: RequestRecord, objectives: Objectives) -> None:
        """Requests of clients that left, and invalid ones, do not count."""
        if record.status is None or (400 <= record.status < 500 and record.status != TOO_MANY):
            return
        answered = record.status == 200 and record.error is None
        met = True
        for name, limit_s, measured_s in (
            ("ttft", objectives.ttft_s, _longest(choice.ttft_s for choice in record.choices)),
            ("itl", objectives.itl_s, _longest(choice.itl_s for choice in record.choices)),
        ):
            if limit_s is not None:
                good = answered and measured_s <= limit_s
                met = met and good
                self._slo.series(self._model, name, "good" if good else "bad").inc()
        if met:
            self._goodput.inc()

    def _may_learn(self) -> bool:
        # When they end, not when they came: those of several seconds end alternately.
        second = int(self._clock.now())
        if second != self._second:
            self._second, self._learned = second, 0
        self._learned += 1
        return self._learned <= LEARNED_PER_SECOND

    def _show(self, kind: str, placement: Placement) -> None:
        """Read at each scrape. Those that the calibration has forgotten are dropped."""
        self._shown.add((kind, placement))
        for name, of in FACTORS.items():
            self._factors.labels(self._model, kind, placement, name).set_function(self._reading(kind, placement, of))
        self._calibrated.labels(self._model, kind, placement).set_function(
            self._reading(kind, placement, lambda factors: float(factors.calibrated))
        )
        for key in self._shown - {(each.kind, each.placement) for each in self.calibration.factors()}:
            self._shown.remove(key)
            for name in FACTORS:
                self._factors.remove(self._model, *key, name)
            self._calibrated.remove(self._model, *key)

    def _reading(self, kind: str, placement: Placement, of: Callable[[Factors], float]) -> Callable[[], float]:
        def read() -> float:
            factors = self.calibration.factors_of(kind, placement)
            return 1.0 if factors is None else of(factors)

        return read


def _longest(seconds: Iterable[float | None]) -> float:
    """0 where nothing was measured: of an output of one token there is no time between tokens."""
    return max((each for each in seconds if each is not None), default=0.0)


@estimating(lambda _: [])
def header_of(record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """For the head of the response; nothing when the response begins before there are workers."""
    attempts = record.choices[0].attempts if record.choices else []
    predicted = attempts[0].predicted if attempts else None
    return [] if predicted is None else [(HEADER, b"%d" % round(1000 * predicted.ttft_s))]
