"""First come, first served. Nobody overtakes, so nobody starves.

Requests that were put back, and those that followed another choice of their answer, stand at the head; but a choice
that another worker decodes stands where it came.
"""

from collections.abc import Iterable, Iterator, Sequence

from tandem_engine.scheduler.policy.interface import first_come, least_important
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request


class Fcfs:
    """Implements `Policy`."""

    def order(self, queues: Queues) -> Iterator[Request]:
        while (head := queues.waiting.head) is not None:
            yield head

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return first_come(requests)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return least_important(candidates)
