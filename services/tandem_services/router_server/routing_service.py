"""Makes choices for front ends, over HTTP, gRPC or for an Inference Gateway, and tracks the open ones.

    prompt in token ids ─▶ router ─▶ capacity? ─▶ open, under an id that expires ─▶ released

The front end handles a choice without capacity, with two exceptions: a request with priority below 0 is rejected, and
where a gateway has a queue for it, `place` returns nothing.

`Holds` tracks open choices and remembers recent ones:

    open       reserved; counts as this router's own load
    released   by the front end when its request has ended; a redeemed ticket is released by its gateway
    expired    not released within `ttl_s`, or displaced by newer choices
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem_engine.base.clock import Clock
from tandem_services.common.errors import ApiError, unavailable
from tandem_services.common.tasks import BackgroundTasks, run_periodically
from tandem_services.router.decision import NoWorkersError, RouteDecision, RouteQuery, WorkerView
from tandem_services.router.scoring import has_to_wait, prefill_wait_s
from tandem_services.router.tickets import new_ticket_id
from tandem_services.router_server.schemas import ChoiceRecord, ChosenRoute

logger = logging.getLogger(__name__)
EXPIRY_EVERY_S = 1.0


class Releaser(Protocol):
    """See `Router`."""

    async def release(self, decision: RouteDecision) -> None: ...

    async def release_unredeemed(self, ticket_id: str, decision: RouteDecision) -> None: ...


@dataclass(kw_only=True, slots=True, eq=False)
class Held:
    """One choice that is not released yet."""

    choice: RouteDecision
    record: ChoiceRecord
    since: float

    @property
    def reservation(self) -> str:
        return self.record.choice.reservation


@dataclass(kw_only=True, slots=True)
class Holds:
    """All of one router. Belongs to its event loop."""

    router: Releaser
    clock: Clock
    ttl_s: float
    capacity: int
    remembered: int
    """Records that explain finds, open or not."""
    _open: OrderedDict[str, Held] = field(default_factory=OrderedDict)
    """By reservation, the oldest first."""
    _records: OrderedDict[str, tuple[ChoiceRecord, float]] = field(default_factory=OrderedDict)
    _by_request: dict[str, str] = field(default_factory=dict)
    """A front end's own id → reservation of the newest choice for it."""

    def __len__(self) -> int:
        return len(self._open)

    def hold(self, held: Held) -> list[Held]:
        """Keep a choice. Returns those that are kept no longer, for `give_back`: the oldest, beyond `capacity`."""
        self._open[held.reservation] = held
        self._remember(held)
        return [self._open.popitem(last=False)[1] for _ in range(len(self._open) - self.capacity)]

    async def release(self, reservation: str) -> bool:
        """False when it is not held, or not any more."""
        held = self._open.pop(reservation, None)
        if held is not None:
            await self.give_back(held, "released")
        return held is not None

    async def expire(self) -> None:
        """End what is older than `ttl_s`."""
        now = self.clock.now()
        while self._open and now - next(iter(self._open.values())).since >= self.ttl_s:
            await self.give_back(self._open.popitem(last=False)[1], "expired")

    async def run(self) -> None:
        """Expire old choices until canceled."""
        await run_periodically(self.expire, every_s=EXPIRY_EVERY_S, logger=logger, failure="cannot expire reservations")

    async def close(self) -> None:
        """At shutdown: everything is given back."""
        while self._open:
            await self.give_back(self._open.popitem()[1], "expired")

    async def give_back(self, held: Held, state: str) -> None:
        """End one that is not held any more."""
        held.record.state = state
        if not held.record.choice.for_gateway:
            await self.router.release(held.choice)
        else:
            await self.router.release_unredeemed(held.reservation, held.choice)

    def find(self, name: str) -> ChoiceRecord | None:
        """By reservation, or by the front end's own id: then the newest."""
        found = self._records.get(name) or self._records.get(self._by_request.get(name, ""))
        return None if found is None else self._aged(*found)

    def newest(self, count: int) -> list[ChoiceRecord]:
        names = [*self._records][: -count - 1 : -1]
        return [self._aged(*self._records[name]) for name in names]

    def _aged(self, record: ChoiceRecord, since: float) -> ChoiceRecord:
        record.age_s = round(self.clock.now() - since, 3)
        return record

    def _remember(self, held: Held) -> None:
        self._records[held.reservation] = (held.record, held.since)
        if held.record.request_id:
            self._by_request[held.record.request_id] = held.reservation
        while len(self._records) > self.remembered:
            name, (record, _) = self._records.popitem(last=False)
            if self._by_request.get(record.request_id) == name:
                del self._by_request[record.request_id]


