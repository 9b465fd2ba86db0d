"""Workers that start, as they report it in Redis until they are registered.

A worker without an engine has no routing row. It writes what its engine does into one hash of its cluster, once a
heartbeat; a report that is not repeated is forgotten (`keys.STARTING_MS`). People see the reports, and new requests
wait for these workers while no other can serve them (`gateway.queueing.worker_starts`).

A worker signs its name and role, not its progress. Reports that are malformed, or that no process of the deployment
has signed, are left out. A signed report can be replayed: whatever waits for a worker bounds that.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Annotated

import msgspec

from tandem_engine.base.clock import Clock
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import MAX_STARTING, Keys, worker_id_of
from tandem_services.router.redis_functions import FunctionLibrary

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class StartingWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One that is not registered yet."""

    worker_id: _Text
    incarnation: _Text
    role: _Text
    model: _Text
    phase: _Text
    """`base.progress.Phase`, of its release."""
    done: _Count = 0
    total: _Count = 0
    """0: not known."""
    unit: _Text = ""
    """`bytes`, or "" for a count."""
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    """Since its start."""


class StartReport(StartingWorker, frozen=True, kw_only=True):
    """As it is in Redis."""

    proof: _Text = ""
    """See `Deployment.start_proof`. Empty: of a release that signed none."""


_REPORT = msgspec.json.Decoder(StartReport)


@dataclass(frozen=True, slots=True)
class StartingBoard:
    """All methods raise `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys
    deployment: Deployment = field(default_factory=Deployment)

    async def report(self, worker: StartingWorker) -> None:
        """It starts."""
        proof = self.deployment.start_proof(worker.incarnation, role=worker.role, model=worker.model)
        report = StartReport(**msgspec.structs.asdict(worker), proof=proof)
        await self.library.call("starting_report", (self.keys.starting,), worker.worker_id, msgspec.json.encode(report))

    async def forget(self, worker_id: str) -> None:
        """It does not start any more."""
        await self.library.call("starting_report", (self.keys.starting,), worker_id, b"")

    async def read(self) -> tuple[StartingWorker, ...]:
        """Those that start now, by name."""
        texts = await self.library.ask("starting_list", (self.keys.starting,), shape=list[msgspec.Raw])
        found = (self._worker(text) for text in texts[:MAX_STARTING])
        return tuple(sorted((each for each in found if each is not None), key=lambda each: each.worker_id))

    def _worker(self, packed: msgspec.Raw) -> StartingWorker | None:
        """None for what no worker has written. Each is read by itself: bytes that are no text spoil one."""
        try:
            report = _REPORT.decode(msgspec.msgpack.decode(packed, type=str))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        fields = msgspec.structs.asdict(report)
        proof = fields.pop("proof")
        signed = self.deployment.starts(report.incarnation, role=report.role, model=report.model, proof=proof)
        return StartingWorker(**fields) if signed and worker_id_of(report.incarnation) == report.worker_id else None


FIRST_WORKER_S = 0.1
"""Between two views without a worker that decodes: what has come before the first one waits for the view of it."""

STARTS_WANTED_S = 10.0
"""Reports are read for this long after they were last asked for."""


@dataclass(kw_only=True, slots=True)
class SeenStarts:
    """A gateway's view of workers that start."""

    board: StartingBoard
    clock: Clock
    workers: tuple[StartingWorker, ...] = ()
    """As last read; empty while no request needs it or Redis does not answer."""
    _asked_at: float = -inf

    def ask(self) -> tuple[StartingWorker, ...]:
        """As last read, and read with every refresh in the next `STARTS_WANTED_S`."""
        self._asked_at = self.clock.now()
        return self.workers

    async def refresh(self, *, viewed: bool) -> None:
        """After each view of the fleet. `viewed`: people look at the fleet."""
        wanted = viewed or self.clock.now() - self._asked_at < STARTS_WANTED_S
        try:
            self.workers = await self.board.read() if wanted else ()
        except RedisUnavailableError:
            self.workers = ()
