"""Starting workers that new requests wait for, while no worker of a role is offered.

    lacking    roles without an offered worker: decode, and prefill where decode workers must not compute prompts
    expected   each of them will be served by a worker of the model that reports its start (`router.starting`)
    bounded    the starts of one worker count for `limit_s` in total, from the first report that this gateway has read
               until it serves: a worker that hangs or crashes again and again is not waited for after that. A gateway
               without reports for `limit_s` cannot tell a crash from a worker that has served in the meantime: a
               new incarnation then counts afresh
    replaced   where something replaces lost workers, such as a Deployment of Kubernetes, the first `limit_s` without a
               worker of a role count, too: a pod that is scheduled or pulls its image reports nothing

Reports are signed. One that is replayed counts for `limit_s` at most, too, and no request waits longer than that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.config import Role
from tandem_services.router.decision import WorkerView
from tandem_services.router.keys import MAX_STARTING
from tandem_services.router.starting import StartingWorker

MAX_FOLLOWED = 4 * MAX_STARTING
"""Workers whose starts are followed. Further ones do not count."""

ROLES = {role.value: role for role in Role}
"""Of this release. A worker of another one may report a further one."""

WATCHED_S = 10.0
"""Reports come once a second. Of a worker whose last one is older it is not known when it began to serve."""

MIN_S = 2.0
"""Least expected time until a worker serves: a shorter Retry-After would only bring requests that wait."""


class StartView(Protocol):
    """What is needed of the router."""

    def workers(self) -> tuple[WorkerView, ...]: ...

    def offered(self) -> tuple[WorkerView, ...]: ...

    def starting(self) -> tuple[StartingWorker, ...]: ...


@dataclass(slots=True)
class _Start:
    latest: StartingWorker
    first_at: float
    """When this gateway has first read a report of this worker, of whichever incarnation."""
    seen_at: float
    """When it has read `latest`."""

    def elapsed_s(self, now: float) -> float:
        return self.latest.seconds + now - self.seen_at


@dataclass(kw_only=True, slots=True)
class WorkerStarts:
    """Of one model service."""

    fleet: StartView
    clock: Clock
    model: str
    limit_s: float
    needs_prefill: bool = False
    """Decode workers compute no prompts: without a prefill worker no request is served."""
    replaced: bool = False
    """Something replaces lost workers."""
    seen_at: float = -inf
    """When all that is lacking was last expected."""
    _starts: dict[str, _Start] = field(default_factory=dict)
    """By worker ID."""
    _lacking_since: float | None = None
    """When a role was first seen to be lacking; None while a worker of each is there."""
    _took_s: float | None = None
    """What the last start took."""

    def lacking(self) -> frozenset[Role]:
        """Roles without which new requests are not served; empty where all are offered."""
        there = _served_by(worker.role for worker in self.fleet.offered() if worker.model == self.model)
        needed = {Role.DECODE, Role.PREFILL} if self.needs_prefill else {Role.DECODE}
        return frozenset(needed - there)

    def look(self) -> None:
        """Read the reports of now."""
        now = self.clock.now()
        self.note_served(self.fleet.offered() if self._starts else ())
        reported = [worker for worker in self.fleet.starting() if worker.model == self.model]
        for worker in reported:
            self._follow(worker, now)
        self._starts = {name: start for name, start in self._starts.items() if now - start.seen_at < self.limit_s}
        coming = _served_by(ROLES[each.role] for each in reported if each.role in ROLES and self._counts(each, now))
        lacking = self.lacking()
        self.note_lack()
        if lacking and (lacking <= coming or self._is_replaced(now)):
            self.seen_at = now

    def expected(self, *, within_s: float) -> bool:
        """Whether a worker of each role is offered, or was expected at most `within_s` ago."""
        self.look()
        return not self.lacking() or self.clock.now() - self.seen_at < within_s

    def remaining_s(self) -> float:
        """Predicted time until a worker that starts serves: `MIN_S`, also where none is known to start, to `limit_s`.

        From what the last start took. Before there was one: as long again as this one has taken. Workers do not sign
        how long they have started.
        """
        now = self.clock.now()
        elapsed = max((start.elapsed_s(now) for start in self._starts.values()), default=0.0)
        remaining = elapsed if self._took_s is None or not elapsed else self._took_s - elapsed
        return max(MIN_S, min(remaining, self.limit_s))

    def note_served(self, workers: Iterable[WorkerView]) -> None:
        """These serve. Call also while no request waits: the next start of a worker that has served counts afresh."""
        now = self.clock.now()
        for worker in workers:
            start = self._starts.get(worker.worker_id)
            if start is not None and start.latest.incarnation == worker.incarnation:
                del self._starts[worker.worker_id]
                if now - start.seen_at <= WATCHED_S:
                    self._took_s = start.elapsed_s(now)

    def note_lack(self) -> None:
        """Call periodically, also while no request waits: the time without a worker begins when it is lost."""
        if not self.lacking():
            self._lacking_since = None
        elif self._lacking_since is None:
            self._lacking_since = self.clock.now()

    def _is_replaced(self, now: float) -> bool:
        return self.replaced and self._lacking_since is not None and now - self._lacking_since < self.limit_s

    def _follow(self, worker: StartingWorker, now: float) -> None:
        known = self._starts.get(worker.worker_id)
        if known is not None and now - known.seen_at >= self.limit_s and known.latest.incarnation != worker.incarnation:
            known.first_at = now
        if known is not None:
            known.seen_at, known.latest = now, worker
        elif len(self._starts) < MAX_FOLLOWED:
            self._starts[worker.worker_id] = _Start(latest=worker, first_at=now, seen_at=now)

    def _counts(self, worker: StartingWorker, now: float) -> bool:
        start = self._starts.get(worker.worker_id)
        return start is not None and now - start.first_at < self.limit_s


def _served_by(roles: Iterable[Role]) -> set[Role]:
    """What workers of these roles do, as prefill and decode."""
    return {done for role in roles for done in ((Role.PREFILL, Role.DECODE) if role is Role.BOTH else (role,))}
