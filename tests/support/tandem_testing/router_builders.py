"""Workers, records and prompts for tests of router and worker service."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from random import Random
from typing import Any

from tandem_engine.base.clock import Clock
from tandem_engine.config import Role
from tandem_engine.messages.kv_events import chain_hashes, chain_seed
from tandem_engine.messages.stats import LinkReport
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.cost import Load
from tandem_services.router.decision import (
    Placement,
    Reservation,
    RouteDecision,
    RouteQuery,
    ScoreTerm,
    Source,
    WorkerView,
)
from tandem_services.router.deployment import Deployment
from tandem_services.router.index import Applied, BlockIndex, IndexUpdate, UpdateKind
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import CONSTANTS, FunctionLibrary, library_source
from tandem_services.router.registry import HeartbeatReply, Registry, WorkerRecord, WorkerState
from tandem_services.router.router import Router, RouterConfig
from tandem_services.router.views.fleet_reader import FleetReader, FleetSnapshot
from tandem_testing.redis_server import RedisServer
from tandem_testing.service_clock import ServiceClock

MODEL = "mini"
PAGE = 16
PATIENT_S = 60.0
"""Deadline of commands in tests that are not about deadlines."""
HOUR_MS = 3_600_000
LASTING = {
    "LEASE_MS": HOUR_MS,
    "FENCE_AFTER_MS": 2 * HOUR_MS,
    "RESERVATION_MS": HOUR_MS,
    "STARTING_MS": HOUR_MS,
}
"""What workers report and routers reserve counts for longer than any machine takes for the calls of a test. A test that
reads the registry must know of it: `patient_router`, and not a process."""


def make_view(name: str, role: Role = Role.BOTH, *, number: int = 1, **changes: Any) -> WorkerView:
    fields: dict[str, Any] = {
        "worker_id": name,
        "incarnation": f"{name}@{number}",
        "role": role,
        "request_endpoint": f"tcp://{name}:5600",
        "peer_endpoint": f"tcp://{name}:5601",
        "compat_hash": "same",
        "context_length": 4096,
        "page_size": PAGE,
        "model": MODEL,
    }
    return WorkerView(**fields | changes)


class FittingList(list[WorkerView]):
    """Workers that could all take the query of a test. Implements `Fitting`, and counts looks."""

    looks = 0

    def __iter__(self) -> Iterator[WorkerView]:
        for worker in super().__iter__():
            self.looks += 1
            yield worker

    def find(self, incarnation: str) -> WorkerView | None:
        self.looks += 1
        return next((worker for worker in super().__iter__() if worker.incarnation == incarnation), None)

    def like(self, worker: WorkerView, *, first: float) -> Iterator[WorkerView]:
        kind = (worker.role, worker.compat_hash)
        alike = [each for each in super().__iter__() if (each.role, each.compat_hash) == kind]
        start = int(first * len(alike))
        for each in alike[start:] + alike[:start]:
            self.looks += 1
            yield each


def make_choice(
    request_id: str, decode: WorkerView, *, source: Source = Source.LOCAL, terms: tuple[ScoreTerm, ...] = ()
) -> RouteDecision:
    """Of one worker that computes everything itself."""
    return RouteDecision(
        request_id=request_id,
        decode=decode,
        prefill=None,
        source=source,
        placement=Placement.ALONE,
        terms=terms,
        matched_tokens=0,
        reservation=Reservation(None, ()),
    )


def make_query(token_ids: Sequence[int], **changes: Any) -> RouteQuery:
    fields: dict[str, Any] = {"request_id": "r", "model": MODEL, "token_ids": token_ids, "max_tokens": 16}
    return RouteQuery(**fields | changes)


def make_load(**changes: float) -> Load:
    """An idle worker with plenty of room: 1000 prompt tokens a second, 10 ms a step, 1 µs to move a token."""
    fields: dict[str, float] = {
        "prefill_rate": 1000.0,
        "step_s": 0.01,
        "room_tokens": 100_000,
        "max_sequences": 64,
        "token_bytes": 1000,
        "transfer_rate": 1e9,
    }
    return Load(**fields | changes)


def make_record(
    name: str,
    role: Role = Role.BOTH,
    *,
    number: int = 1,
    state: WorkerState = WorkerState.READY,
    load: Load | None = None,
    links: tuple[LinkReport, ...] = (),
    **changes: Any,
) -> WorkerRecord:
    return WorkerRecord(
        view=make_view(name, role, number=number, **changes),
        state=state,
        load=load or make_load(),
        details={},
        links=links,
    )


def chain_of(tokens: tuple[int, ...], salt: str = "") -> list[bytes]:
    return chain_hashes(tokens, PAGE, parent=chain_seed(salt))


def make_link(record: WorkerRecord, bytes_per_s: float, **changes: Any) -> LinkReport:
    """What another worker says of its link to this one."""
    return LinkReport(peer=record.view.incarnation, bytes_per_s=bytes_per_s, **changes)


def patient_router(server: RedisServer, *, seed: int = 1, clock: Clock | None = None, **config: Any) -> Router:
    """A router for a fleet whose reports are `LASTING`; what it reserves lasts as long, also by its own clock."""
    timeout = {"routing_timeout_s": PATIENT_S, "background_timeout_s": PATIENT_S}
    settings = RouterConfig(**{"redis": RedisAddress(url=server.url), **timeout, **config})
    source = library_source({**CONSTANTS, **LASTING})
    return Router(settings, random=Random(seed), clock=clock or ServiceClock(), source=source)


class Fleet:
    """Acts for any number of workers on one Redis."""

    def __init__(
        self,
        server: RedisServer,
        *,
        cluster: str = "default",
        user: str = "",
        deployment: Deployment = Deployment(),  # noqa: B008  frozen
        **constants: int,
    ) -> None:
        """`user` is `name:password`. `constants` replace those of `keys`, e.g. `LEASE_MS=100`, to save waiting."""
        self.deployment = deployment
        self.keys = Keys(cluster, deployment.namespace)
        url = server.url.replace("//", f"//{user}@") if user else server.url
        self.client = RedisClient(RedisAddress(url=url), timeout_s=PATIENT_S)
        library = FunctionLibrary(self.client, library_source({**CONSTANTS, **constants}))
        self.registry = Registry(library=library, keys=self.keys, deployment=deployment)
        self.index = BlockIndex(library=library, keys=self.keys)
        self.generation = 0

    async def beat(
        self, record: WorkerRecord, *, report_age_s: float = 0.0, forged: str = "", describe: bool = True
    ) -> HeartbeatReply:
        return await self.registry.heartbeat(
            record, known_generation=self.generation, report_age_s=report_age_s, forged=forged, describe=describe
        )

    async def snapshot(self, missing: Sequence[str] = ()) -> FleetSnapshot:
        """As a reader sees it that has read nothing before."""
        return await FleetReader(registry=self.registry, clock=ServiceClock()).snapshot(missing)

    async def join(self, router: Router, *records: WorkerRecord) -> None:
        """These workers are there, and `router` knows it."""
        for record in records:
            await self.beat(record)
        await router.refresh()

    async def cache(self, record: WorkerRecord, hashes: list[bytes], *, in_host: int = 0) -> None:
        """Make the index say that the worker holds exactly these blocks, the last `in_host` in host memory alone."""
        updates = [IndexUpdate(UpdateKind.CLEARED), IndexUpdate(UpdateKind.STORED, tuple(hashes))]
        if in_host:
            updates.append(IndexUpdate(UpdateKind.HOST_ALONE, tuple(hashes[-in_host:])))
        revision = abs(hash((*hashes, in_host))) % (1 << 40) + 1
        view = record.view
        outcome = await self.index.apply(
            view.incarnation, updates, page_size=view.page_size, builds_on=-1, revision=revision
        )
        assert outcome in {Applied.APPLIED, Applied.REPEATED}, outcome

    async def close(self) -> None:
        await self.client.close()

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, server: RedisServer, **options: Any) -> "AsyncIterator[Fleet]":
        """On an empty Redis, closed at the end of the block. `options` as of the constructor."""
        server.command("FLUSHALL")
        fleet = cls(server, **options)
        try:
            yield fleet
        finally:
            await fleet.close()
