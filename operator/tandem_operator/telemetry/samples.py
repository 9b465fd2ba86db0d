"""Collects the metrics of a service's pods over time, and combines them into one `Load`.

    metrics of each pod ─▶ kept by uid, with the increase of a gateway's counters since its last poll
    deleted pod         ─▶ forgotten          ready pod without metrics ─▶ its last metrics, with their age
    all of them         ─▶ one `Load`, as old as its oldest metric, or the reason why there is none

`PodSampler` is pure: the caller provides the time. `LoadReader` polls the pods once per period. Prometheus is not used:
it may not exist, and its values are as old as its last scrape. `Load.error` checks the age of metrics, not this module
[figures-or-hold].

`load_of` combines the pods. A sequence on a decode worker has a slot, or waits for its KV and will have one. A request
that is about to migrate counts toward its destination: it runs, and its worker is not a decode worker. Requests in the
queues of gateways wait for both roles.

While no gateway serves requests, the load of workers is ignored: a recent canary is in their last reports, and would
keep a service from ever being idle.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import httpx

from tandem_operator.api.types import RoleName
from tandem_operator.scaling.load import STALE_S, DecodeLoad, Load, PrefillLoad
from tandem_operator.telemetry.latency_metrics import LatencyTotals, StepFit
from tandem_operator.telemetry.latency_window import Decoding, LatencyWindow, Traffic
from tandem_operator.telemetry.pod_metrics import Figures, GatewayFigures, GatewayTotals, WorkerFigures
from tandem_operator.telemetry.pods import PodSeen, fetch_figures

SMOOTHING = 0.3
"""Weight of the newest sample in means over samples."""

FIRST_SECONDS_EACH = 10.0
"""Assumed decode time of a sequence before any has ended. Measurements replace it soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Increase of the counters of one gateway between two samples."""

    totals: GatewayTotals
    seconds: float
    waiting_tokens: float
    """Growth of its queue; negative if it has shrunk."""
    latency: LatencyTotals = field(default_factory=LatencyTotals)
    processes: int = 1
    """Of the gateway."""

    def traffic(self, gateway: str) -> Traffic:
        return Traffic(
            gateway=gateway,
            processes=self.processes,
            seconds=self.seconds,
            choices=self.totals.choices,
            requested_tokens=self.totals.requested_tokens,
            predicted_tokens=self.totals.predicted_tokens,
            latency=self.latency,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Arrivals at all gateways together."""

    tokens_per_s: float
    """Prompt tokens without a cached prefix."""
    choices_per_s: float
    seconds_each: float
    """Mean decode time of a choice."""
    uncached_share: float
    """Share of prompt tokens without a cached prefix."""


@dataclass(kw_only=True, slots=True)
class Demand:
    """Means over samples."""

    seconds_each: float = FIRST_SECONDS_EACH
    cached_share: float = 0.0

    def take(self, gains: Iterable[Gain]) -> None:
        """Adds the gains of one sample."""
        taken = list(gains)
        ended = sum(gain.totals.finished for gain in taken)
        first = sum(gain.totals.first_tokens for gain in taken)
        if ended and first:
            whole = sum(gain.totals.finished_s for gain in taken) / ended
            before = sum(gain.totals.first_token_s for gain in taken) / first
            self.seconds_each += SMOOTHING * (max(0.0, whole - before) - self.seconds_each)
        # A request that does not wait has a worker, and a prediction of the tokens that this worker has cached.
        admitted = sum(gain.totals.requested_tokens - gain.waiting_tokens for gain in taken)
        if admitted > 0:
            share = min(1.0, sum(gain.totals.predicted_tokens for gain in taken) / admitted)
            self.cached_share += SMOOTHING * (share - self.cached_share)

    def rates(self, gains: Iterable[Gain]) -> Rates:
        """Rates from the last gain of each gateway."""
        taken = list(gains)
        uncached = 1.0 - self.cached_share
        return Rates(
            tokens_per_s=sum(gain.totals.requested_tokens / gain.seconds for gain in taken) * uncached,
            choices_per_s=sum(gain.totals.choices / gain.seconds for gain in taken),
            seconds_each=self.seconds_each,
            uncached_share=uncached,
        )


@dataclass(kw_only=True, slots=True)
class Sizes:
    """Capacity of one worker, as last reported; also used while there is no worker."""

    tokens_per_s: float = 0.0
    places: float = 0.0
    pages: float = 0.0
    step_base_s: float = 0.0
    step_fit: StepFit | None = None
    """Of workers that decode; None until one has measured its steps."""

    def take(self, workers: Collection[WorkerFigures]) -> None:
        """Means over workers by role; a role without workers keeps its last values, or takes those of the other."""
        prefill = [one for one in workers if one.serves == "prefill"]
        decode = [one for one in workers if one.serves == "decode"]
        self.tokens_per_s = _mean(one.tokens_per_s for one in prefill) or self.tokens_per_s
        self.tokens_per_s = self.tokens_per_s or _mean(one.tokens_per_s for one in decode)
        self.places = _mean(one.places for one in decode) or self.places or _mean(one.places for one in prefill)
        self.pages = _mean(one.pages for one in decode) or self.pages or _mean(one.pages for one in prefill)
        self.step_base_s = _mean(one.step_base_s for one in prefill) or self.step_base_s
        self.step_fit = StepFit.mean(one.step_fit for one in decode if one.step_fit is not None) or self.step_fit


