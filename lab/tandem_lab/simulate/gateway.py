"""A gateway's queue in simulated time: the product's own `LateBinding`, driven by events instead of time.

arrive   each choice of a request, as in a gateway. One that fits no worker is rejected; the queue routes the others,
         or gives them a slot. The first rejected choice ends the waiting ones of its request
turn     while requests wait: at once after each admission, when a request of this gateway has ended and when a new
         request goes before all that wait, else each `poll_s`
sync     of several gateways: the service of tenants is added up in Redis, as often as gateways do it
refresh  the view of the fleet, once a heartbeat, each gateway at a different moment
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tandem_lab.simulate.fleet import MODEL, Fleet
from tandem_lab.simulate.requests import SimulatedRequest
from tandem_services.common.errors import ApiError
from tandem_services.gateway.limits import check_context
from tandem_services.gateway.queueing.fair_queue import SYNC_S, FairQueue, SharedCounters
from tandem_services.gateway.queueing.late_binding import NEXT_S, LateBinding
from tandem_services.gateway.queueing.queue_entry import QueueEntry
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy
from tandem_services.gateway.queueing.shared_route import SharedRoute
from tandem_services.router.decision import RouteDecision, RouteQuery, WorkerView
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.router import RouterCounters
from tandem_services.router.usage_counters import VirtualCounters

TOO_LONG = "context_length"
"""Why a request is refused before it is queued: 400, and the same for all time."""

MAX_GATEWAYS = 64


class Chooser(Protocol):
    """Interface of the router for a gateway: that of the product, or another one for comparison."""

    counters: RouterCounters

    async def refresh(self) -> None:
        """Called each simulated second."""

    async def choose(self, query: RouteQuery) -> RouteDecision:
        """Raises `NoWorkersError`."""

    async def release(self, decision: RouteDecision) -> None:
        """The last token of what was chosen is out, or there is no room for it. Called once for each choice."""

    def workers(self) -> tuple[WorkerView, ...]:
        """The fleet as last seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayShape:
    """How many gateways, and what each is like."""

    gateways: int = 1
    seats: int = 1024
    policy: AdmissionPolicy = field(default_factory=AdmissionPolicy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What waits at all gateways, as the autoscaler sees it."""

    requests: int
    prompt_tokens: int
    oldest_wait_s: float
    without_worker: int
    """Requests that no worker can serve, as opposed to those for which no worker has capacity."""


@dataclass(slots=True)
class QueueNotes:
    """An `Observer` that keeps the values of the report."""

    waits: list[float] = field(default_factory=list)
    """Seconds in the queue, of those that got a worker; 0 for those that found one at once."""
    refusals: Counter[str] = field(default_factory=Counter)

    def note_demand(self, prompt_tokens: int, *, gap_s: float) -> None:
        del prompt_tokens, gap_s

    def admitted(self, wait_s: float, *, prompt_tokens: int, matched_tokens: int) -> None:
        del prompt_tokens, matched_tokens
        self.waits.append(wait_s)

    def start_awaited(self, wait_s: float, *, served: bool) -> None:
        del wait_s, served

    def refused(self, reason: str) -> None:
        self.refusals[reason] += 1

    def waiting(self, lengths: Mapping[str, int]) -> None:
        del lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Receives the result of a request, after the queue is done with it."""

    admitted: Callable[[int, RouteDecision], Awaitable[None]]
    """The choice of this number has workers."""
    refused: Callable[[int], None]
    """So many of its choices get none; called once."""


class Gateway:
    """One of a run."""

    def __init__(self, chooser: Chooser, fleet: Fleet, shape: GatewayShape, number: int = 0) -> None:
        self.chooser = chooser
        self.notes = QueueNotes()
        self._fleet = fleet
        self._events = fleet.redis.events
        self._turns = 0
        self._taking_turns = False
        self._asked: RouteQuery | None = None
        """The request of the last router query."""
        counters = VirtualCounters()
        # Redis returns to a single gateway what that gateway has reported.
        fairness = fleet.redis.fairness if shape.gateways > 1 else None
        self.binding = LateBinding(
            chooser=chooser,
            clock=self._events,
            queue=FairQueue(seats=shape.seats, counters=counters),
            counters=SharedCounters(counters=counters, board=fairness, gateway=str(number)),
            observer=self.notes,
            policy=shape.policy,
        )

    async def begin(self, *, after_s: float) -> None:
        """`after_s`: time within each second at which it reads the fleet. Raises `RedisUnavailableError`."""
        await self.chooser.refresh()
        self._events.after(HEARTBEAT_S + after_s, self._refresh)
        if self.binding.counters.board is not None:
            self._events.after(SYNC_S + after_s, self._sync)

    async def arrive(self, request: SimulatedRequest, client: Client, numbers: Sequence[int]) -> None:
        """Choices of `request`, by their numbers. Raises whatever the router raises but `NoWorkersError`."""
        try:
            self._check(request)
        except ApiError:
            client.refused(len(numbers))
            return
        arrival = _Arrival(self, client)
        route = SharedRoute() if len(numbers) > 1 else None
        for number in numbers:
            await self._arrive(request, arrival, number, route)
        if arrival.refusals:
            # As in a gateway: all have come before one of them ends the request.
            arrival.end()
        elif arrival.waiting and not self._taking_turns:
            self._plan_turn(0.0)

    async def _arrive(
        self, request: SimulatedRequest, arrival: "_Arrival", number: int, route: SharedRoute | None
    ) -> None:
        query = partial(self._query, request, number)

        async def ask(query: RouteQuery) -> RouteDecision:
            await self._fleet.redis.follow()
            return await self.chooser.choose(query)

        async def alone() -> RouteDecision:
            return await ask(query())

        async def beside() -> RouteDecision:
            return await alone() if route is None else await route.choose(self.chooser, query(), ask, alone)

        answer = _Answer(arrival, number)
        entry = self.binding.entry(
            beside,
            answer,
            tenant=request.tenant,
            priority=request.priority,
            prompt_tokens=request.prompt_tokens,
        )
        answer.entry = entry
        arrival.waiting.append(entry)
        try:
            decision = await self.binding.arrive(entry)
        except ApiError:
            arrival.waiting.remove(entry)
            arrival.refusals += 1
            return
        if decision is not None:
            arrival.waiting.remove(entry)
            await arrival.client.admitted(number, decision)
        elif self.binding.has_overtaken(entry):
            self._events.after(NEXT_S, lambda: self._try_now(entry))

    async def ended(self, request: SimulatedRequest, decision: RouteDecision) -> None:
        """Its last token is out."""
        await self._fleet.redis.follow()
        await self.chooser.release(decision)
        self.binding.charge_output(request.tenant, request.output_tokens)
        self.binding.freed(cell=decision.cell)
        if self.binding.queue:
            self._plan_turn(0.0)

    def after(self, action: Callable[[], Awaitable[None] | None]) -> None:
        """Immediately, but after the current callback: a gateway wakes another task."""
        self._events.after(0.0, action)

    def _check(self, request: SimulatedRequest) -> None:
        """Raises `ApiError` 400 where no worker could ever hold it."""
        try:
            check_context(request.prompt_tokens, request.output_tokens, self._fleet.longest, "prompt")
        except ApiError:
            self.notes.refused(TOO_LONG)
            raise

    def _query(self, request: SimulatedRequest, number: int) -> RouteQuery:
        """The same object for repeated queries of one request: kept for all that wait they would take memory."""
        request_id = f"request-{request.number}"
        query = self._query_of(request, request_id)
        return replace(query, request_id=f"{request_id}-{number}") if request.choices > 1 else query

    def _query_of(self, request: SimulatedRequest, request_id: str) -> RouteQuery:
        if self._asked is None or self._asked.request_id != request_id:
            self._asked = RouteQuery(
                request_id=request_id,
                model=MODEL,
                token_ids=request.token_ids(),
                cache_salt=request.cache_salt,
                max_tokens=request.output_tokens,
                session_key=request.session,
            )
        return self._asked

    def _try_now(self, entry: QueueEntry) -> None:
        if self.binding.is_next(entry):
            self._plan_turn(0.0)

    def _plan_turn(self, seconds: float) -> None:
        """Instead of the one that is planned."""
        self._taking_turns = True
        self._turns += 1
        number = self._turns
        self._events.after(seconds, lambda: self._turn(number))

    async def _turn(self, number: int) -> None:
        if number != self._turns:
            return
        self._taking_turns = bool(self.binding.queue)
        if self._taking_turns:
            admitted = await self.binding.turn()
            self._plan_turn(0.0 if admitted else self.binding.policy.poll_s)

    async def _refresh(self) -> None:
        if self._fleet.closing:
            return
        await self._fleet.redis.follow()
        await self.chooser.refresh()
        self._events.after(HEARTBEAT_S, self._refresh)

    async def _sync(self) -> None:
        if self._fleet.closing:
            return
        await self._fleet.redis.follow()
        await self.binding.sync()
        self._events.after(SYNC_S, self._sync)


@dataclass(slots=True)
class _Arrival:
    """Choices of one request, from their arrival on. Clients of a trace never leave."""

    gateway: Gateway
    client: Client
    waiting: list[QueueEntry] = field(default_factory=list)
    refusals: int = 0

    def end(self) -> None:
        """A choice was rejected: none waits any more. Running ones continue to their end."""
        left, self.waiting = self.waiting, []
        for entry in left:
            self.gateway.binding.leave(entry)
        self.client.refused(self.refusals + len(left))


@dataclass(slots=True)
class _Answer:
    """Of one choice in the queue."""

    arrival: _Arrival
    number: int
    entry: QueueEntry | None = None

    def done(self) -> bool:
        return self.entry not in self.arrival.waiting

    def set_result(self, result: RouteDecision, /) -> None:
        assert self.entry is not None
        self.arrival.waiting.remove(self.entry)
        self.arrival.gateway.after(lambda: self.arrival.client.admitted(self.number, result))

    def set_exception(self, exception: BaseException, /) -> None:
        assert self.entry is not None
        self.arrival.waiting.remove(self.entry)
        self.arrival.refusals += 1
        if self.arrival.refusals == 1 or not isinstance(exception, ApiError):
            self.arrival.gateway.after(lambda: self._failed(exception))

    def _failed(self, exception: BaseException) -> None:
        """Raises what is no refusal: it ends the run."""
        if not isinstance(exception, ApiError):
            raise exception
        self.arrival.end()


def held_at(gateways: Iterable[Gateway]) -> Held:
    """What waits there now."""
    queues = [gateway.binding for gateway in gateways]
    figures = [queue.figures() for queue in queues]
    return Held(
        requests=sum(len(queue.queue) for queue in queues),
        prompt_tokens=sum(each.prompt_tokens for each in figures),
        oldest_wait_s=max((each.oldest_wait_s for each in figures), default=0.0),
        without_worker=sum(each.held for each in figures),
    )