CHOICE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Buckets from one round trip to Redis to a long prompt that is tokenized."""


class RouterMetrics:
    """All series of one router, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "tandem_router_http_requests_total",
            "HTTP requests answered, by status code; 499: the client disconnected",
            ["endpoint", "code"],
            registry=registry,
        )
        self._disconnects = Counter(
            "tandem_router_client_disconnects_total",
            "HTTP requests whose client disconnected before the end",
            registry=registry,
        )
        self._choices = Counter(
            "tandem_router_choices_total",
            "Route decisions by interface (http, grpc, ext_proc), source (redis, local) and placement",
            ["interface", "source", "placement"],
            registry=registry,
        )
        self._refusals = Counter(
            "tandem_router_refusals_total",
            "Requests without a route decision, by interface and status: 400 bad input, 429 no capacity or too many, "
            "503 no worker",
            ["interface", "code"],
            registry=registry,
        )
        self._tokenizer_failures = Counter(
            "tandem_router_tokenizer_load_failures_total",
            "Tokenizers that were parsed and cannot be used",
            ["model_name"],
            registry=registry,
        )
        self.choice_seconds = Histogram(
            "tandem_router_choice_seconds",
            "From a request to its route decision, tokenization included",
            buckets=CHOICE_SECONDS,
            registry=registry,
        )
        self.held = Gauge("tandem_router_held_choices", "Choices that are not released yet", registry=registry)
        self.exchanges = Gauge(
            "tandem_router_ext_proc_exchanges", "Requests of an Inference Gateway in progress", registry=registry
        )
        self.unplaced = Counter(
            "tandem_router_ext_proc_unplaced_total",
            "Requests that were sent to a gateway without a decision: the gateway queues them",
            registry=registry,
        )
        self.elsewhere = Counter(
            "tandem_router_ext_proc_served_elsewhere_total",
            "Requests that another endpoint served than the first that was named",
            registry=registry,
        )
        self.ready_gateways = Gauge(
            "tandem_router_ready_gateways", "Gateways of --gateway that are ready", registry=registry
        )

    def answered(self, endpoint: str, status: int, *, model: str) -> None:  # noqa: ARG002  # no model answers here
        self._requests.labels(endpoint=endpoint, code=str(status)).inc()

    def disconnected(self, *, model: str) -> None:  # noqa: ARG002
        self._disconnects.inc()

    def chose(self, interface: str, source: str, placement: str) -> None:
        self._choices.labels(interface=interface, source=source, placement=placement).inc()

    def refused(self, interface: str, status: int) -> None:
        self._refusals.labels(interface=interface, code=str(status)).inc()

    def tokenizer_failed(self, model: str) -> None:
        self._tokenizer_failures.labels(model_name=model).inc()


NO_ROOM_RETRY_S = 1.0


