"""Looks at the pods, one after the other → what the autoscaler may rely on. Pure: whoever looks brings the time.

    figures of each pod ─▶ remembered by uid, with what a gateway's counters have gained since its last look
    a pod that is gone  ─▶ forgotten          a ready pod that says nothing ─▶ its last figures, getting older
    all of them         ─▶ one `Load`, as old as the oldest figure in it, or the reason why there is none

Whether figures are too old is not judged here: `Load.trouble` does [figures-or-hold].
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem_operator.api.roles import RoleName
from tandem_operator.scaling.load import STALE_S, Load
from tandem_operator.telemetry.demand import Demand, Gain
from tandem_operator.telemetry.figures import Figures, GatewayFigures, WorkerFigures
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.summing import Sizes, load_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What came of one look."""

    load: Load | None
    reason: str = ""
    """Why there is no load."""
    workers: Mapping[str, WorkerFigures] = field(default_factory=dict)
    """By pod name: those that are there and have told something, lately or as long as they are ready."""

    def serves(self, pod: PodSeen) -> RoleName | None:
        """What a worker does: as it says itself, else as its Deployment has it. None for gateways."""
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
        """About a pod that takes requests and has never told anything."""
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
