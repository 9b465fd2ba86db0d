"""Who goes first, and who gives way.

Only first come, first served is implemented; the planner knows the two questions, not the answer.
"""

from collections.abc import Sequence
from typing import Protocol

from tandem_engine.scheduler.queues import WaitingQueue
from tandem_engine.scheduler.request import Request


class Policy(Protocol):
    """Answers are computed from what is there now; nothing is remembered between plans (T18)."""

    def first(self, waiting: WaitingQueue) -> Request | None:
        """The request that is admitted next. If it does not fit nobody overtakes it."""
        ...

    def victim(self, candidates: Sequence[Request]) -> Request:
        """The request that gives its memory back when there is too little. Never called with none."""
        ...


class Fcfs:
    """First come, first served; the newest of the least important gives way.

    A greater `Request.priority` is more important. It does not reorder the queue.
    """

    def first(self, waiting: WaitingQueue) -> Request | None:
        return waiting.head

    def victim(self, candidates: Sequence[Request]) -> Request:
        ranked = enumerate(candidates)
        _, victim = max(ranked, key=lambda entry: (-entry[1].priority, entry[1].arrived_at, entry[0]))
        return victim
