"""Requests of adapters that some workers have, in front of the gateway's own queue, in fake time.

no idle place      while a request waits, no worker that could serve it has a free place
no loss            a request that is passed loses no place to those that pass it
fairness           of two tenants whose requests can have the same workers, the one with less service is first
"""

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.messages.control import ServedAdapter
from tandem_lab.simulate.gateway import QueueNotes
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.queueing.fair_queue import FairQueue, SharedCounters
from tandem_services.gateway.queueing.lanes import Lane
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.gateway.queueing.queue_entry import QueueEntry
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy
from tandem_services.router.cost import NO_ROOM_S
from tandem_services.router.decision import NoWorkersError, RouteDecision, ScoreTerm, WorkerView
from tandem_services.router.scoring import DECODE_ROOM
from tandem_services.router.usage_counters import VirtualCounters
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.service_clock import ServiceClock

DIGESTS = [bytes([number] * 16) for number in range(1, 4)]


def view_of(name: str, adapters: set[int]) -> WorkerView:
    served = [ServedAdapter(name=f"a{each}", digest=DIGESTS[each].hex(), rank=1, root="") for each in sorted(adapters)]
    return make_view(name, adapters={adapter.name: adapter for adapter in served})


@dataclass(eq=False)
class Sent:
    """A request; also the receiver of its result."""

    tenant: str
    adapter: bytes
    place: RouteDecision | None = None

    def done(self) -> bool:
        return False

    def set_result(self, result: RouteDecision) -> None:
        self.place = result

    def set_exception(self, exception: BaseException) -> None:
        raise exception


@dataclass
class Workers:
    """Each has places of its own; the router takes the one with most free places."""

    places: dict[WorkerView, int]
    taken: dict[str, int] = field(default_factory=dict)

    def workers(self) -> tuple[WorkerView, ...]:
        return tuple(self.places)

    def free(self, worker: WorkerView) -> int:
        return self.places[worker] - self.taken.get(worker.incarnation, 0)

    def choose(self, lane: Lane, avoided: frozenset[str] = frozenset()) -> RouteDecision:
        able = [w for w in self.places if lane.serves(w) and w.incarnation not in avoided]
        if not able:
            raise NoWorkersError("none", retry_after=1.0)
        best = max(able, key=self.free)
        full = self.free(best) <= 0
        self.taken[best.incarnation] = self.taken.get(best.incarnation, 0) + 1
        return make_choice("x", best, terms=(ScoreTerm(DECODE_ROOM, NO_ROOM_S if full else 0.0),))

    async def release(self, choice: RouteDecision) -> None:
        self.taken[choice.decode.incarnation] -= 1


class Gateway:
    """A queue in front of workers."""

    def __init__(self, workers: Workers) -> None:
        self.fleet = workers
        self.clock = ServiceClock()
        counters = VirtualCounters()
        self.binding = LateBinding(
            chooser=workers,
            clock=self.clock,
            queue=FairQueue(seats=10_000, counters=counters),
            counters=SharedCounters(counters=counters),
            observer=QueueNotes(),
            policy=AdmissionPolicy(room_s=1e9, worker_s=1e9),
        )
        self.running: list[Sent] = []

    async def come(self, sent: Sent) -> None:
        async def ask() -> RouteDecision:
            return self.fleet.choose(lane)

        async def apart(avoided: frozenset[str]) -> RouteDecision:
            return self.fleet.choose(lane, avoided)

        lane = Lane(adapter=sent.adapter, ask_apart=apart)
        tenant = Tenant(name=sent.tenant, sha256=())
        entry = self.binding.entry(ask, sent, tenant=tenant, priority=0, prompt_tokens=10, lane=lane)
        sent.place = await self.binding.arrive(entry)
        if sent.place is not None:
            self.running.append(sent)

    async def admit_all(self) -> None:
        """As many rounds as admit a request; checks which are admitted."""
        while True:
            self.clock.advance(1.0)
            waiting = [*self.binding.queue]
            before = {each: self.binding.counters.counters.value(each.tenant) for each in waiting}
            admitted = await self.binding.turn()
            found = [each for each in waiting if each.decision.place is not None]
            assert len(found) == admitted
            if not admitted:
                return
            self._check_first(found[0], waiting, before)
            self.running.append(found[0].decision)

    def _check_first(self, admitted: QueueEntry, waiting: list[QueueEntry], before: dict[QueueEntry, float]) -> None:
        """Those before it in the queue that its worker serves would have had its place."""
        for other in waiting:
            if other is admitted or not other.lane.serves(admitted.decision.place.decode):
                continue
            assert (before[admitted], admitted.number) <= (before[other], other.number) or (
                before[admitted] <= before[other]
            ), (admitted, other)

    def check_no_idle_place(self) -> None:
        for entry in self.binding.queue:
            idle = [w for w in self.fleet.workers() if entry.lane.serves(w) and self.fleet.free(w) > 0]
            assert not idle, (entry, idle)

    async def end(self, number: int) -> None:
        """One of those that run has ended."""
        sent = self.running.pop(number % len(self.running))
        await self.fleet.release(sent.place)
        self.binding.freed(sent.place.decode.incarnation)


fleets = st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 2))), min_size=1, max_size=5)
arrivals = st.tuples(st.sampled_from("xyz"), st.sampled_from([b"", *DIGESTS]))
events = st.lists(st.one_of(arrivals, st.integers(0, 20)), max_size=40)


@settings(max_examples=150)
@given(fleets, events)
def test_requests_that_pass_others_take_no_place_of_theirs(fleet, events):
    async def play() -> None:
        places = {view_of(f"w{number}", adapters): count for number, (count, adapters) in enumerate(fleet)}
        gateway = Gateway(Workers(places))
        for event in events:
            if not isinstance(event, int):
                await gateway.come(Sent(*event))
            elif gateway.running:
                await gateway.end(event)
            await gateway.admit_all()
            gateway.check_no_idle_place()
        while gateway.running:
            await gateway.end(0)
            await gateway.admit_all()
        # What no worker has the adapter of is all that is left.
        for entry in gateway.binding.queue:
            assert not any(map(entry.lane.serves, places)), entry

    asyncio.run(play())
