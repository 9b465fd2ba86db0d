"""Policies that look at what the prefix cache has for each waiting request.

Each pass: overdue requests first; the others in an order that `lpm` or `dfs_weight` makes of what is cached for
them. Of requests that share what is not cached yet, one computes it and the others wait (`shared_prefix`).

Matching every waiting request costs more than it saves once there are many: longer queues than `MOST_MATCHED`
are served in their own order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.policy.ageing import Ageing
from tandem_engine.scheduler.policy.fcfs import Fcfs
from tandem_engine.scheduler.policy.interface import first_come, least_important
from tandem_engine.scheduler.policy.shared_prefix import SharedPrefixes
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request

MOST_MATCHED = 128
"""Waiting requests; SGLang's limit."""


class Candidate(NamedTuple):
    """A waiting request and the tokens that the cache has for it."""

    req: Request
    cached: int


Ranking: TypeAlias = Callable[[list[Candidate]], list[Candidate]]
"""Puts candidates, given in the order of the queue, in the order in which they are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByPrefix:
    """Implements `Policy`."""

    memory: KvMemory
    ageing: Ageing
    ranking: Ranking

    def order(self, queues: Queues) -> Iterator[Request]:
        if len(queues.waiting) > MOST_MATCHED:
            yield from Fcfs().order(queues)
            return
        shared = SharedPrefixes(self.memory)
        shared.computing(queues.requests.values())
        overdue, others = self.ageing.split(queues.waiting)
        for req in overdue:
            yield req
            shared.add(req, shared.cached(req))
        for req, cached in self.ranking([Candidate(req, shared.cached(req)) for req in others]):
            if not shared.worth_waiting(req, cached):
                yield req
                shared.add(req, cached)

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return first_come(requests)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return least_important(candidates)
