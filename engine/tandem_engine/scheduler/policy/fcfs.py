"""First come, first served. Nobody overtakes, so nobody starves.

The head of the queue waits while somebody computes a prefix that it needs too (`shared_prefix`): to start it at once
would be to compute that twice. Those behind it wait with it, some steps at most.

Requests that were put back, and those that followed another choice of their answer, stand at the head; but a choice
that another worker decodes stands where it came.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.policy.interface import first_come, least_important
from tandem_engine.scheduler.policy.shared_prefix import SharedPrefixes
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Fcfs:
    """Implements `Policy`."""

    memory: KvMemory | None = None
    """Whose prefix cache requests may wait for; None when nobody is to wait."""

    def order(self, queues: Queues) -> Iterator[Request]:
        shared = None
        if self.memory is not None:
            shared = SharedPrefixes(self.memory)
            shared.computing(queues.requests.values())
        while (head := queues.waiting.head) is not None:
            if shared is None:
                yield head
                continue
            cached = shared.cached(head)
            if shared.worth_waiting(head, cached) and queues.groups.donor(head) is None:
                return
            yield head
            shared.add(head, cached)

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return first_come(requests)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return least_important(candidates)
