"""Which canary requests are due for a service, and what their answers mean. Pure: whoever asks brings time and answers.

revision   asked through its first pair until one answer is good: then these two are offered to the router, and
           from then on readiness counts
worker     each other one of a revision that has passed, before it is offered (`pod_trials`)
gateway    asked again and again; it fails when several answers in a row are bad, so that one lost packet is no
outage
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tandem_operator.controller.pod_trials import BAD_IN_A_ROW, RETRY_S, PodTrials
from tandem_operator.planning.observed import Canary
from tandem_operator.planning.status import GATEWAY_CANARY
from tandem_operator.telemetry.canary import pair_of
from tandem_operator.telemetry.pods import PodSeen

REPEAT_S = 30.0
"""Between two canaries through the gateway while they pass."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A canary to send."""

    revision: str
    """`GATEWAY_CANARY` for one that takes whatever way the gateway chooses."""
    gateway: PodSeen
    pair: tuple[PodSeen, PodSeen] | None = None
    """The prefill and the decode worker that it has to go through."""
    newcomer: PodSeen | None = None
    """The one of the two that it is to prove, where its revision has passed before."""

    @property
    def key(self) -> str:
        """Of whom it speaks: one such canary at a time."""
        return self.revision if self.newcomer is None else f"pod {self.newcomer.uid}"


@dataclass(frozen=True, slots=True)
class _Entry:
    canary: Canary | None = None
    asked_at: float | None = None
    bad: int = 0


@dataclass(slots=True)
class CanaryBook:
    """Of one service. Times are monotonic seconds."""

    timeout_s: float
    """A revision that has not answered so long after it was first seen has failed."""
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _first_seen: dict[str, float] = field(default_factory=dict)
    _pods: PodTrials = field(default_factory=PodTrials)

    def due(self, now: float, pods: Iterable[PodSeen]) -> list[Ask]:
        """What to ask now."""
        usable = [pod for pod in pods if pod.usable]
        gateway = next((pod for pod in usable if pod.role == "gateway"), None)
        if gateway is None:
            return []
        revisions = dict.fromkeys(pod.revision for pod in usable if pod.worker_role is not None)
        pairs = {revision: pair for revision in revisions if (pair := pair_of(revision, usable)) is not None}
        asks = [Ask(revision, gateway, pair) for revision, pair in pairs.items() if self._due(now, revision)]
        # Whom the router may choose: nobody, while all pairs stand by.
        offered = any(not pod.standby for pair in pairs.values() for pod in pair)
        if offered and self._due(now, GATEWAY_CANARY):
            asks.append(Ask(GATEWAY_CANARY, gateway))
        passed = {name for name, entry in self._entries.items() if entry.canary is not None and entry.canary.passed}
        for pod, partner in self._pods.due(now, usable, passed):
            pair = (pod, partner) if pod.role == "prefill" else (partner, pod)
            asks.append(Ask(pod.revision, gateway, pair, newcomer=pod))
        return asks

    def take(self, now: float, ask: Ask, answer: Canary) -> None:
        """What became of it."""
        if ask.newcomer is not None:
            gateway = self._entries.get(GATEWAY_CANARY)
            self._pods.take(now, ask.newcomer, answer, serving=gateway is None or not gateway.bad)
            return
        if answer.passed and ask.pair is not None:
            self._pods.prove(*ask.pair)
        before = self._entries.get(ask.revision, _Entry())
        bad = 0 if answer.passed else before.bad + 1
        forgiven = before.canary is not None and before.canary.passed and bad < BAD_IN_A_ROW
        canary = before.canary if forgiven else _steady(before.canary, answer)
        self._entries[ask.revision] = _Entry(canary, now, bad)

    def proved(self, pod: PodSeen) -> bool:
        """Whether a canary has gone through it since it stands by."""
        return self._pods.proved(pod)

    def offered(self, pod: PodSeen) -> None:
        """It stands by no longer."""
        self._pods.offered(pod)

    def failing(self, pods: Iterable[PodSeen]) -> Mapping[str, str]:
        """Names of workers that fail though their revision has passed, with the reason. `pods`: all there are."""
        return self._pods.failing(pods)

    def results(self, now: float, revisions: Iterable[str]) -> dict[str, Canary]:
        """Of the revisions that have workers, and of the gateway."""
        living = {*revisions, GATEWAY_CANARY}
        self._entries = {name: entry for name, entry in self._entries.items() if name in living}
        self._first_seen = {name: self._first_seen.get(name, now) for name in living}
        results = {name: entry.canary for name, entry in self._entries.items() if entry.canary is not None}
        for name in living - {GATEWAY_CANARY} - set(results):
            if now - self._first_seen[name] > self.timeout_s:
                results[name] = Canary(
                    passed=False, message=f"no pair of the revision responded within {self.timeout_s:.0f} s"
                )
        return results

    def _due(self, now: float, revision: str) -> bool:
        entry = self._entries.get(revision)
        if entry is None or entry.asked_at is None:
            return True
        if entry.canary is not None and entry.canary.passed and not entry.bad:
            return revision == GATEWAY_CANARY and now - entry.asked_at >= REPEAT_S
        return now - entry.asked_at >= RETRY_S


def _steady(before: Canary | None, now: Canary) -> Canary:
    """With the sentence of before where only its figures are others: a status would be written for each."""
    if before is None or before.passed != now.passed:
        return now
    return replace(now, message=steady(before.message, now.message))


def steady(before: str, now: str) -> str:
    """`before`, if `now` says the same with other figures."""
    return before if _words(before) == _words(now) else now


def _words(text: str) -> str:
    return "".join(letter for letter in text if not letter.isdigit() and letter != ".")
