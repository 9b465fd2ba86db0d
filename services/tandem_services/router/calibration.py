"""How far predicted latencies are from measured ones, by kind of worker and placement. Pure.

Of the last `WINDOW` requests of each kind and placement

    correction   median of measured / predicted, separately for what passes before the first step (queue) and from then
                 on (compute): one factor for both would take queues for slow workers
    handling     median of the seconds that are part of neither: reading, tokenizing, messages. It is added, because it
                 is the same for short and long prompts
    margin       the quantile of measured / corrected prediction that `percentile` of the requests do not exceed

A prediction has a margin of its own (`kept_share`): the load changes, so of the requests to come more may exceed that
quantile than did in the window.

All factors are between `MIN_FACTOR` and `MAX_FACTOR`. Beyond them the model does not describe these workers, and
`Factors.calibrated` is false: except of a queue that was shorter than predicted. Reports of workers are up to half a
second old, and at low load most queues are over by then. Only requests with one attempt count
(`gateway.observe.predictions`): a retry or a migration is no property of a worker.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log
from operator import itemgetter
from typing import NamedTuple

import msgspec

from tandem_services.router.decision import Latency, Placement, ScoreTerm
from tandem_services.router.latency import GATEWAY_WAIT, QUEUE_TERMS

WINDOW = 512
"""Requests."""

MIN_SAMPLES = 8
"""Requests before there is a factor other than 1."""

MIN_FACTOR, MAX_FACTOR = 1.0 / 3.0, 3.0

MIN_RATIO, MAX_RATIO = 1e-3, 1e3

SHARE_RATE = 0.02
"""How much of a missed or kept margin goes into the share of the window that later margins cover: of a missed one it is
a fiftieth of the percentile."""

MIN_QUEUE_S = 0.005
"""A shorter predicted queue does not count: what is measured then is one iteration of a loop."""

MAX_KINDS = 64
"""Kinds and placements; the one that was used the longest time ago is forgotten."""

MAX_S = 86_400.0
"""No latency is longer."""

MAX_HANDLING_S = 1.0
"""Reading and tokenizing take no longer; what is longer is a client that sends its request slowly."""

HANDLING = "handling"


@dataclass(slots=True)
class Sketch:
    """The last `WINDOW` values."""

    _arrived: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float) -> None:
        if len(self._arrived) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._arrived.popleft())]
        self._arrived.append(value)
        insort(self._ordered, value)

    def quantile(self, share: float) -> float:
        """By nearest rank; 0 of too few values."""
        if len(self) < MIN_SAMPLES:
            return 0.0
        return self._ordered[min(len(self) - 1, int(share * len(self)))]


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """What has been learned of one kind and placement."""

    kind: str
    """Revision, device and number of ranks of the worker that computes the prompt."""
    placement: Placement
    samples: int
    """Requests that it was learned from, at most `WINDOW`."""
    queue: float
    """Correction of queues; `compute` and `itl` are those of computing and of the time between tokens."""
    compute: float
    handling_s: float
    margin: float
    """What the percentile of requests in the window took, over the corrected time to the first token."""
    itl: float
    itl_margin: float
    ratio: float
    """Median of measured / predicted time to the first token, as they were predicted; 1 without any."""
    calibrated: bool
    """No factor is beyond its bounds, but for that of queues below its lower one."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Latency of one request, as it was predicted when its workers were chosen."""

    ttft_s: float
    itl_s: float | None
    """None where the worker has measured no step."""
    margin: float
    """`ttft_s` × this is what the percentile of requests does not exceed in the long run."""
    itl_margin: float
    queue: float
    """Correction of the terms that pass before the first step; `compute` is that of the others but handling."""
    compute: float
    itl: float
    terms: tuple[ScoreTerm, ...]
    """Before the correction."""
    kind: str
    decode_kind: str
    placement: Placement


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it. Seconds."""

    ttft_s: float
    queue_s: float | None
    """In queues of the gateway and of the worker; None where the worker does not report it."""
    prefill_s: float | None
    itl_s: float | None
    """None of an output of one token."""


class _Corrections(NamedTuple):
    """What follows from the sketches of one kind and placement; factors are clamped."""

    queue: float
    compute: float
    handling_s: float
    margin: float
    itl: float
    itl_margin: float
    calibrated: bool
    kept_margin: float
    """Of a prediction, and `kept_itl_margin`: `margin` at the share that later requests keep."""
    kept_itl_margin: float


@dataclass(slots=True)
class _Learned:
    queue: Sketch = field(default_factory=Sketch)
    compute: Sketch = field(default_factory=Sketch)
    handling: Sketch = field(default_factory=Sketch)
    ttft: Sketch = field(default_factory=Sketch)
    itl: Sketch = field(default_factory=Sketch)
    ttft_share: float = 0.0
    """Of the window, what margins of the time to the first token cover, where it is above the percentile: see
    `kept_share`."""
    itl_share: float = 0.0
    _corrections: _Corrections | None = None
    """None after a change."""

    def corrections(self, percentile: float) -> _Corrections:
        if self._corrections is None:
            self._corrections = self._derived(percentile)
        return self._corrections

    def changed(self) -> None:
        self._corrections = None

    def _derived(self, percentile: float) -> _Corrections:
        queue, compute, itl = (exp(sketch.quantile(0.5)) for sketch in (self.queue, self.compute, self.itl))
        margin = exp(self.ttft.quantile(percentile))
        itl_margin = exp(self.itl.quantile(percentile) - self.itl.quantile(0.5))
        kept_margin = exp(self.ttft.quantile(max(self.ttft_share, percentile)))
        kept_itl_margin = exp(self.itl.quantile(max(self.itl_share, percentile)) - self.itl.quantile(0.5))
        return _Corrections(
            queue=_clamped(queue),
            compute=_clamped(compute),
            handling_s=max(0.0, self.handling.quantile(0.5)),
            margin=_clamped(margin),
            itl=_clamped(itl),
            itl_margin=_clamped(itl_margin),
            calibrated=queue <= MAX_FACTOR
            and all(MIN_FACTOR <= factor <= MAX_FACTOR for factor in (compute, itl, margin, itl_margin)),
            kept_margin=_clamped(kept_margin),
            kept_itl_margin=_clamped(kept_itl_margin),
        )


@dataclass(kw_only=True, slots=True)
class Calibration:
    """Of one fleet, by one gateway."""

    percentile: float = 0.95
    _learned: "OrderedDict[tuple[str, Placement], _Learned]" = field(default_factory=OrderedDict)

    def predict(self, latency: Latency, placement: Placement, *, gateway_wait_s: float) -> Prediction:
        """`gateway_wait_s`: predicted when the request came."""
        known = self._of(latency.kind, placement).corrections(self.percentile)
        decoding = known
        if latency.decode_kind != latency.kind:
            decoding = self._of(latency.decode_kind, placement).corrections(self.percentile)
        terms = (ScoreTerm(GATEWAY_WAIT, gateway_wait_s), *latency.terms, ScoreTerm(HANDLING, known.handling_s))
        before, after = split(terms)
        return Prediction(
            ttft_s=min(known.queue * before + known.compute * after + known.handling_s, MAX_S),
            itl_s=min(decoding.itl * latency.itl_s, MAX_S) if latency.itl_s > 0.0 else None,
            margin=known.kept_margin,
            itl_margin=decoding.kept_itl_margin,
            queue=known.queue,
            compute=known.compute,
            itl=decoding.itl,
            terms=terms,
            kind=latency.kind,
            decode_kind=latency.decode_kind,
            placement=placement,
        )

    def learn(self, prediction: Prediction, measured: Measured) -> None:
        """A request with one attempt has ended."""
        known = self._of(prediction.kind, prediction.placement)
        before, after = split(prediction.terms)
        if len(known.ttft) >= MIN_SAMPLES:
            is_kept = measured.ttft_s <= prediction.ttft_s * prediction.margin
            known.ttft_share = kept_share(known.ttft_share, percentile=self.percentile, is_kept=is_kept)
        _add_ratio(known.ttft, measured.ttft_s, prediction.ttft_s)
        if measured.queue_s is not None and before >= MIN_QUEUE_S:
            _add_ratio(known.queue, measured.queue_s, before)
        if measured.prefill_s is not None:
            _add_ratio(known.compute, measured.prefill_s, after)
        if measured.queue_s is not None and measured.prefill_s is not None:
            rest_s = measured.ttft_s - measured.queue_s - measured.prefill_s
            known.handling.add(min(max(rest_s, 0.0), MAX_HANDLING_S))
        known.changed()
        if measured.itl_s is not None and prediction.itl_s is not None:
            decoding = self._of(prediction.decode_kind, prediction.placement)
            if len(decoding.itl) >= MIN_SAMPLES:
                is_kept = measured.itl_s <= prediction.itl_s * prediction.itl_margin
                decoding.itl_share = kept_share(decoding.itl_share, percentile=self.percentile, is_kept=is_kept)
            _add_ratio(decoding.itl, measured.itl_s, prediction.itl_s / prediction.itl)
            decoding.changed()

    def factors(self) -> tuple[Factors, ...]:
        """All that is known, in the order of kind and placement."""
        return tuple(self._factors(*key, known) for key, known in sorted(self._learned.items(), key=itemgetter(0)))

    def factors_of(self, kind: str, placement: Placement) -> Factors | None:
        """None for one that is not known."""
        known = self._learned.get((kind, placement))
        return None if known is None else self._factors(kind, placement, known)

    def _factors(self, kind: str, placement: Placement, known: _Learned) -> Factors:
        corrections = known.corrections(self.percentile)
        return Factors(
            kind=kind,
            placement=placement,
            samples=len(known.ttft),
            ratio=exp(known.ttft.quantile(0.5)),
            queue=corrections.queue,
            compute=corrections.compute,
            handling_s=corrections.handling_s,
            margin=corrections.margin,
            itl=corrections.itl,
            itl_margin=corrections.itl_margin,
            calibrated=corrections.calibrated,
        )

    def _of(self, kind: str, placement: Placement) -> _Learned:
        key = (kind, placement)
        known = self._learned.get(key)
        if known is None:
            known = self._learned[key] = _Learned()
            if len(self._learned) > MAX_KINDS:
                self._learned.popitem(last=False)
        else:
            self._learned.move_to_end(key)
        return known


def kept_share(share: float, *, percentile: float, is_kept: bool) -> float:
    """Of the window, what the next margin covers, after a request kept or missed the last one.

    Adaptive conformal inference: a missed margin widens the next ones, and many kept ones narrow them, so that in the
    long run `percentile` of the requests keep theirs, however the load changes. Never less than the percentile of the
    window.
    """
    step = SHARE_RATE * (percentile - 1.0 if is_kept else percentile)
    return min(max(max(share, percentile) + step, percentile), 1.0)


def split(terms: Iterable[ScoreTerm]) -> tuple[float, float]:
    """Seconds before the first step that computes the prompt, and from then until the first token."""
    before = after = 0.0
    for term in terms:
        if term.name in QUEUE_TERMS:
            before += term.seconds
        elif term.name != HANDLING:
            after += term.seconds
    return before, after


def _add_ratio(sketch: Sketch, measured: float, predicted: float) -> None:
    """Nothing is learned from seconds that no clock can have measured."""
    if 0.0 < measured <= MAX_S and predicted > 0.0:
        ratio = min(max(measured / predicted, MIN_RATIO), MAX_RATIO)
        sketch.add(log(ratio))


def _clamped(factor: float) -> float:
    return min(max(factor, MIN_FACTOR), MAX_FACTOR)
