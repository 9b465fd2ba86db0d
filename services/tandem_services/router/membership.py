"""A gateway's view of the fleet: the last snapshot, corrected by what the gateway sees itself.

1. Each heartbeat a snapshot from Redis replaces the view.
2. Redis away: the view stays as it is; workers whose heartbeats cannot be seen remain usable.
3. Redis back but wiped (new epoch), or with new rubbish in the registry: workers of the old view stay for one
   lease, in which the living ones register again; then only the new registry counts.
4. `mark_dead`: the gateway lost the connection. The worker is left out until `mark_alive`, because it has answered
   since, until it is gone from the registry, or until it has been there for another `FORGIVE_S`.
5. `note_refusal`: the worker answers, and sends requests away. It has that state until a view knows more (`refusals`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tandem_engine.clock import Clock
from tandem_services.router.choice import WorkerView
from tandem_services.router.fleet import FleetMember
from tandem_services.router.keys import LEASE_MS
from tandem_services.router.refusals import Refusals
from tandem_services.router.registry import FleetSnapshot, WorkerRecord, WorkerState

FORGIVE_S = 10.0
"""As long as it takes until a silent incarnation is fenced for good (`keys.FENCE_AFTER_MS`)."""


@dataclass(kw_only=True, slots=True)
class Membership:
    """The workers a gateway may use. Not thread-safe; lives on the event loop."""

    clock: Clock
    _records: dict[str, WorkerRecord] = field(default_factory=dict)
    _marked_dead: dict[str, float] = field(default_factory=dict)
    _refusals: Refusals = field(init=False)
    _epoch: str = ""
    _rubbish: int = 0
    _recovering_until: float = float("-inf")

    def __post_init__(self) -> None:
        self._refusals = Refusals(self.clock)

    @property
    def recovering(self) -> bool:
        """The registry lost entries a moment ago and is not complete yet."""
        return self.clock.now() < self._recovering_until

    @property
    def dead(self) -> frozenset[str]:
        """Incarnations that this gateway found dead and the registry does not know to be gone."""
        return frozenset(self._marked_dead)

    def update(self, snapshot: FleetSnapshot, *, asked_at: float | None = None) -> None:
        """Take over what the registry says; it was asked at `asked_at`, or just now."""
        # A record that stays senseless must not keep the old view for ever.
        if snapshot.rubbish > self._rubbish or (self._epoch and snapshot.epoch != self._epoch):
            self._recovering_until = self.clock.now() + LEASE_MS / 1000
        self._epoch, self._rubbish = snapshot.epoch, snapshot.rubbish
        seen = {record.view.incarnation: record for record in snapshot.workers}
        kept = self._survivors(seen.values()) if self.recovering else {}
        self._records = kept | seen
        self._forgive(seen)
        self._refusals.settle(asked_at=self.clock.now() if asked_at is None else asked_at)

    def mark_dead(self, incarnation: str) -> None:
        """The gateway lost its connection to this incarnation."""
        self._marked_dead.setdefault(incarnation, self.clock.now())

    def mark_alive(self, incarnation: str) -> None:
        """This incarnation has answered the gateway since. What the registry says of it counts again."""
        self._marked_dead.pop(incarnation, None)

    def note_refusal(self, incarnation: str, state: WorkerState) -> None:
        """This incarnation has sent a request away, because it is in `state`."""
        self._refusals.note(incarnation, state)

    def workers(self) -> tuple[WorkerView, ...]:
        """Everybody in the view but the dead; draining and stalled workers included."""
        return tuple(r.view for r in self._records.values() if r.view.incarnation not in self._marked_dead)

    def members(self) -> tuple[FleetMember, ...]:
        """Everybody in the view, the dead included."""
        return tuple(
            FleetMember(record=self._as_known(record), suspect=incarnation in self._marked_dead)
            for incarnation, record in self._records.items()
        )

    def find(self, incarnation: str) -> WorkerRecord | None:
        return self._records.get(incarnation)

    def unknown(self, incarnations: Iterable[str]) -> set[str]:
        """Those of `incarnations` that are not in the view."""
        return {incarnation for incarnation in incarnations if incarnation not in self._records}

    def candidates(self, model: str, *, prompt_tokens: int, exclude: frozenset[str]) -> list[WorkerRecord]:
        """Workers that may be offered for a prompt of this length."""
        return [
            record
            for incarnation, record in self._records.items()
            if record.state is WorkerState.READY
            and self._refusals.state(incarnation) is None
            and record.view.model == model
            and record.view.context_length > prompt_tokens
            and incarnation not in exclude
            and incarnation not in self._marked_dead
        ]

    def page_size(self, model: str) -> int | None:
        """Page size of most workers of the model: the others' caches cannot be matched with the same chain."""
        sizes = Counter(r.view.page_size for r in self._records.values() if r.view.model == model)
        return sizes.most_common(1)[0][0] if sizes else None

    def _as_known(self, record: WorkerRecord) -> WorkerRecord:
        state = self._refusals.state(record.view.incarnation)
        return record if state is None else replace(record, state=state)

    def _survivors(self, seen: Iterable[WorkerRecord]) -> dict[str, WorkerRecord]:
        """Records of before the wipe whose worker has not come back under another incarnation."""
        back = {record.view.worker_id for record in seen}
        return {key: r for key, r in self._records.items() if r.view.worker_id not in back}

    def _forgive(self, seen: dict[str, WorkerRecord]) -> None:
        now = self.clock.now()
        self._marked_dead = {
            incarnation: since
            for incarnation, since in self._marked_dead.items()
            if (incarnation in seen and now - since < FORGIVE_S)
            or (incarnation not in seen and incarnation in self._records)
        }
