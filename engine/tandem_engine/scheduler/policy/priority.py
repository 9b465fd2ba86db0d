"""The most important request first; it may put less important ones back.

A waiting request gains one level of priority with every `ageing.seconds`. So one of priority p goes before every
one of priority q > p that arrives more than (q − p) · seconds after it, and can wait no longer than for those
that came earlier.

A running request is *outranked* by a waiting one whose priority is greater by `threshold` or more. Age protects
here as well: what has run and waited for long enough is put back for nobody.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem_engine.scheduler.policy.ageing import Ageing
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class ByPriority:
    """Implements `Policy`, and says who is put back for whom."""

    ageing: Ageing
    threshold: int

    def order(self, queues: Queues) -> Iterator[Request]:
        yield from sorted(queues.waiting, key=self._standing, reverse=True)

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return max(requests, key=self._standing, default=None)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return self._most_expendable_first(candidates)[0]

    def outranked(self, head: Request, candidates: Sequence[Request]) -> list[Request]:
        """Those of `candidates` that `head` may put back, the most expendable first."""
        lower = [req for req in candidates if head.priority - req.priority - self.ageing.levels(req) >= self.threshold]
        return self._most_expendable_first(lower)

    def _standing(self, req: Request) -> float:
        """Priority with age, less what is the same for all: the order of two requests never changes."""
        return req.priority - req.arrived_at / self.ageing.seconds

    def _most_expendable_first(self, candidates: Sequence[Request]) -> list[Request]:
        """The newest of equals is the most expendable."""
        ranked = sorted(candidates, key=self._standing, reverse=True)
        ranked.reverse()
        return ranked