def load_of(
    *,
    at: float,
    age_s: float,
    workers: Iterable[WorkerFigures],
    gateways: Sequence[GatewayFigures],
    rates: Rates,
    sizes: Sizes,
    latency: LatencyWindow,
) -> Load:
    """`age_s`: age of the oldest of these metrics."""
    busy = _busy(workers, gateways)
    prefill = [one for one in busy if one.serves == "prefill"]
    decode = [one for one in busy if one.serves == "decode"]
    held_back = max((one.oldest_wait_s for one in gateways), default=0.0)
    return Load(
        at=at,
        age_s=age_s,
        prefill=PrefillLoad(
            queued_tokens=sum(one.waiting_tokens for one in prefill)
            + sum(one.waiting_tokens for one in gateways) * rates.uncached_share,
            oldest_wait_s=max([held_back, *(one.oldest_wait_s for one in prefill)]),
            arrived_tokens_per_s=rates.tokens_per_s,
            worker_tokens_per_s=sizes.tokens_per_s,
            prompts=latency.prompts(sizes.step_base_s),
            serving=sum(not one.draining for one in prefill),
        ),
        decode=DecodeLoad(
            running=decoding_of(busy, gateways, sizes).running,
            waiting=sum(one.waiting for one in decode) + sum(one.waiting for one in gateways),
            oldest_wait_s=max([held_back, *(one.oldest_wait_s for one in decode)]),
            arrived_per_s=rates.choices_per_s,
            seconds_each=rates.seconds_each,
            worker_places=sizes.places,
            used_pages=sum(one.used_pages for one in decode),
            worker_pages=sizes.pages,
            steps=latency.steps(sizes.step_fit),
            serving=sum(not one.draining for one in decode),
        ),
        held=sum(one.held for one in gateways),
        is_calibrated=latency.factors.is_calibrated,
    )


def decoding_of(workers: Iterable[WorkerFigures], gateways: Sequence[GatewayFigures], sizes: Sizes) -> Decoding:
    """Sequences with a place on a decode worker, those included that are about to get it."""
    busy = _busy(workers, gateways)
    decode = [one for one in busy if one.serves == "decode"]
    leaving = sum(one.leaving for one in busy if one.serves == "prefill")
    return Decoding(sum(one.running + one.transferring for one in decode) + leaving, len(decode), sizes.step_fit)


def _busy(workers: Iterable[WorkerFigures], gateways: Iterable[GatewayFigures]) -> list[WorkerFigures]:
    """None while no gateway serves requests."""
    return [*workers] if any(one.answering + one.waiting for one in gateways) else []