class Chooser(Releaser, Protocol):
    """What is needed of the router; see `Router`."""

    async def choose(self, query: RouteQuery) -> RouteDecision: ...

    async def issue_ticket(self, ticket_id: str, decision: RouteDecision, query: RouteQuery) -> bool: ...

    def workers(self) -> tuple[WorkerView, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingService:
    """Choices for front ends: made, tracked while they are open, and released."""

    router: Chooser
    holds: Holds
    clock: Clock
    metrics: RouterMetrics
    worker_wait_s: float
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def choose(
        self, query: RouteQuery, *, priority: int, for_gateway: bool, interface: str, return_token_ids: bool = False
    ) -> Held:
        """A choice, held. Raises `ApiError` 503 without workers, and 429 without room for less than priority 0."""
        choice = await self._chosen(query)
        if not self.has_room(choice) and priority < 0:
            await self.router.release(choice)
            raise no_room()
        return await self._hold(query, choice, for_gateway, interface, return_token_ids)

    async def place(self, query: RouteQuery, *, priority: int, interface: str) -> Held | None:
        """As `choose`, for a gateway to carry out; None when the request had better wait for room there."""
        choice = await self._chosen(query)
        if self.has_room(choice):
            held = await self._hold(query, choice, for_gateway=True, interface=interface, return_token_ids=False)
            if held.record.choice.for_gateway:
                return held
            await self.holds.release(held.reservation)
            return None
        await self.router.release(choice)
        if priority < 0:
            raise no_room()
        return None

    async def release(self, reservation: str) -> bool:
        """False when it is not held."""
        released = await self.holds.release(reservation)
        self.metrics.held.set(len(self.holds))
        return released

    def has_room(self, choice: RouteDecision) -> bool:
        """As a gateway's queue sees it."""
        return not has_to_wait(choice.terms) and prefill_wait_s(choice.terms) <= self.worker_wait_s

    async def _chosen(self, query: RouteQuery) -> RouteDecision:
        try:
            return await self.router.choose(query)
        except NoWorkersError as error:
            raise unavailable(str(error), retry_after=error.retry_after) from error

    async def _hold(
        self, query: RouteQuery, choice: RouteDecision, for_gateway: bool, interface: str, return_token_ids: bool
    ) -> Held:
        reservation = new_ticket_id()
        try:
            issued = for_gateway and await self.router.issue_ticket(reservation, choice, query)
        except asyncio.CancelledError:
            # The caller has disconnected and would never release it.
            self.background.start(self.router.release(choice))
            raise
        route = ChosenRoute(
            reservation=reservation,
            expires_in_s=self.holds.ttl_s,
            placement=choice.placement.value,
            source=choice.source.value,
            decode=choice.decode,
            prefill=choice.prefill,
            fetch=choice.fetch,
            prompt_tokens=len(query.token_ids),
            matched_tokens=choice.matched_tokens,
            predicted_s=sum(term.seconds for term in choice.terms),
            terms=choice.terms,
            has_room=self.has_room(choice),
            for_gateway=issued,
            token_ids=query.token_ids if return_token_ids else None,
        )
        record = ChoiceRecord(request_id=query.request_id, model=query.model, interface=interface, choice=route)
        held = Held(choice=choice, record=record, since=self.clock.now())
        for dropped in self.holds.hold(held):
            self.background.start(self.holds.give_back(dropped, "expired"))
        self.metrics.held.set(len(self.holds))
        self.metrics.chose(interface, route.source, route.placement)
        return held


def no_room() -> ApiError:
    """429: what is not important enough to wait."""
    return ApiError(
        429,
        "All workers are at their limit, and a request of priority below 0 does not wait. Try again later.",
        kind="RateLimitError",
        reason="no_room",
        retry_after=NO_ROOM_RETRY_S,
    )


RETRY_S = 1.0


@dataclass(kw_only=True, slots=True)
class Places:
    """`most` of them, for `what`."""

    most: int
    what: str
    taken: int = field(default=0, init=False)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Raises `ApiError` 429 when there is none left."""
        self.take(1)
        try:
            yield
        finally:
            self.give(1)

    def take(self, count: int) -> None:
        """Raises `ApiError` 429 when there are not so many left."""
        if self.taken + count > self.most:
            raise ApiError(
                429,
                f"This router takes at most {self.most} {self.what} at once. Try again later.",
                kind="RateLimitError",
                reason="router_busy",
                retry_after=RETRY_S,
            )
        self.taken += count

    def give(self, count: int) -> None:
        self.taken -= count
