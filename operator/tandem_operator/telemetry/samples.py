"""Collects the metrics of a service's pods over time, and combines them into one `Load`.

    metrics of each pod ─▶ kept by uid, with the increase of a gateway's counters since its last poll
    deleted pod         ─▶ forgotten          ready pod without metrics ─▶ its last metrics, with their age
    all of them         ─▶ one `Load`, as old as its oldest metric, or the reason why there is none

`Looks` is pure: the caller provides the time. `LoadReader` polls the pods once per period. Prometheus is not used: it
may not exist, and its values are as old as its last scrape. `Load.trouble` checks the age of metrics, not this module
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
from tandem_operator.telemetry.pod_metrics import Figures, GatewayFigures, GatewayTotals, WorkerFigures
from tandem_operator.telemetry.pods import PodSeen, fetch_figures

SMOOTHING = 0.3
"""Weight of the newest look in means over looks."""

FIRST_SECONDS_EACH = 10.0
"""How long a sequence decodes, before any has ended. It does not matter for long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Of one gateway between two looks."""

    totals: GatewayTotals
    seconds: float
    waiting_tokens: float
    """By how much its queue has grown; negative: shrunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of all gateways together."""

    tokens_per_s: float
    """Prompt tokens without a cached prefix."""
    choices_per_s: float
    seconds_each: float
    """How long a choice decodes."""
    uncached_share: float
    """Of prompt tokens."""


@dataclass(kw_only=True, slots=True)
class Demand:
    """Means over looks."""

    seconds_each: float = FIRST_SECONDS_EACH
    cached_share: float = 0.0

    def take(self, gains: Iterable[Gain]) -> None:
        """The gains of one look."""
        taken = list(gains)
        ended = sum(gain.totals.finished for gain in taken)
        first = sum(gain.totals.first_tokens for gain in taken)
        if ended and first:
            whole = sum(gain.totals.finished_s for gain in taken) / ended
            before = sum(gain.totals.first_token_s for gain in taken) / first
            self.seconds_each += SMOOTHING * (max(0.0, whole - before) - self.seconds_each)
        # What came and does not wait has got a worker, and a prediction of what that one has cached.
        admitted = sum(gain.totals.asked_tokens - gain.waiting_tokens for gain in taken)
        if admitted > 0:
            share = min(1.0, sum(gain.totals.predicted_tokens for gain in taken) / admitted)
            self.cached_share += SMOOTHING * (share - self.cached_share)

    def rates(self, gains: Iterable[Gain]) -> Rates:
        """From the last gain of each gateway."""
        taken = list(gains)
        uncached = 1.0 - self.cached_share
        return Rates(
            tokens_per_s=sum(gain.totals.asked_tokens / gain.seconds for gain in taken) * uncached,
            choices_per_s=sum(gain.totals.choices / gain.seconds for gain in taken),
            seconds_each=self.seconds_each,
            uncached_share=uncached,
        )


@dataclass(kw_only=True, slots=True)
class Sizes:
    """What one worker can do, as last known: that is needed while there is none, too."""

    tokens_per_s: float = 0.0
    places: float = 0.0
    pages: float = 0.0

    def take(self, workers: Collection[WorkerFigures]) -> None:
        """Means over workers of each role; of a role without any what was known of it, or the other's."""
        prefill = [one for one in workers if one.serves == "prefill"]
        decode = [one for one in workers if one.serves == "decode"]
        self.tokens_per_s = _mean(one.tokens_per_s for one in prefill) or self.tokens_per_s
        self.tokens_per_s = self.tokens_per_s or _mean(one.tokens_per_s for one in decode)
        self.places = _mean(one.places for one in decode) or self.places or _mean(one.places for one in prefill)
        self.pages = _mean(one.pages for one in decode) or self.pages or _mean(one.pages for one in prefill)


def load_of(
    *,
    at: float,
    age_s: float,
    workers: Iterable[WorkerFigures],
    gateways: Sequence[GatewayFigures],
    rates: Rates,
    sizes: Sizes,
) -> Load:
    """`age_s`: of the oldest of these figures."""
    busy = [*workers] if any(one.answering + one.waiting for one in gateways) else []
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
        ),
        decode=DecodeLoad(
            running=sum(one.running + one.transferring for one in decode) + sum(one.leaving for one in prefill),
            waiting=sum(one.waiting for one in decode) + sum(one.waiting for one in gateways),
            oldest_wait_s=max([held_back, *(one.oldest_wait_s for one in decode)]),
            arrived_per_s=rates.choices_per_s,
            seconds_each=rates.seconds_each,
            worker_places=sizes.places,
            used_pages=sum(one.used_pages for one in decode),
            worker_pages=sizes.pages,
        ),
        held=sum(one.held for one in gateways),
    )


