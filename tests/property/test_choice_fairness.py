"""The gap between what two waiting tenants have got is bounded by what choices cost, not requests [fair-tenants].

The gateway's own `LateBinding` in fake time, in front of a worker with a number of places. Tenants send requests with n
choices of several prompts. Each choice visits the queue as in a gateway: its prompt is charged when it is admitted,
each output token as it comes.

The admitted choice has had least of those that wait. From then on its tenant gains the rest of this choice and of those
that run beside it at most: one choice for each place, and those that were sent early.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_lab.simulate.gateway import QueueNotes
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.queueing.fair_queue import FairQueue, SharedCounters
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.gateway.queueing.precedence import MAX_EARLY
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy
from tandem_services.router.cost import NO_ROOM_S
from tandem_services.router.decision import RouteDecision, ScoreTerm, WorkerView
from tandem_services.router.scoring import DECODE_ROOM
from tandem_services.router.usage_counters import OUTPUT_WEIGHT, VirtualCounters, prompt_cost
from tandem_testing.long_tests import examples
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.service_clock import ServiceClock


@dataclass(frozen=True, kw_only=True)
class Request:
    n: int
    prompts: int
    prompt_tokens: int
    output_tokens: int

    @property
    def cost(self) -> float:
        """Of one choice."""
        return self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens


@dataclass(frozen=True, kw_only=True)
class Crowd:
    places: int
    weights: dict[str, float]
    requests: dict[str, list[Request]]

    @property
    def bound(self) -> float:
        """What a tenant may get more than another while both wait, over its weight."""
        return max(
            self.places * max(request.cost for request in requests) / self.weights[tenant]
            for tenant, requests in self.requests.items()
        )


requests = st.builds(
    Request,
    n=st.integers(1, 10),
    prompts=st.integers(1, 3),
    prompt_tokens=st.integers(1, 60),
    output_tokens=st.integers(1, 6),
)


@st.composite
def crowds(draw) -> Crowd:
    names = [f"t{number}" for number in range(draw(st.integers(2, 4)))]
    return Crowd(
        places=draw(st.integers(1, 5)),
        weights={name: draw(st.sampled_from([1.0, 2.0, 4.0])) for name in names},
        requests={name: draw(st.lists(requests, min_size=1, max_size=3)) for name in names},
    )


@dataclass(eq=False)
class Running:
    """One choice: from its visit to its last token."""

    tenant: Tenant
    request: Request
    prompt: str
    placed: RouteDecision | None = None
    generated: int = 0

    def done(self) -> bool:
        return False

    def set_result(self, result: RouteDecision) -> None:
        self.placed = result

    def set_exception(self, exception: BaseException) -> None:
        raise exception


@dataclass
class Worker:
    """Has so many places, and keeps each prompt that was computed once."""

    places: int
    taken: int = 0
    computed: set[str] = field(default_factory=set)

    def workers(self) -> tuple[WorkerView, ...]:
        return (make_view("w"),)

    async def ask(self, running: Running) -> RouteDecision:
        terms = (ScoreTerm(DECODE_ROOM, NO_ROOM_S if self.taken >= self.places else 0.0),)
        self.taken += 1
        matched = running.request.prompt_tokens if running.prompt in self.computed else 0
        return replace(make_choice(running.prompt, make_view("w"), terms=terms), matched_tokens=matched)

    async def release(self, choice: RouteDecision) -> None:
        del choice
        self.taken -= 1


class Gateway:
    """Serves one crowd, all of which has come at once, and keeps a ledger beside the queue's counters."""

    def __init__(self, crowd: Crowd, *, visit_each: bool = True) -> None:
        """`visit_each` false: all choices of a request are admitted by the visit of the first."""
        self.crowd = crowd
        self.worker = Worker(crowd.places)
        self.clock = ServiceClock()
        self.notes = QueueNotes()
        counters = VirtualCounters()
        self.binding = LateBinding(
            chooser=self.worker,
            clock=self.clock,
            queue=FairQueue(seats=10_000, counters=counters),
            counters=SharedCounters(counters=counters),
            observer=self.notes,
            policy=AdmissionPolicy(room_s=1e9),
        )
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.got: Counter[str] = Counter()
        self.most_running = 0
        self._visit_each = visit_each

    async def gaps(self) -> list[float]:
        """The largest gap between two tenants that wait, after each change."""
        # As many of each tenant in turn, so that all wait from the start.
        for choice in self._arrivals():
            entry = self.binding.entry(
                lambda choice=choice: self.worker.ask(choice),
                choice,
                tenant=choice.tenant,
                priority=0,
                prompt_tokens=choice.request.prompt_tokens,
            )
            self.waiting.append(choice)
            choice.placed = await self.binding.arrive(entry)
            self._begin()
        # Of each that waits since now.
        self.got.clear()
        found = []
        while self.running or self.waiting:
            self._step()
            found.append(self._gap())
            while await self.binding.turn():
                self._begin()
                found.append(self._gap())
        return found

    def _arrivals(self) -> Iterator[Running]:
        for name, sent in self.crowd.requests.items():
            tenant = Tenant(name=name, sha256=(), weight=self.crowd.weights[name])
            for number, request in enumerate(sent):
                for prompt in range(request.prompts):
                    for _ in range(request.n if self._visit_each else 1):
                        yield Running(tenant, request, f"{name}-{number}-{prompt}")

    def _begin(self) -> None:
        """Those that were admitted."""
        for choice in [each for each in self.waiting if each.placed is not None]:
            assert choice.placed is not None
            self.waiting.remove(choice)
            self.running.append(choice)
            self.worker.computed.add(choice.prompt)
            cost = prompt_cost(choice.request.prompt_tokens, choice.placed.matched_tokens)
            self.got[choice.tenant.name] += cost / choice.tenant.weight
        self.most_running = max(self.most_running, len(self.running))

    def _step(self) -> None:
        """Each that runs gets a token; or all its choices do that came with its visit."""
        self.clock.advance(0.01)
        for choice in [*self.running]:
            tokens = 1 if self._visit_each else choice.request.n
            choice.generated += 1
            self.binding.charge_output(choice.tenant, tokens)
            self.got[choice.tenant.name] += OUTPUT_WEIGHT * tokens / choice.tenant.weight
            if choice.generated == choice.request.output_tokens:
                self.running.remove(choice)
                self.worker.taken -= 1
                self.binding.freed()

    def _gap(self) -> float:
        got = [self.got[tenant] for tenant in {each.tenant.name for each in self.waiting}]
        return max(got) - min(got) if got else 0.0


