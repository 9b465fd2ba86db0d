"""One run: every request of a trace through the product's router to modelled workers, in simulated time.

Life of a request
    1. arrives; `Router.choose` decides in Redis, with this moment's index, reports and reservations. Who computes the
       prompt may have to fetch a prefix of it first
    2. alone: one worker computes the prompt and decodes
       pair: the decode worker has room first, then the prefill worker computes, then the KV moves, then decoding begins
    3. the first token is the prompt's last step, or the end of its transfer; the router is told when the last is out
    4. a prompt that nobody can take is refused, as the gateway refuses it; where workers come and go it waits for one
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.choice import Choice, NoWorkersError, Placement, RouteQuery
from tandem_services.router.config import RouterConfig, RouterCounters
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.policies.by_role import PolicyNames
from tandem_services.router.router import Router
from tandem_services.simulate.autoscaling import Autoscaling, ScalingCosts
from tandem_services.simulate.events import EventQueue
from tandem_services.simulate.fleet import MODEL, Fleet, FleetShape
from tandem_services.simulate.prefix_fetch import WantedPrefix
from tandem_services.simulate.redis_time import PATIENCE_S, SimulatedRedis
from tandem_services.simulate.requests import SimulatedRequest
from tandem_services.simulate.scalers import Scaler
from tandem_services.simulate.worker import Job, ModelledWorker


@dataclass(kw_only=True, slots=True)
class Served:
    """When a request had its tokens; seconds of the run."""

    request: SimulatedRequest
    first: float = 0.0
    last: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first - self.request.at

    @property
    def e2e_s(self) -> float:
        return self.last - self.request.at

    @property
    def mean_gap_s(self) -> float:
        """Between two of its tokens; 0 where there is only one."""
        return (self.last - self.first) / max(1, self.request.output_tokens - 1)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What became of a trace under one policy."""

    workers: Sequence[ModelledWorker]
    served: list[Served] = field(default_factory=list)
    refused: int = 0
    placements: Counter[Placement] = field(default_factory=Counter)
    local_choices: int = 0
    """Made without Redis."""
    outstanding_most: float = 0.0
    """Of the worker with most requests at the moment, summed over the seconds of the run."""
    outstanding_mean: float = 0.0
    """Of the mean worker; both among workers that compute prompts."""
    seconds: float = 0.0
    """From the first arrival to the last token."""
    worker_seconds: float = 0.0
    """Of all workers, from when they were asked for; counted where workers come and go."""
    workers_most: int = 0
    scalings: int = 0
    """Periods in which the number of workers changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Workers come and go."""

    scaler: Callable[[], Scaler]
    costs: ScalingCosts = field(default_factory=ScalingCosts)


class Chooser(Protocol):
    """What a replay asks of a router: the product's own, or another one that is compared with it."""

    counters: RouterCounters

    async def refresh(self) -> None:
        """Called each simulated second."""

    async def choose(self, query: RouteQuery) -> Choice:
        """Raises `NoWorkersError`."""

    async def release(self, choice: Choice) -> None:
        """The last token of what was chosen is out, or it was refused. Called once for each choice."""


async def replay(
    requests: Sequence[SimulatedRequest],
    shape: FleetShape,
    *,
    redis: RedisAddress,
    cluster: str,
    policies: PolicyNames,
    local_prefill_tokens: int,
    seed: int,
    on_served: Callable[[], None],
    scaled: Scaled | None = None,
) -> Outcome:
    """Run to the last token. The Redis must hold nothing of `cluster` yet. Raises `RedisUnavailableError`."""
    events = EventQueue()
    simulated = SimulatedRedis(address=redis, cluster=cluster, events=events)
    config = RouterConfig(
        redis=redis,
        cluster=cluster,
        policies=policies,
        local_prefill_tokens=local_prefill_tokens,
        routing_timeout_s=PATIENCE_S,
    )
    router = Router(config, clock=events, random=Random(seed), source=simulated.source)
    try:
        fleet = Fleet(shape, simulated)
        return await Replay(requests, fleet, router, shape, on_served, scaled).to_the_end()
    finally:
        await router.stop()
        await simulated.client.close()