def _mean(values: Iterable[float]) -> float:
    """Of those that are known; 0 when none is."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What came of one look."""

    load: Load | None
    reason: str = ""
    """Why there is no load."""
    workers: Mapping[str, WorkerFigures] = field(default_factory=dict)
    """By pod name: those that exist and have reported, lately or as long as they are ready."""

    def serves(self, pod: PodSeen) -> RoleName | None:
        """The role of a worker: as it reports itself, else as its Deployment has it. None for gateways."""
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
class Look:
    """The last figures of a pod."""

    at: float
    figures: Figures
    gain: Gain | None = None
    """Of a gateway that was looked at twice."""

    def age_s(self, now: float) -> float:
        own = self.figures.age_s if isinstance(self.figures, WorkerFigures) else 0.0
        return now - self.at + own


@dataclass(kw_only=True, slots=True)
class Looks:
    """One per ModelService."""

    demand: Demand = field(default_factory=Demand)
    sizes: Sizes = field(default_factory=Sizes)
    _looks: dict[str, Look] = field(default_factory=dict)
    """By uid."""

    def take(self, at: float, pods: Sequence[PodSeen], answers: Mapping[str, Figures | str]) -> Seen:
        """`at`: monotonic seconds. `answers`: by uid, figures or in one sentence why there are none."""
        self._remember(at, pods, answers)
        known = [(pod, look) for pod in pods if (look := self._current(at, pod)) is not None]
        workers = {pod.name: look.figures for pod, look in known if isinstance(look.figures, WorkerFigures)}
        gateways = [look for _, look in known if isinstance(look.figures, GatewayFigures)]
        self.sizes.take(workers.values())
        reason = self._silent(pods, answers) or _no_rates(gateways)
        if reason:
            return Seen(load=None, reason=reason, workers=workers)
        self.demand.take(look.gain for look in gateways if look.at == at and look.gain is not None)
        load = load_of(
            at=at,
            age_s=max(look.age_s(at) for _, look in known),
            workers=workers.values(),
            gateways=[look.figures for look in gateways if isinstance(look.figures, GatewayFigures)],
            rates=self.demand.rates(look.gain for look in gateways if look.gain is not None),
            sizes=self.sizes,
        )
        return Seen(load=load, workers=workers)

    def _remember(self, at: float, pods: Sequence[PodSeen], answers: Mapping[str, Figures | str]) -> None:
        there = {pod.uid for pod in pods}
        self._looks = {uid: look for uid, look in self._looks.items() if uid in there}
        for uid, answer in answers.items():
            if uid in there and not isinstance(answer, str):
                self._looks[uid] = Look(at=at, figures=answer, gain=_gain(self._looks.get(uid), at, answer))

    def _current(self, at: float, pod: PodSeen) -> Look | None:
        """The last look at `pod`. Of one that takes no requests old figures say nothing any more."""
        look = self._looks.get(pod.uid)
        if look is None or (not _counts(pod) and look.age_s(at) > STALE_S):
            return None
        return look

    def _silent(self, pods: Sequence[PodSeen], answers: Mapping[str, Figures | str]) -> str:
        """About a pod that takes requests and has never reported anything."""
        for pod in pods:
            answer = answers.get(pod.uid)
            if _counts(pod) and pod.uid not in self._looks:
                return f"pod {pod.name} is ready, and {answer if isinstance(answer, str) else 'has no address'}"
        return ""


def _counts(pod: PodSeen) -> bool:
    return pod.ready and not pod.terminating


def _gain(before: Look | None, at: float, now: Figures) -> Gain | None:
    if before is None or not isinstance(before.figures, GatewayFigures) or not isinstance(now, GatewayFigures):
        return None
    if at <= before.at:
        return before.gain
    return Gain(
        totals=now.totals.since(before.figures.totals),
        seconds=at - before.at,
        waiting_tokens=now.waiting_tokens - before.figures.waiting_tokens,
    )


def _no_rates(gateways: Iterable[Look]) -> str:
    gains = [look.gain for look in gateways]
    if not gains:
        return "no gateway reports its queue"
    return "" if any(gain is not None for gain in gains) else "arrival rates need a second sample"


@dataclass(kw_only=True, slots=True)
class LoadReader:
    """One per ModelService. It remembers the last look, for rates."""

    client: httpx.AsyncClient
    now: Callable[[], float] = monotonic
    looks: Looks = field(default_factory=Looks)

    async def read(self, pods: Sequence[PodSeen]) -> Seen:
        """Poll all pods. Bounded in time; a pod without metrics is no error but a reason."""
        answers = await fetch_figures(self.client, pods)
        return self.looks.take(self.now(), pods, answers)