def _mean(values: Iterable[float]) -> float:
    """Mean of the positive values; 0 if there is none."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SloFigures:
    """How well objectives are met, over the last minutes."""

    attainment: float
    """Share of requests that met all of their objectives."""
    judged: float
    """Requests that had any."""
    goodput_per_s: float
    calibration: float
    """Measured over predicted latency, of the part farthest from 1."""

    @staticmethod
    def of(latency: LatencyWindow) -> "SloFigures":
        return SloFigures(
            attainment=latency.attainment,
            judged=latency.judged,
            goodput_per_s=latency.goodput_per_s,
            calibration=latency.factors.worst,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReading:
    """The result of one poll of all pods."""

    load: Load | None
    reason: str = ""
    """Why there is no load."""
    workers: Mapping[str, WorkerFigures] = field(default_factory=dict)
    """Metrics of existing workers by pod name, if they are recent or the pod is ready."""
    releases: Mapping[str, int] = field(default_factory=dict)
    """Of these, and of gateways, by pod name."""
    latency: SloFigures | None = None
    """None where there is no load."""

    def serves(self, pod: PodSeen) -> RoleName | None:
        """The role that a worker reports, or else that of its Deployment. None for gateways."""
        figures = self.workers.get(pod.name)
        return pod.worker_role if figures is None or figures.serves is None else figures.serves

    def slow_links(self) -> dict[str, str]:
        """All workers' links that are slower than expected: "from to" → transport."""
        return {
            f"{name} to {peer}": transport
            for name, figures in self.workers.items()
            for peer, transport in figures.slow_links.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSample:
    """The last metrics of a pod."""

    at: float
    figures: Figures
    gain: Gain | None = None
    """The increase since the previous sample of a gateway."""

    def age_s(self, now: float) -> float:
        own = self.figures.age_s if isinstance(self.figures, WorkerFigures) else 0.0
        return now - self.at + own


@dataclass(kw_only=True, slots=True)
class PodSampler:
    """The samples of the pods of one ModelService."""

    demand: Demand = field(default_factory=Demand)
    sizes: Sizes = field(default_factory=Sizes)
    latency: LatencyWindow = field(default_factory=LatencyWindow)
    _samples: dict[str, PodSample] = field(default_factory=dict)
    """By uid."""

    def take(self, at: float, pods: Sequence[PodSeen], answers: Mapping[str, Figures | str]) -> LoadReading:
        """`at`: monotonic seconds. `answers`: by uid, metrics or the reason why there are none."""
        self._remember(at, pods, answers)
        known = [(pod, sample) for pod in pods if (sample := self._current(at, pod)) is not None]
        workers = {pod.name: sample.figures for pod, sample in known if isinstance(sample.figures, WorkerFigures)}
        gateways_of = {pod.uid: sample for pod, sample in known if isinstance(sample.figures, GatewayFigures)}
        gateways = list(gateways_of.values())
        releases = {pod.name: sample.figures.release for pod, sample in known}
        self.sizes.take(workers.values())
        reason = self._silent(pods, answers) or _no_rates(gateways)
        if reason:
            return LoadReading(load=None, reason=reason, workers=workers, releases=releases)
        gains = {u: each.gain for u, each in gateways_of.items() if each.at == at and each.gain is not None}
        self.demand.take(gains.values())
        seen = [sample.figures for sample in gateways if isinstance(sample.figures, GatewayFigures)]
        factors = [figures.factors for figures in seen if figures.factors is not None]
        decoding = decoding_of(workers.values(), seen, self.sizes)
        self.latency.take((gain.traffic(uid) for uid, gain in gains.items()), factors, decoding)
        load = load_of(
            at=at,
            age_s=max(sample.age_s(at) for _, sample in known),
            workers=workers.values(),
            gateways=seen,
            rates=self.demand.rates(sample.gain for sample in gateways if sample.gain is not None),
            sizes=self.sizes,
            latency=self.latency,
        )
        return LoadReading(load=load, workers=workers, releases=releases, latency=SloFigures.of(self.latency))

    def _remember(self, at: float, pods: Sequence[PodSeen], answers: Mapping[str, Figures | str]) -> None:
        there = {pod.uid for pod in pods}
        self._samples = {uid: sample for uid, sample in self._samples.items() if uid in there}
        for uid, answer in answers.items():
            if uid in there and not isinstance(answer, str):
                self._samples[uid] = PodSample(at=at, figures=answer, gain=_gain(self._samples.get(uid), at, answer))

    def _current(self, at: float, pod: PodSeen) -> PodSample | None:
        """The last sample of `pod`. Old metrics of a pod that accepts no requests are ignored."""
        sample = self._samples.get(pod.uid)
        if sample is None or (not _counts(pod) and sample.age_s(at) > STALE_S):
            return None
        return sample

    def _silent(self, pods: Sequence[PodSeen], answers: Mapping[str, Figures | str]) -> str:
        """The error of a pod that accepts requests and has never reported metrics."""
        for pod in pods:
            answer = answers.get(pod.uid)
            if _counts(pod) and pod.uid not in self._samples:
                return f"pod {pod.name} is ready, and {answer if isinstance(answer, str) else 'has no address'}"
        return ""


def _counts(pod: PodSeen) -> bool:
    return pod.ready and not pod.terminating


def _gain(before: PodSample | None, at: float, now: Figures) -> Gain | None:
    if before is None or not isinstance(before.figures, GatewayFigures) or not isinstance(now, GatewayFigures):
        return None
    if at <= before.at:
        return before.gain
    return Gain(
        totals=now.totals.since(before.figures.totals),
        seconds=at - before.at,
        waiting_tokens=now.waiting_tokens - before.figures.waiting_tokens,
        latency=now.latency.since(before.figures.latency),
        processes=now.processes,
    )


def _no_rates(gateways: Iterable[PodSample]) -> str:
    gains = [sample.gain for sample in gateways]
    if not gains:
        return "no gateway reports its queue"
    return "" if any(gain is not None for gain in gains) else "arrival rates need a second sample"


@dataclass(kw_only=True, slots=True)
class LoadReader:
    """Polls the pods of one ModelService. It keeps the last sample, for rates."""

    client: httpx.AsyncClient
    now: Callable[[], float] = monotonic
    sampler: PodSampler = field(default_factory=PodSampler)

    async def read(self, pods: Sequence[PodSeen], model: str = "") -> LoadReading:
        """Poll all pods. Bounded in time; a pod without metrics is no error but a reason. `model`: as in
        `fetch_figures`.
        """
        answers = await fetch_figures(self.client, pods, model)
        return self.sampler.take(self.now(), pods, answers)
