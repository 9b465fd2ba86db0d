"""A gateway's view of the fleet: workers proven to be members, from Redis and from their own answers.

Redis is a hint: it contains addresses and loads, but a worker's own answer proves its membership (`MemberProofs`).

    1. snapshot      each heartbeat brings the rows of Redis, only signed ones; ten a second while no worker decodes. A
                     worker may be chosen by its row, unless it was asked and does not answer; it gets a request once it
                     has answered (`prove`)
    2. unlisted      missing in the snapshot: the worker cannot reach Redis, Redis lost it, or it has exited. It is
                     asked then, and stays while it answers, until a signed verdict ends it or a newer incarnation has
                     a signed row
    3. Redis away    the view does not change
    4. no proofs     a router without proofs relies on rows. After a wipe (new epoch), or with new malformed rows,
                     workers of the old view stay for one lease, in which live ones register again
    5. skew          a worker outside the window of this release is named in the log once, and nothing is sent to it
    6. `mark_dead`   the gateway lost the connection: the worker is excluded until `mark_alive`, because it has answered
                     since, until it leaves the registry, or until it was listed for another `RETRY_LOST_AFTER_S`
    7. `note_refusal`  the worker answers but rejects requests: its state is recorded until a newer view (`Refusals`)

`Refusals` tracks workers that rejected a request because they drain or are paused. Redis has the state of such a worker
within milliseconds, but the local view is up to a heartbeat old; local routing would send it every request until then.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem_engine.base.clock import Clock
from tandem_engine.base.release import skew
from tandem_engine.config import Role
from tandem_services.router.decision import MemberProofs, WorkerView
from tandem_services.router.deployment import supersedes
from tandem_services.router.keys import LEASE_MS, worker_id_of
from tandem_services.router.registry import WorkerRecord, WorkerState
from tandem_services.router.starting import StartingWorker
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_services.router.views.groups import FleetGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMember:
    record: WorkerRecord
    suspect: bool
    """This gateway has lost its connection to it and does not choose it."""
    skewed: bool = False
    """Its release is outside the window of this gateway's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetView:
    """What routing uses now."""

    members: tuple[FleetMember, ...]
    age_s: float
    """Seconds since Redis last returned the members. After a few heartbeats Redis counts as unavailable."""
    starting: tuple[StartingWorker, ...] = ()
    """Those that are not members yet, read while people look."""


VIEW_DELAY_S = 0.25
"""A view requested sooner after a rejection may be older than the worker's own report to Redis."""

RETRY_REJECTED_AFTER_S = 2.0
"""While Redis is unavailable there is no view, and only the worker can report that it accepts requests: it is tried."""


logger = logging.getLogger(__name__)


class _Refusal(NamedTuple):
    state: WorkerState
    at: float


@dataclass(slots=True)
class Refusals:
    """Workers that rejected a request, and why. One instance per router."""

    clock: Clock
    _latest: dict[str, _Refusal] = field(default_factory=dict)

    def note(self, incarnation: str, state: WorkerState) -> None:
        """`state`: why the worker rejected the request."""
        self._latest[incarnation] = _Refusal(state, self.clock.now())

    def state(self, incarnation: str) -> WorkerState | None:
        """The state that its last rejection showed; None if the view is newer."""
        refusal = self._latest.get(incarnation)
        if refusal is None or self.clock.now() - refusal.at > RETRY_REJECTED_AFTER_S:
            return None
        return refusal.state

    @property
    def refusing(self) -> frozenset[str]:
        """Workers with a `state`."""
        return frozenset(name for name in self._latest if self.state(name) is not None)

    def settle(self, *, requested_at: float) -> None:
        """Apply a view requested at `requested_at`, which contains the cause of every rejection well before that."""
        self._latest = {name: each for name, each in self._latest.items() if each.at + VIEW_DELAY_S > requested_at}


RETRY_LOST_AFTER_S = 10.0
"""As long as it takes until a silent incarnation is fenced for good (`keys.FENCE_AFTER_MS`)."""

PROOF_WAIT_S = 0.5
"""How long a request waits for a worker that has not answered lately. An engine in a long step answers every quarter
second (`scheduler.loop.WAIT_SLICE`): twice that, or busy workers would lose requests for what they have cached."""

KEEPER_WAIT_S = 4.0
"""The same for a worker that keeps the session of the request, which no other can serve: as long as it takes until
unanswered pings end a connection."""