class Replay:
    """One run of `requests` over `fleet`, by the choices of `router`."""

    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        fleet: Fleet,
        router: Chooser,
        shape: FleetShape,
        on_served: Callable[[], None],
        scaled: Scaled | None = None,
    ) -> None:
        self.outcome = Outcome(workers=fleet.everybody)
        self._requests = requests
        self._fleet = fleet
        self._events = fleet.redis.events
        self._router = router
        self._times = shape.times
        self._on_served = on_served
        self._left = len(requests)
        self._held: deque[SimulatedRequest] = deque()
        """They wait for a worker to be there."""
        self._scaling = None if scaled is None else self._autoscaling(shape, scaled)

    def _autoscaling(self, shape: FleetShape, scaled: Scaled) -> Autoscaling:
        return Autoscaling(
            fleet=self._fleet,
            scaler=scaled.scaler(),
            costs=scaled.costs,
            times=shape.times,
            max_sequences=shape.max_sequences,
            held=lambda: (len(self._held), sum(each.prompt_tokens for each in self._held)),
            joined=self._retry,
        )

    async def to_the_end(self) -> Outcome:
        """Once. Raises `RedisUnavailableError`, and whatever the router raises but `NoWorkersError`."""
        await self._fleet.begin()
        await self._refresh()
        self._plan_arrival(0)
        if self._scaling is not None:
            self._scaling.begin()
        await self._events.run()
        if self._scaling is not None:
            self.outcome.worker_seconds = self._scaling.worker_seconds
            self.outcome.workers_most = self._scaling.most
            self.outcome.scalings = self._scaling.changes
        self.outcome.placements = self._router.counters.placements
        self.outcome.local_choices = self._router.counters.local
        return self.outcome

    async def _refresh(self) -> None:
        """The gateway's heartbeat."""
        if self._fleet.closing:
            return
        await self._fleet.redis.follow()
        await self._router.refresh()
        counts = [each.outstanding for each in self._fleet.workers.values() if each.role is not Role.DECODE]
        if counts:
            self.outcome.outstanding_most += max(counts)
            self.outcome.outstanding_mean += sum(counts) / len(counts)
        self._events.after(HEARTBEAT_S, self._refresh)

    def _plan_arrival(self, position: int) -> None:
        if position < len(self._requests):
            self._events.at(self._requests[position].at, lambda: self._arrive(position))

    async def _arrive(self, position: int) -> None:
        self._plan_arrival(position + 1)
        if self._scaling is not None:
            self._scaling.demand.requests += 1
        await self._route(self._requests[position])

    async def _retry(self) -> None:
        """Somebody new is there."""
        await self._router.refresh()
        for _ in range(len(self._held)):
            await self._route(self._held.popleft())

    async def _route(self, request: SimulatedRequest) -> None:
        query = RouteQuery(
            request_id=f"request-{request.number}",
            model=MODEL,
            token_ids=request.token_ids(),
            max_tokens=request.output_tokens,
            session_key=request.session,
        )
        await self._fleet.redis.follow()
        try:
            choice = await self._router.choose(query)
        except NoWorkersError:
            if self._scaling is not None:
                self._held.append(request)
                return
            self.outcome.refused += 1
            self._ended()
            return
        if self._scaling is not None:
            self._scaling.demand.prompt_tokens += request.prompt_tokens - choice.matched_tokens
        await self._send(Served(request=request), choice)

    async def _send(self, served: Served, choice: Choice) -> None:
        decode = self._fleet.workers[choice.decode.incarnation]
        prefill = None if choice.prefill is None else self._fleet.workers[choice.prefill.incarnation]
        if prefill is None:
            job = self._job(served, choice, on_prompt=lambda: self._first(served))
        else:
            job = self._handed_over(served, choice, prefill, decode)
        if not decode.fits(job) or (prefill is not None and not prefill.fits(job)):
            self.outcome.refused += 1
            await self._router.release(choice)
            self._ended()
            return
        decode.submit(job)

    def _handed_over(self, served: Served, choice: Choice, prefill: ModelledWorker, decode: ModelledWorker) -> Job:
        """The decode worker's job; it sets off the prefill worker's once it has room."""
        began = 0.0

        def compute() -> None:
            nonlocal began
            began = self._events.now()
            prefill.submit(sending)

        def transfer() -> None:
            exposed = self._times.exposed_transfer_s(receiving.missing_tokens, self._events.now() - began)
            self._events.after(exposed, arrived)

        def arrived() -> None:
            prefill.let_go(sending)
            decode.begin_decode(receiving)

        receiving = self._job(served, choice, on_prompt=lambda: self._first(served), on_room=compute)
        sending = Job(
            chain=served.request.chain,
            prompt_tokens=served.request.prompt_tokens,
            output_tokens=0,
            on_prompt=transfer,
            on_end=lambda: None,
            wanted=self._wanted(choice),
        )
        return receiving

    def _job(
        self,
        served: Served,
        choice: Choice,
        *,
        on_prompt: Callable[[], None],
        on_room: Callable[[], None] | None = None,
    ) -> Job:
        return Job(
            chain=served.request.chain,
            prompt_tokens=served.request.prompt_tokens,
            output_tokens=served.request.output_tokens,
            on_prompt=on_prompt,
            # The gateway tells the router in a task of its own.
            on_end=lambda: self._events.after(0.0, lambda: self._last(served, choice)),
            on_room=on_room,
            wanted=None if choice.prefill is not None else self._wanted(choice),
        )

    def _wanted(self, choice: Choice) -> WantedPrefix | None:
        """What the worker that computes the prompt is told to fetch."""
        fetch = choice.fetch
        if fetch is None:
            return None
        holder = self._fleet.workers[fetch.source.incarnation]
        blocks = fetch.tokens // fetch.source.page_size
        return WantedPrefix(holder=holder, blocks=blocks, within_s=fetch.within_s)

    def _first(self, served: Served) -> None:
        served.first = self._events.now()

    async def _last(self, served: Served, choice: Choice) -> None:
        served.last = self._events.now()
        self.outcome.served.append(served)
        if self._scaling is not None:
            self._scaling.demand.ended += 1
            self._scaling.demand.decode_s += served.last - served.first
        await self._fleet.redis.follow()
        await self._router.release(choice)
        self._ended()

    def _ended(self) -> None:
        self._left -= 1
        self._on_served()
        if self._left == 0:
            self.outcome.seconds = self._events.now()
            self._fleet.closing = True