def choices_of(crowd: Crowd) -> int:
    return sum(request.n * request.prompts for sent in crowd.requests.values() for request in sent)


@settings(max_examples=examples(20), deadline=None)
@given(crowds())
def test_gap_of_two_waiting_tenants_is_of_choices(crowd):
    gateway = Gateway(crowd)
    gaps = asyncio.run(gateway.gaps())
    # What ran when the last tenant came is charged to it or to those before it: twice the bound at most. Few choices of
    # tenants that are behind run before a place is free.
    most = crowd.places + MAX_EARLY
    assert max(gaps) <= 2 * crowd.bound * most / crowd.places + 1e-6
    assert gateway.most_running <= most, "no more choices are sent to a worker without room"
    assert len(gateway.notes.waits) == choices_of(crowd), "each choice is admitted by itself"
    assert not gateway.notes.refusals


FLOOD = Request(n=128, prompts=1, prompt_tokens=10, output_tokens=10)
ONE = Request(n=1, prompts=1, prompt_tokens=10, output_tokens=10)
FLOOD_AND_ONE = Crowd(
    places=2, weights={"flood": 1.0, "calm": 1.0}, requests={"flood": [FLOOD] * 4, "calm": [ONE] * 20}
)


def test_gap_during_flood_is_counted_in_choices():
    assert max(asyncio.run(Gateway(FLOOD_AND_ONE).gaps())) <= FLOOD_AND_ONE.bound


def test_gap_counts_requests_that_queue_once():
    """What the bound is worth: the same crowd, with one visit for all choices of a request."""
    assert max(asyncio.run(Gateway(FLOOD_AND_ONE, visit_each=False).gaps())) > 3 * FLOOD_AND_ONE.bound
