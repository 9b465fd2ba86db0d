"""Requests that must end by a given time, earliest first.

A request that ended before its time leaves its entry behind; `overdue` drops it when it comes up. Until then
the entry is all that is left: it must not keep a prompt in memory for minutes after its answer.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from weakref import ref

from tandem_engine.scheduler.request import Request


class Deadlines:
    """O(log n) per request with a deadline, O(1) per step."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ref[Request]]] = []
        self._order = count()

    def watch(self, req: Request) -> None:
        """Remember the deadline of `req`, if it has one."""
        if req.deadline is not None:
            heapq.heappush(self._heap, (req.deadline, next(self._order), ref(req)))

    def overdue(self, now: float) -> Iterator[Request]:
        """Take out and yield the live requests whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            req = heapq.heappop(self._heap)[2]()
            if req is not None and req.finished is None:
                yield req
