"""One run: every request of a trace through the product's queue and router to simulated workers, in simulated time.

1. a request arrives at a gateway, whose queue keeps it until a worker has capacity, or rejects it (`gateway`); its
   choices are separate, here and in the next steps
2. `Router.choose` selects workers in Redis, with this moment's index, reports and reservations. The worker that
   computes the prompt may have to fetch a prefix of it first
3. alone: one worker computes the prompt and decodes
   pair: the decode worker provides pages first, then the prefill worker computes, then the KV is transferred, then
   decoding begins
4. the first token is the prompt's last step, or the end of its transfer; the gateway is notified of the last
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

from tandem_engine.config import Role
from tandem_lab.simulate.autoscaling import Autoscaling, Scaler, ScalingCosts, SeenLoad
from tandem_lab.simulate.cells import CellFleets, SimulatedCellRouter, cell_router
from tandem_lab.simulate.clock import PATIENCE_S, EventQueue, SimulatedRedis
from tandem_lab.simulate.fleet import Fleet, FleetShape
from tandem_lab.simulate.gateway import Chooser, Client, Gateway, GatewayShape, held_at
from tandem_lab.simulate.jobs import Job
from tandem_lab.simulate.prefix_fetch import WantedPrefix
from tandem_lab.simulate.requests import SimulatedRequest
from tandem_lab.simulate.worker import ModelledWorker
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.decision import Placement, RouteDecision
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.policies import PolicyNames
from tandem_services.router.router import Router, RouterConfig


@dataclass(kw_only=True, slots=True)
class Served:
    """When a request had its tokens; seconds of the run."""

    request: SimulatedRequest
    first: float = 0.0
    """Of any of its choices."""
    last: float = 0.0
    """Of all of them."""
    mean_gap_s: float = 0.0
    """Between two tokens of a choice, the slowest one's; 0 where there is only one token."""
    left: int = 1
    """Choices that have not ended."""
    refused: bool = False
    """One of its choices was."""

    @property
    def ttft_s(self) -> float:
        return self.first - self.request.at

    @property
    def e2e_s(self) -> float:
        return self.last - self.request.at


@dataclass(kw_only=True, slots=True)
class _Part:
    """One choice of a request."""

    whole: Served
    number: int
    first: float = 0.0

    @property
    def request(self) -> SimulatedRequest:
        return self.whole.request


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What became of a trace under one policy."""

    workers: Sequence[ModelledWorker]
    served: list[Served] = field(default_factory=list)
    refused: list[SimulatedRequest] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    """How many, by reason."""
    gateway_waits: list[float] = field(default_factory=list)
    """Seconds in a gateway's queue, of those that got a worker."""
    placements: Counter[Placement] = field(default_factory=Counter)
    local_choices: int = 0
    """Made without Redis."""
    in_other_cells: int = 0
    """Choices that were served in another cell than their gateway's."""
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
    gateways: GatewayShape | None = None,
    scaled: Scaled | None = None,
    on_ended: Callable[[Served], None] = lambda _: None,
    constants: Mapping[str, float] = MappingProxyType({}),
    cells: int = 1,
) -> Outcome:
    """Run to the last token. The Redis must hold nothing of `cluster` yet.

    `on_ended` gets each request that has ended or was refused; what it raises ends the run. `constants` as of
    `SimulatedRedis`. `cells`: workers and gateways are divided among so many. Raises `RedisUnavailableError`.
    """
    events, gateways = EventQueue(), gateways or GatewayShape()
    places = [
        SimulatedRedis(
            address=redis,
            cluster=f"{cluster}.{number}" if number else cluster,
            clock_of=cluster,
            events=events,
            constants=constants,
        )
        for number in range(cells)
    ]
    config = RouterConfig(
        redis=redis,
        cluster=cluster,
        policies=policies,
        local_prefill_tokens=local_prefill_tokens,
        routing_timeout_s=PATIENCE_S,
        background_timeout_s=PATIENCE_S,
    )
    routers: list[Router] | list[SimulatedCellRouter]
    if cells == 1:
        routers = [
            Router(config, clock=events, random=Random(seed + number), source=places[0].source)
            for number in range(gateways.gateways)
        ]
    else:
        routers = [cell_router(config, places, number, seed=seed) for number in range(gateways.gateways)]
    try:
        fleet = Fleet(shape, places[0]) if cells == 1 else CellFleets(shape, places)
        return await Replay(requests, fleet, routers, shape, on_served, gateways, scaled, on_ended).to_the_end()
    finally:
        for router in routers:
            await router.stop()
        for place in places:
            await place.client.close()


