"""Leader election by a Lease, as in client-go: one of several operators acts.

    candidate ──lease free, or unchanged for its duration──▶ leader ──renewed every few seconds──▶ leader
        ▲                                                      │ not renewed within the deadline,
        └──────────────────────────────────────────────────────┘ or held by another operator

Times in the Lease are informational and never compared. A candidate takes over when it has itself seen the same record
for the lease's duration on its monotonic clock, and a leader stops by its own clock [one-leader] [one-clock]. The renew
deadline is shorter than the duration, so the old leader has stopped before the new one starts, whatever the network
does.

`Election` is pure: it gets what was read and the results of its writes. `Leadership` does the I/O.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tandem_operator.builders.containers import Manifest
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.store import LEASE
from tandem_operator.planning.observed import Ref


@dataclass(frozen=True, kw_only=True, slots=True)
class ElectionConfig:
    """Seconds, and where the Lease is."""

    identity: str
    namespace: str
    name: str = "tandem-operator"
    duration_s: float = 15.0
    """A leader that is silent for so long has lost."""
    renew_deadline_s: float = 10.0
    """A leader that could not renew for so long stops acting."""
    retry_s: float = 2.0
    """Time between two attempts, of leader and candidates."""

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_deadline_s < self.duration_s:
            raise ValueError(
                f"lease duration {self.duration_s:g} s must be above the renew deadline {self.renew_deadline_s:g} s, "
                f"and that above the retry period {self.retry_s:g} s"
            )


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of the Lease, and since when it has been the same by our clock."""

    holder: str
    version: str
    since: float


class Election:
    """State of one candidate. `clock` is monotonic, in seconds; `wall` returns RFC 3339 with microseconds."""

    def __init__(self, config: ElectionConfig, clock: Callable[[], float], wall: Callable[[], str]) -> None:
        self.config = config
        self._clock = clock
        self._wall = wall
        self._record: _Record | None = None
        self._renewed_at: float | None = None

    def leading(self) -> bool:
        """Whether it may act at this very moment."""
        return self._renewed_at is not None and self._clock() - self._renewed_at < self.config.renew_deadline_s

    @property
    def holder(self) -> str:
        """The leader, as far as is known; empty without one."""
        return self._record.holder if self._record is not None else ""

    def attempt(self, lease: Manifest | None) -> Manifest | None:
        """What to write, having read `lease` (None: there is none). None: another operator leads; try again later.

        The result has the version that was read, so it fails after another operator's write.
        """
        if lease is None:
            return self._fresh()
        spec = lease.get("spec", {})
        holder, version = spec.get("holderIdentity") or "", lease["metadata"]["resourceVersion"]
        if self._record is None or (self._record.holder, self._record.version) != (holder, version):
            self._record = _Record(holder, version, self._clock())
        if holder == self.config.identity:
            return self._held(lease, spec, transitions=0)
        if holder and self._clock() - self._record.since < float(spec.get("leaseDurationSeconds") or 0):
            self._renewed_at = None
            return None
        return self._held(lease, {**spec, "acquireTime": self._wall()}, transitions=1)

    def wrote(self, lease: Manifest, begun: float) -> None:
        """The write of `attempt` has succeeded. `begun`: when it was sent, for that is when the time of others may
        begin to count."""
        self._record = _Record(self.config.identity, lease["metadata"]["resourceVersion"], self._clock())
        self._renewed_at = begun

    def release(self) -> None:
        """It acts no more."""
        self._renewed_at = None

    def resignation(self, lease: Manifest) -> Manifest | None:
        """What to write so that another need not wait; None when it is not ours."""
        spec = lease.get("spec", {})
        if spec.get("holderIdentity") != self.config.identity:
            return None
        return {**lease, "spec": {**spec, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._wall()}}

    def _fresh(self) -> Manifest:
        now = self._wall()
        metadata = {"name": self.config.name, "namespace": self.config.namespace}
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": metadata,
            "spec": self._spec({"acquireTime": now, "leaseTransitions": 0}),
        }

    def _held(self, lease: Manifest, spec: Manifest, *, transitions: int) -> Manifest:
        count = int(spec.get("leaseTransitions") or 0) + transitions
        return {**lease, "spec": self._spec({**spec, "leaseTransitions": count})}

    def _spec(self, spec: dict[str, Any]) -> Manifest:
        ours = {"holderIdentity": self.config.identity, "leaseDurationSeconds": int(self.config.duration_s)}
        return {**spec, **ours, "renewTime": self._wall()}


logger = logging.getLogger(__name__)


class NotLeading(Exception):  # noqa: N818 - it says what is so
    """A write was stopped: another operator leads, or this one may not be sure that it does."""


class LeaseClient(Protocol):
    """What an election requires of the API server."""

    async def get(self, ref: Ref, namespace: str) -> Manifest | None: ...

    async def create(self, manifest: Manifest) -> Manifest: ...

    async def replace(self, manifest: Manifest) -> Manifest: ...


class Leadership:
    """`run` it. `began` and `ended` are called as leadership comes and goes."""

    def __init__(
        self,
        election: Election,
        client: LeaseClient,
        *,
        began: Callable[[], None],
        ended: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._election = election
        self._client = client
        self._began = began
        self._ended = ended
        self._clock = clock
        self._pause = pause
        self._acting = False

    @property
    def leading(self) -> bool:
        return self._election.leading()

    def check(self) -> None:
        """Raises `NotLeading` unless it may act right now."""
        if not self._election.leading():
            raise NotLeading("this operator does not hold the lease")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.turn()
            await self._pause(self._election.config.retry_s)

    async def turn(self) -> None:
        """One attempt to get or to keep the Lease. It never outlasts the renew deadline."""
        try:
            async with asyncio.timeout(self._election.config.renew_deadline_s / 2):
                await self._attempt()
        except (ApiError, TimeoutError) as error:
            logger.warning("cannot renew the lease: %s", str(error) or "no answer in time")
        self._announce()

    async def resign(self) -> None:
        """Stop acting and let another begin at once."""
        was = self._election.leading()
        self._election.release()
        self._announce()
        if not was:
            return
        lease = await self._client.get(self._ref, self._election.config.namespace)
        resignation = self._election.resignation(lease) if lease is not None else None
        if resignation is not None:
            await self._client.replace(resignation)

    @property
    def _ref(self) -> Ref:
        return LEASE.ref(self._election.config.name)

    async def _attempt(self) -> None:
        lease = await self._client.get(self._ref, self._election.config.namespace)
        wanted = self._election.attempt(lease)
        if wanted is None:
            return
        begun = self._clock()
        try:
            written = await (self._client.create(wanted) if lease is None else self._client.replace(wanted))
        except ApiError as error:
            if not error.conflict:
                raise
            # Another operator was faster; the next iteration reads which.
            return
        self._election.wrote(written, begun)

    def _announce(self) -> None:
        leading = self._election.leading()
        if leading == self._acting:
            return
        self._acting = leading
        if leading:
            logger.info("acquired leadership", extra={"identity": self._election.config.identity})
            self._began()
        else:
            logger.warning("lost leadership", extra={"holder": self._election.holder})
            self._ended()
