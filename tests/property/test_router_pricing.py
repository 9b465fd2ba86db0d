"""`scoring` prices each end once for all pairs; its options are those of the definition, to the last bit."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.stats import StepFit
from tandem_services.router import cost
from tandem_services.router.cost import PRESENT, Candidate, Demand, Load, PricedFetch, shortlist
from tandem_services.router.decision import Absence
from tandem_services.router.scoring import Option, cheapest, options
from tandem_testing.router_builders import make_view

PROMPT = 2000


@dataclass
class Priced:
    """A worker of the definition, with what it had better fetch."""

    worker: Candidate
    fetch: PricedFetch | None

    @property
    def known(self) -> int:
        return self.worker.matched if self.fetch is None else self.fetch.tokens


class Definition:
    """Every price from the worker, the demand and nothing else, as the documentation of `cost` defines it."""

    def __init__(self, demand: Demand, random: Random) -> None:
        self.demand, self.random = demand, random

    def compute_s(self, worker: Candidate, known: int) -> float:
        compute = cost.prefill_compute_s(worker.load, known, self.demand)
        stall = compute * cost.waiting_sequences(worker.load, worker.view.role)
        return compute + stall + cost.copy_s(worker.load, known - worker.matched)

    def fetch(self, worker: Candidate, sources: Sequence[Candidate]) -> PricedFetch | None:
        best, least = None, self.compute_s(worker, worker.matched)
        for source in sources:
            tokens = source.held - worker.matched
            if source is worker or tokens <= 0:
                continue
            token_s = cost.token_s(source.load, source.links.get(worker.view.incarnation))
            seconds = cost.FETCH_S + cost.FETCH_TURNS * cost.turn_s(source.load) + tokens * token_s
            price = cost.fetch_wait_s(seconds, worker.load) + self.compute_s(worker, source.held)
            if price < least:
                best, least = PricedFetch(source=source.view, tokens=source.held, seconds=seconds), price
        return best

    def prefill(self, end: Priced) -> tuple[float, ...]:
        load, worker = end.worker.load, end.worker
        waiting, copying = cost.waiting_sequences(load, worker.view.role), cost.host_load_s(load, worker.in_host)
        compute = cost.prefill_compute_s(load, end.known, self.demand)
        stall = compute * waiting + copying * waiting
        return (
            0.0 if end.fetch is None else cost.fetch_wait_s(end.fetch.seconds, load),
            copying,
            cost.prefill_queue_s(load),
            compute,
            stall + cost.copy_s(load, end.known - worker.matched),
            cost.absent_adapter_s(worker.absence, cost.prefill_queue_s(load)),
        )

    def decode(self, end: Priced) -> tuple[float, ...]:
        return cost.decode_load_s(end.worker.load), cost.decode_room_s(end.worker.load, self.demand)

    def seconds(self, computing: Priced, decode: Priced) -> tuple[float, ...]:
        *terms, absent = self.prefill(computing)
        transfer = 0.0
        if computing is not decode:
            hidden = terms[2] + terms[3]
            absent += cost.absent_adapter_s(decode.worker.absence, hidden)
            rate = computing.worker.links.get(decode.worker.view.incarnation)
            token_s = cost.token_s(computing.worker.load, rate)
            transfer = cost.transfer_s(token_s, decode.worker.matched, self.demand)
        return (*terms, absent, transfer, *self.decode(decode))

    def options(self, candidates: Sequence[Candidate]) -> list[tuple[str, str | None, tuple[float, ...]]]:
        """Decode worker, prefill worker, terms."""
        alike: dict[str, list[Candidate]] = defaultdict(list)
        for each in candidates:
            alike[each.view.compat_hash].append(each)
        groups = []
        for members in alike.values():
            having = [each for each in members if each.held > 0]
            sources = shortlist(having, [-each.held for each in having], self.random)
            groups.append([Priced(each, self.fetch(each, sources)) for each in members])
        ends = [(of_role(group, Role.PREFILL), of_role(group, Role.DECODE)) for group in groups]
        any_whole = any(prefills and decodes for prefills, decodes in ends)
        found = []
        for prefills, decodes in ends:
            for each in decodes:
                missing = cost.uncached(each.worker.matched, self.demand)
                small = bool(prefills) and 0 < missing <= self.demand.local_prefill_tokens
                if each.worker.view.role is Role.BOTH or not any_whole or small:
                    found.append((each.worker.view.incarnation, None, self.seconds(each, each)))
            if prefills and decodes:
                found += self.pairs(prefills, decodes)
        return found

    def pairs(self, prefills: Sequence[Priced], decodes: Sequence[Priced]):
        least = cost.uncached(max(each.worker.held for each in (*prefills, *decodes)), self.demand)
        costs = [sum(self.prefill(each)) + least * cost.token_s(each.worker.load, None) for each in prefills]
        few = shortlist(prefills, costs, self.random)
        typical = min(cost.token_s(each.worker.load, None) for each in few)
        costs = [
            sum(self.decode(each))
            + cost.transfer_s(typical, each.worker.matched, self.demand)
            + cost.absent_adapter_s(each.worker.absence, 0.0)
            for each in decodes
        ]
        chosen = shortlist(decodes, costs, self.random)
        for prefill in few:
            for decode in chosen:
                if prefill is not decode:
                    yield decode.worker.view.incarnation, prefill.worker.view.incarnation, self.seconds(prefill, decode)


def of_role(group: Sequence[Priced], role: Role) -> list[Priced]:
    return [each for each in group if each.worker.view.role in (role, Role.BOTH)]


def drawn_load(random: Random) -> Load:
    return Load(
        queue_tokens=random.choice([0.0, random.uniform(0.0, 9000.0)]),
        prefill_rate=random.uniform(500.0, 20_000.0),
        sequences=random.randrange(40),
        step_s=random.uniform(0.001, 0.05),
        room_tokens=random.choice([0.0, 1e5, 1e5]),
        max_sequences=32,
        token_bytes=random.choice([0.0, 1e3, 1e5]),
        transfer_rate=random.uniform(1e8, 1e10),
        host_token_s=random.choice([0.0, random.uniform(1e-6, 1e-3)]),
    )


def drawn_fleet(random: Random) -> list[Candidate]:
    """Workers of one, two or all roles and up to two compat hashes, some equal, some with an adapter to load."""
    count, roles = random.randrange(1, 16), random.choice([[Role.BOTH], [Role.PREFILL, Role.DECODE], [*Role]])
    loads = [drawn_load(random) for _ in range(random.choice([1, count]))]
    absent = random.choice([[PRESENT], [PRESENT, Absence(random.uniform(0.0, 2.0), random.choice([0.0, 0.3]))]])
    fleet = []
    for number in range(count):
        matched = random.choice([0, 0, random.randrange(0, PROMPT, 16)])
        peers = random.sample(range(count), min(count, 3))
        fleet.append(
            Candidate(
                view=make_view(f"w{number}", random.choice(roles), compat_hash=random.choice(["one", "one", "other"])),
                load=random.choice(loads),
                matched=matched,
                in_host=random.choice([0, matched // 2]),
                in_flight=random.choice([0, 0, matched // 3]),
                links={f"w{peer}@1": random.choice([0.0, random.uniform(1e6, 1e10)]) for peer in peers},
                absence=random.choice(absent),
            )
        )
    return fleet


def chosen(option: Option) -> tuple[str, str | None, tuple[float, ...]]:
    prefill = None if option.prefill is None else option.prefill.view.incarnation
    return option.decode.view.incarnation, prefill, option.seconds


@pytest.mark.parametrize("first", [0, 300], ids=str)
def test_options_are_those_of_the_definition(first):
    for seed in range(first, first + 300):
        drawing = Random(seed)
        fleet = drawn_fleet(drawing)
        demand = Demand(prompt_tokens=PROMPT, output_tokens=64, local_prefill_tokens=drawing.choice([0, 16, 1500]))
        random, defined_by = Random(seed), Random(seed)
        found = options(fleet, demand, random)
        assert [chosen(each) for each in found] == Definition(demand, defined_by).options(fleet), f"seed {seed}"
        # As much is left to chance, so the choice is the same.
        assert random.getstate() == defined_by.getstate(), f"seed {seed}"
        best = cheapest(found, random)
        if found:
            assert best is not None
            assert best.cost <= min(sum(term.seconds for term in each.terms) for each in found) + 1e-4


def test_load_with_other_work_keeps_everything_else():
    load = Load(**{each.name: number + 2.0 for number, each in enumerate(fields(Load))})
    load = replace(load, step_fit=StepFit(base_s=0.1, sequence_s=0.2, kv_token_s=0.3, chunk_token_s=0.4))
    assert load.with_work(queue_tokens=0.5, sequences=7) == replace(load, queue_tokens=0.5, sequences=7)
