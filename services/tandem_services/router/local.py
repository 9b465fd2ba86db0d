"""Routing without Redis: least predicted wait from this gateway's own choices, sticky by first block.

1. Every choice, whoever made it, is noted: the prefill work it adds and the sequence it occupies.
2. While Redis is away the same price formula decides, with those notes in place of reports and
   reservations, and with one guess in place of the index: the prompt is cached where its first block
   hashes to (rendezvous hashing, so that a worker that leaves moves only its own prompts). When that
   worker's wait is longer than computing the prompt again, another one is cheaper and is chosen.
3. What prompts that this gateway has just sent will leave on a worker counts as cached there (`in_flight`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random

from tandem_engine.clock import Clock
from tandem_engine.config import Role
from tandem_services.router.candidate import Candidate
from tandem_services.router.choice import Claim
from tandem_services.router.cost import Demand, room_needed, uncached
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.scoring import Option, cheapest, options


@dataclass(kw_only=True, slots=True)
class OwnLoad:
    """What this gateway has sent to the workers and not yet got back."""

    clock: Clock
    _busy_until: dict[str, float] = field(default_factory=dict)
    """Per incarnation, when the prefill work given to it should be done."""
    _sequences: Counter[str] = field(default_factory=Counter)

    def add(self, claims: Iterable[Claim], rates: dict[str, float]) -> None:
        """Note a choice. `rates`: prefill tokens per second by incarnation."""
        now = self.clock.now()
        for claim in claims:
            self._sequences[claim.incarnation] += claim.sequences
            start = max(now, self._busy_until.get(claim.incarnation, now))
            self._busy_until[claim.incarnation] = start + claim.queue_tokens / rates[claim.incarnation]

    def remove(self, claims: Iterable[Claim]) -> None:
        """The attempt has ended. Its prefill work is over by then or will be by prediction."""
        for claim in claims:
            self._sequences[claim.incarnation] = max(0, self._sequences[claim.incarnation] - claim.sequences)

    def wait_s(self, incarnation: str) -> float:
        return max(0.0, self._busy_until.get(incarnation, 0.0) - self.clock.now())

    def sequences(self, incarnation: str) -> int:
        return self._sequences[incarnation]

    def forget_all_but(self, incarnations: set[str]) -> None:
        """Drop notes about workers that are gone."""
        for gone in self._sequences.keys() - incarnations:
            del self._sequences[gone]
        for gone in self._busy_until.keys() - incarnations:
            del self._busy_until[gone]


@dataclass(kw_only=True, slots=True)
class LocalRouting:
    """Chooses from the last view. Takes well under a millisecond for a hundred workers."""

    own: OwnLoad
    random: Random

    def choose(
        self,
        records: Sequence[WorkerRecord],
        demand: Demand,
        first_block: bytes | None,
        in_flight: Mapping[str, int] | None = None,
    ) -> Option | None:
        """The cheapest of `options`; None when there are none."""
        return cheapest(self.options(records, demand, first_block, in_flight), self.random)

    def options(
        self,
        records: Sequence[WorkerRecord],
        demand: Demand,
        first_block: bytes | None,
        in_flight: Mapping[str, int] | None = None,
    ) -> list[Option]:
        """Empty when no record can decode.

        `first_block`: digest of the prompt's first page, if it has one. `in_flight`: prompt tokens that workers will
        have cached soon, by incarnation.
        """
        homes, coming = _homes(records, first_block), in_flight or {}
        candidates = []
        for record in records:
            incarnation = record.view.incarnation
            guessed = demand.prompt_tokens // 2 if incarnation in homes else 0
            candidates.append(self._candidate(record, guessed, min(coming.get(incarnation, 0), demand.prompt_tokens)))
        return options(candidates, demand, self.random)

    def _candidate(self, record: WorkerRecord, guessed: int, coming: int) -> Candidate:
        incarnation, matched = record.view.incarnation, max(guessed, coming)
        load = replace(
            record.load,
            queue_tokens=self.own.wait_s(incarnation) * record.load.prefill_rate,
            sequences=self.own.sequences(incarnation),
        )
        return Candidate(
            view=record.view, load=load, matched=matched, in_flight=matched - guessed, links=record.link_rates
        )


def claims_of(option: Option, demand: Demand) -> tuple[Claim, ...]:
    """Load that `option` adds; the same as `claims` in scripts/route.lua."""
    decode, computing = option.decode.view.incarnation, option.computing
    queue, room = uncached(computing.known, demand), room_needed(demand)
    if option.prefill is None:
        return (Claim(decode, queue, 1, room),)
    return (
        Claim(computing.view.incarnation, queue, 0, demand.prompt_tokens),
        Claim(decode, 0, 1, room),
    )


def _homes(records: Sequence[WorkerRecord], first_block: bytes | None) -> set[str]:
    """Where prompts with this first block go by default: one worker per role."""
    if first_block is None:
        return set()
    homes = set()
    for role in Role:
        of_role = [record.view.incarnation for record in records if record.view.role is role]
        if of_role:
            homes.add(max(of_role, key=lambda name: _affinity(first_block, name)))
    return homes


def _affinity(first_block: bytes, incarnation: str) -> bytes:
    return blake2b(incarnation.encode(), key=first_block, digest_size=8).digest()