@dataclass(kw_only=True, slots=True)
class Membership:
    """The workers a gateway may use. Not thread-safe; lives on the event loop."""

    clock: Clock
    proofs: MemberProofs | None = None
    """None: rows alone count."""
    _encoding: str = ""
    """"": not compared."""
    _foreign: frozenset[str] = frozenset()
    """Incarnations of the view that report another encoding."""
    groups: FleetGroups = field(default_factory=FleetGroups)
    """The view by model, role and compat hash."""
    _records: dict[str, WorkerRecord] = field(default_factory=dict)
    _unlisted: dict[str, float] = field(default_factory=dict)
    """Members that the last snapshot did not name, and since when snapshots do not."""
    _skewed: frozenset[str] = frozenset()
    """Incarnations of the view that are of a release outside the window."""
    _marked_dead: dict[str, float] = field(default_factory=dict)
    _nameless: dict[str, float] = field(default_factory=dict)
    """Incarnations that Redis chose and no signed row describes, and when that was."""
    _workers: tuple[WorkerView, ...] | None = None
    """What `workers` returned last, without `_out`; None after a new view."""
    _out: frozenset[str] = frozenset()
    _unready: frozenset[str] = frozenset()
    _offered: tuple[WorkerView, ...] = ()
    """What `offered` returned last: those of `_offered_of` that are not in `_closed`."""
    _offered_of: tuple[WorkerView, ...] | None = None
    _closed: frozenset[str] = frozenset()
    _shares_of: tuple[WorkerView, ...] | None = None
    """The workers whose unlisted shares by model are in `_shares`."""
    _shares: dict[str, float] = field(default_factory=dict)
    _rated: tuple[WorkerView, ...] | None = None
    """The workers whose rates by model are in `_rates`."""
    _rates: dict[str, float] = field(default_factory=dict)
    _refusals: Refusals = field(init=False)
    _epoch: str = ""
    _malformed: int = 0
    _recovering_until: float = float("-inf")

    def __post_init__(self) -> None:
        self._refusals = Refusals(self.clock)

    def require_encoding(self, digest: str) -> None:
        """`tokenizer.json` with this digest encodes requests. A worker that reports another one would read other text:
        it is offered none, but stays a member that a canary may name."""
        self._encoding = digest
        self._note_foreign()

    @property
    def recovering(self) -> bool:
        """The registry lost entries a moment ago and is not complete yet."""
        return self.clock.now() < self._recovering_until

    @property
    def unlisted(self) -> frozenset[str]:
        """Members that the last snapshot did not name: Redis cannot choose them."""
        return frozenset(self._unlisted)

    def unlisted_share(self, model: str) -> float:
        """Share of the members that serve `model` and that Redis cannot choose, 0 to 1."""
        if not self._unlisted:
            return 0.0
        workers = self.workers()
        if workers is not self._shares_of:
            self._shares_of, self._shares = workers, {}
        if model not in self._shares:
            serving = [view.incarnation for view in workers if view.model == model]
            self._shares[model] = len(self._unlisted.keys() & serving) / len(serving) if serving else 0.0
        return self._shares[model]

    @property
    def unusable(self) -> frozenset[str]:
        """Incarnations that no request may be sent to: dead, silent, outside the window, of another encoding, or
        without a signed row."""
        silent = frozenset[str]() if self.proofs is None else self.proofs.silent
        return self._skewed | self._foreign | silent | self.dead | frozenset(self._nameless)

    @property
    def dead(self) -> frozenset[str]:
        """Incarnations that this gateway found dead and the registry does not know to be gone."""
        return frozenset(self._marked_dead)

    def update(self, snapshot: FleetSnapshot, *, requested_at: float | None = None) -> None:
        """Apply a snapshot of the registry, requested at `requested_at`, or just now."""
        # A record that stays malformed must not keep the old view forever.
        if snapshot.malformed > self._malformed or (self._epoch and snapshot.epoch != self._epoch):
            self._recovering_until = self.clock.now() + LEASE_MS / 1000
        self._epoch, self._malformed = snapshot.epoch, snapshot.malformed
        seen = {record.view.incarnation: record for record in snapshot.workers}
        kept = self._survivors(seen.values(), fenced=snapshot.fenced)
        self._records = kept | seen
        self.groups.update(self._records)
        self._workers = None
        ready = WorkerState.READY
        self._unready = frozenset(name for name, record in self._records.items() if record.state is not ready)
        now = self.clock.now()
        self._unlisted = {name: self._unlisted.get(name, now) for name in kept}
        self._nameless = {
            name: at for name, at in self._nameless.items() if name not in seen and now - at < LEASE_MS / 1000
        }
        self._retry_lost(seen)
        self._note_skewed()
        self._note_foreign()
        self._watch()
        self._refusals.settle(requested_at=self.clock.now() if requested_at is None else requested_at)

    def rely_on(self, proofs: MemberProofs) -> None:
        """From now on send only to workers that answer, according to `proofs`."""
        self.proofs = proofs
        self._watch()

    async def prove(self, incarnation: str, *, within_s: float) -> bool:
        """Whether something may be sent to this incarnation; one that has not answered lately gets `within_s`."""
        record = self._records.get(incarnation)
        if record is None or incarnation in self._marked_dead or incarnation in self._skewed:
            return False
        return self.proofs is None or await self.proofs.prove(record.view, within_s=within_s)

    async def unproven(self, incarnations: Iterable[str]) -> frozenset[str]:
        """Those that nothing may be sent to, after all were asked at once."""
        names = [name for name in sorted(set(incarnations)) if not self._is_proven_now(name)]
        if not names:
            return frozenset()
        proven = await asyncio.gather(*(self.prove(name, within_s=PROOF_WAIT_S) for name in names))
        return frozenset(name for name, is_proven in zip(names, proven, strict=True) if not is_proven)

    def mark_dead(self, incarnation: str) -> None:
        """The gateway lost its connection to this incarnation."""
        self._marked_dead.setdefault(incarnation, self.clock.now())

    def mark_alive(self, incarnation: str) -> None:
        """This incarnation has answered the gateway since. Its state in the registry counts again."""
        self._marked_dead.pop(incarnation, None)
        record = self._records.get(incarnation)
        if self.proofs is not None and record is not None and incarnation not in self._skewed:
            self.proofs.watch_again(record.view, unlisted=incarnation in self._unlisted)

    def note_nameless(self, incarnation: str) -> None:
        """Redis has chosen it, and it is not in the view: only one request per lease should find out."""
        self._nameless[incarnation] = self.clock.now()

    def note_refusal(self, incarnation: str, state: WorkerState) -> None:
        """This incarnation has sent a request away, because it is in `state`."""
        self._refusals.note(incarnation, state)

    def workers(self) -> tuple[WorkerView, ...]:
        """All workers that something may be sent to, draining and stalled ones included. The same object while they
        are the same: every request reads it."""
        out = self._skewed | self.dead | (frozenset() if self.proofs is None else self.proofs.silent)
        if self._workers is None or out != self._out:
            self._out = out
            self._workers = tuple(record.view for name, record in self._records.items() if name not in out)
        return self._workers

    def offered(self) -> tuple[WorkerView, ...]:
        """Those of `workers` that a new request may be sent to: of its encoding, and neither on standby, draining,
        stalled nor paused. The same object while they are the same."""
        workers, closed = self.workers(), self._unready | self._foreign | self._refusals.refusing
        if workers is not self._offered_of or closed != self._closed:
            self._offered_of, self._closed = workers, closed
            self._offered = tuple(view for view in workers if view.incarnation not in closed)
        return self._offered

    def ready(self) -> tuple[WorkerView, ...]:
        """Those of `workers` that are ready, whatever their tokenizer is."""
        return tuple(
            record.view
            for incarnation, record in self._records.items()
            if record.state is WorkerState.READY and self._usable(incarnation)
        )

    def members(self) -> tuple[FleetMember, ...]:
        """All workers in the view, dead ones included."""
        return tuple(
            FleetMember(
                record=self._as_known(record),
                suspect=not self._usable(incarnation),
                skewed=incarnation in self._skewed,
            )
            for incarnation, record in self._records.items()
        )

    def find(self, incarnation: str) -> WorkerRecord | None:
        return self._records.get(incarnation)

    def find_usable(self, incarnation: str) -> WorkerView | None:
        """None, too, for one that nothing may be sent to."""
        usable = self._usable(incarnation) and incarnation not in self._foreign
        return self._records[incarnation].view if usable else None

    def unknown(self, incarnations: Iterable[str]) -> set[str]:
        """Those of `incarnations` that are not in the view."""
        return {incarnation for incarnation in incarnations if incarnation not in self._records}

    def candidates(
        self, model: str, *, prompt_tokens: int, exclude: frozenset[str], only: frozenset[str] | None = None
    ) -> list[WorkerRecord]:
        """Workers that may be offered for a prompt of this length; of `only`, which costs a look at these alone."""
        return list(self.each_candidate(model, prompt_tokens=prompt_tokens, exclude=exclude, only=only))

    def each_candidate(
        self, model: str, *, prompt_tokens: int, exclude: frozenset[str], only: frozenset[str] | None = None
    ) -> Iterator[WorkerRecord]:
        """As `candidates`, for readers that may stop early."""
        for name in self._records if only is None else sorted(only):
            record = self.candidate(name, model, prompt_tokens=prompt_tokens, exclude=exclude)
            if record is not None:
                yield record

    def candidate(
        self, incarnation: str, model: str, *, prompt_tokens: int, exclude: frozenset[str]
    ) -> WorkerRecord | None:
        """This one, if it is among `candidates`."""
        record = self._records.get(incarnation)
        if record is None or incarnation in exclude:
            return None
        view = record.view
        if view.model != model or view.context_length <= prompt_tokens:
            return None
        return record if self._offers(incarnation) else None

    def prefill_rate(self, model: str) -> float:
        """Prompt tokens per second of all workers that compute prompts of `model`; 0 without any."""
        offered = self.offered()
        if offered is not self._rated:
            self._rated, self._rates = offered, {}
            for view in offered:
                if view.role is not Role.DECODE:
                    rate = self._records[view.incarnation].load.prefill_rate
                    self._rates[view.model] = self._rates.get(view.model, 0.0) + rate
        return self._rates.get(model, 0.0)

    def page_size(self, model: str) -> int | None:
        """Page size of most workers of the model: the others' caches cannot be matched with the same chain."""
        return self.groups.page_size(model)

    def _is_proven_now(self, incarnation: str) -> bool:
        """Whether `prove` would answer yes without a wait."""
        if incarnation not in self._records or incarnation in self._marked_dead or incarnation in self._skewed:
            return False
        return self.proofs is None or self.proofs.proven_now(incarnation)

    def _as_known(self, record: WorkerRecord) -> WorkerRecord:
        state = self._refusals.state(record.view.incarnation)
        return record if state is None else replace(record, state=state)

    def _offers(self, incarnation: str) -> bool:
        """Of one in the view. Written out, because a decision asks it of some forty workers."""
        if incarnation in self._unready or incarnation in self._foreign:
            return False
        if incarnation in self._marked_dead or incarnation in self._skewed:
            return False
        if self.proofs is not None and incarnation in self.proofs.silent:
            return False
        return self._refusals.state(incarnation) is None

    def _usable(self, incarnation: str) -> bool:
        if incarnation not in self._records or incarnation in self._marked_dead or incarnation in self._skewed:
            return False
        return self.proofs is None or incarnation not in self.proofs.silent

    def _watch(self) -> None:
        if self.proofs is not None:
            without = self._marked_dead.keys() | self._skewed
            views = [record.view for name, record in self._records.items() if name not in without]
            self.proofs.watch(views, unlisted=frozenset(self._unlisted))

    def _note_foreign(self) -> None:
        own, views = self._encoding, (record.view for record in self._records.values())
        found = (view.incarnation for view in views if view.encoding and view.encoding != own)
        self._foreign = frozenset(found) if own else frozenset()

    def _note_skewed(self) -> None:
        problems = {release: skew(release) for release in {r.view.release for r in self._records.values()}}
        skewed = frozenset(name for name, record in self._records.items() if problems[record.view.release])
        for name in sorted(skewed - self._skewed):
            logger.warning("worker %s gets no requests: %s", name, problems[self._records[name].view.release])
        self._skewed = skewed

    def _survivors(self, seen: Iterable[WorkerRecord], *, fenced: frozenset[str]) -> dict[str, WorkerRecord]:
        """Records of the previous view that no current row replaces and that are still valid."""
        newest = {record.view.worker_id: record.view.incarnation for record in seen}
        listed = frozenset(newest.values())
        return {
            name: record
            for name, record in self._records.items()
            if name not in listed
            and name not in fenced
            and not self._replaced(name, newest.get(worker_id_of(name)))
            and (self.recovering or self._may_answer(name))
        }

    def _may_answer(self, incarnation: str) -> bool:
        """Whether it proves to be a member, or was lost or left Redis a moment ago and is being probed."""
        if self.proofs is None:
            return False
        now = self.clock.now()
        lost_at = self._marked_dead.get(incarnation)
        if lost_at is not None:
            return now - lost_at < RETRY_LOST_AFTER_S
        if incarnation in self._skewed:
            return False
        unlisted_at = self._unlisted.get(incarnation, now)
        return self.proofs.proven(incarnation) or now - unlisted_at < RETRY_LOST_AFTER_S

    def _replaced(self, incarnation: str, by: str | None) -> bool:
        """By rows alone whichever incarnation registers takes the place of the other; the row of an older one proves
        nothing against one that answers."""
        return by is not None and (self.proofs is None or supersedes(by, incarnation))

    def _retry_lost(self, seen: dict[str, WorkerRecord]) -> None:
        now = self.clock.now()
        self._marked_dead = {
            incarnation: since
            for incarnation, since in self._marked_dead.items()
            if (incarnation in seen and now - since < RETRY_LOST_AFTER_S)
            or (incarnation not in seen and incarnation in self._records)
        }