class Replay:
    """One run of `requests` over `fleet`: each of `routers` has a gateway."""

    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        fleet: Fleet | CellFleets,
        routers: Sequence[Chooser],
        shape: FleetShape,
        on_served: Callable[[], None],
        gateways: GatewayShape | None = None,
        scaled: Scaled | None = None,
        on_ended: Callable[[Served], None] = lambda _: None,
    ) -> None:
        self.outcome = Outcome(workers=fleet.all_workers)
        self._requests = requests
        self._fleet = fleet
        self._events = fleet.redis.events
        queues = gateways or GatewayShape()
        self._gateways = [
            Gateway(router, fleet.of_gateway(number), queues, number) for number, router in enumerate(routers)
        ]
        self._times = shape.times
        self._block = shape.block_tokens
        self._on_served = on_served
        self._on_ended = on_ended
        self._left = len(requests)
        self._scaling = None if scaled is None else self._autoscaling(shape, scaled)

    def _autoscaling(self, shape: FleetShape, scaled: Scaled) -> Autoscaling:
        assert isinstance(self._fleet, Fleet), "cells are not scaled"
        seen = SeenLoad.of(self._fleet, shape, held=lambda: held_at(self._gateways))
        return Autoscaling(fleet=self._fleet, scaler=scaled.scaler(), costs=scaled.costs, seen=seen)

    async def to_the_end(self) -> Outcome:
        """Once. Raises `RedisUnavailableError`, and whatever the router raises but `NoWorkersError`."""
        await self._fleet.begin()
        for number, gateway in enumerate(self._gateways):
            await gateway.begin(after_s=HEARTBEAT_S * number / len(self._gateways))
        self._look()
        self._plan_arrival(0)
        if self._scaling is not None:
            self._scaling.begin()
        await self._events.run()
        if self._scaling is not None:
            self.outcome.worker_seconds = self._scaling.worker_seconds
            self.outcome.workers_most = self._scaling.most
            self.outcome.scalings = self._scaling.changes
        for gateway in self._gateways:
            self.outcome.gateway_waits += gateway.notes.waits
            self.outcome.refusals += gateway.notes.refusals
            self.outcome.local_choices += gateway.chooser.counters.local
        return self.outcome

    def _look(self) -> None:
        """Each second, at how even the work is."""
        if self._fleet.closing:
            return
        counts = [each.outstanding for each in self._fleet.workers.values() if each.role is not Role.DECODE]
        if counts:
            self.outcome.outstanding_most += max(counts)
            self.outcome.outstanding_mean += sum(counts) / len(counts)
        self._events.after(HEARTBEAT_S, self._look)

    def _plan_arrival(self, position: int) -> None:
        if position < len(self._requests):
            self._events.at(self._requests[position].at, lambda: self._arrive(position))

    async def _arrive(self, position: int) -> None:
        self._plan_arrival(position + 1)
        request = self._requests[position]
        if self._scaling is not None:
            for _ in range(request.choices):
                self._scaling.seen.counters.asked(request.prompt_tokens)
                self._scaling.seen.latency.asked(self._events.now())
        await self._enter(Served(request=request, left=request.choices), range(request.choices))

    async def _enter(self, served: Served, numbers: Sequence[int]) -> None:
        """Choices of a request, by their numbers."""
        client = Client(
            admitted=lambda number, decision: self._send(_Part(whole=served, number=number), decision),
            refused=lambda count: self._refused(served, count),
        )
        await self._gateway(served.request).arrive(served.request, client, numbers)

    def _gateway(self, request: SimulatedRequest) -> Gateway:
        return self._gateways[request.gateway % len(self._gateways)]

    def _refused(self, served: Served, count: int) -> None:
        served.refused = True
        self._ended(served, count)

    async def _send(self, served: _Part, decision: RouteDecision) -> None:
        if not self._there(decision):
            # Chosen from a view that is a heartbeat old: the attempt fails, and there is another one.
            await self._gateway(served.request).chooser.release(decision)
            self._events.after(HEARTBEAT_S, lambda: self._enter(served.whole, (served.number,)))
            return
        if self._scaling is not None:
            self._scaling.seen.counters.admitted(decision.matched_tokens)
            self._scaling.seen.latency.uncached.observe(max(1, served.request.prompt_tokens - decision.matched_tokens))
        self.outcome.placements[decision.placement] += 1
        self.outcome.in_other_cells += decision.cell is not None
        decode = self._fleet.workers[decision.decode.incarnation]
        if decision.prefill is None:
            decode.submit(self._alone(served, decision))
            return
        decode.submit(self._handed_over(served, decision, self._fleet.workers[decision.prefill.incarnation], decode))

    def _there(self, decision: RouteDecision) -> bool:
        named = (decision.decode, decision.prefill, None if decision.fetch is None else decision.fetch.source)
        return all(worker is None or worker.incarnation in self._fleet.workers for worker in named)

    def _alone(self, served: _Part, decision: RouteDecision) -> Job:
        job = self._job(served, decision, on_prompt=lambda: self._first(served, decision, job))
        return job

    def _handed_over(
        self, served: _Part, decision: RouteDecision, prefill: ModelledWorker, decode: ModelledWorker
    ) -> Job:
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
            prefill.release(sending)
            decode.begin_decode(receiving)

        receiving = self._job(
            served, decision, on_prompt=lambda: self._first(served, decision, sending), on_room=compute
        )
        sending = Job(
            chain=served.request.chain,
            prompt_tokens=served.request.prompt_tokens,
            output_tokens=0,
            on_prompt=transfer,
            on_end=lambda: None,
            wanted=self._wanted(decision),
        )
        return receiving

    def _job(
        self,
        served: _Part,
        decision: RouteDecision,
        *,
        on_prompt: Callable[[], None],
        on_room: Callable[[], None] | None = None,
    ) -> Job:
        return Job(
            chain=served.request.chain,
            prompt_tokens=served.request.prompt_tokens,
            output_tokens=served.request.output_tokens,
            on_prompt=on_prompt,
            # The gateway notifies the router in a separate task.
            on_end=lambda: self._events.after(0.0, lambda: self._last(served, decision)),
            on_room=on_room,
            wanted=None if decision.prefill is not None else self._wanted(decision),
        )

    def _wanted(self, decision: RouteDecision) -> WantedPrefix | None:
        """The prefix that the worker for the prompt is to fetch."""
        fetch = decision.fetch
        if fetch is None:
            return None
        holder = self._fleet.workers[fetch.source.incarnation]
        blocks = fetch.tokens // fetch.source.page_size
        return WantedPrefix(holder=holder, blocks=blocks, within_s=fetch.within_s)

    def _first(self, served: _Part, decision: RouteDecision, computed: Job) -> None:
        whole, served.first = served.whole, self._events.now()
        if not whole.first:
            whole.first = served.first
            if self._scaling is not None:
                self._scaling.seen.counters.began(whole.ttft_s)
        self._gateway(served.request).binding.correct_prompt(
            served.request.tenant,
            served.request.prompt_tokens,
            predicted=decision.matched_tokens,
            cached=computed.matched * self._block,
        )

    async def _last(self, served: _Part, decision: RouteDecision) -> None:
        whole = served.whole
        whole.last = self._events.now()
        gap = (whole.last - served.first) / max(1, served.request.output_tokens - 1)
        whole.mean_gap_s = max(whole.mean_gap_s, gap)
        await self._gateway(served.request).ended(served.request, decision)
        self._ended(whole, 1)

    def _ended(self, served: Served, count: int) -> None:
        """So many of its choices have."""
        served.left -= count
        if served.left:
            return
        if served.refused:
            self.outcome.refused.append(served.request)
        else:
            self.outcome.served.append(served)
            if self._scaling is not None:
                self._scaling.seen.counters.ended(served.e2e_s)
                self._scaling.seen.latency.ended(
                    ttft_s=served.ttft_s, gap_s=served.mean_gap_s, output_tokens=served.request.output_tokens
                )
        self._left -= 1
        self._on_served()
        self._on_ended(served)
        if self._left == 0:
            self.outcome.seconds = self._events.now()
            self._fleet.closing = True
