"""The request with the fewest steps left goes first; the one with the most gives way.

Steps left are those of its prompt, chunk by chunk, and one for each token it may still generate: a bound known in
advance, not a guess. Overdue requests go before.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem_engine.scheduler.policy.ageing import Ageing
from tandem_engine.scheduler.policy.interface import first_come
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestRemaining:
    """Implements `Policy`."""

    ageing: Ageing
    chunk: int
    """Prompt tokens of one step."""

    def order(self, queues: Queues) -> Iterator[Request]:
        overdue, others = self.ageing.split(queues.waiting)
        yield from overdue
        yield from sorted(others, key=self.steps_left)

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        return first_come(requests)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return max(reversed(candidates), key=lambda req: (self.steps_left(req), req.arrived_at))

    def steps_left(self, req: Request) -> int:
        """At most so many steps until `req` has its last token."""
        uncomputed = req.seq_len - req.launched_len
        return -(-uncomputed // self.chunk) + req.remaining_tokens
