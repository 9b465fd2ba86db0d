"""Who goes first, and who gives way.

The planner knows the two questions and not the answers. A policy answers from what is there now and remembers
nothing between plans [admission-not-latched], so replaying the same requests at the same times gives the same order on
every rank.

A greater `Request.priority` is more important, here and at the API: SGLang's default, the opposite of vLLM.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request


class Policy(Protocol):
    """One way to order waiting requests. Every one bounds how long a request can be passed over."""

    def order(self, queues: Queues) -> Iterator[Request]:
        """Waiting requests in the order in which they are tried.

        The planner takes each request that it gets out of the queue before it asks for the next, and asks no
        more after the first that has to wait: nobody overtakes it. Work starts with the first `next`.
        """
        ...

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        """Who goes first of `requests`, which wait outside the queues for KV that is computed elsewhere.

        They come in order of arrival; None when there are none.
        """
        ...

    def victim(self, candidates: Sequence[Request]) -> Request:
        """The request that gives its memory back when there is too little. Never called with none."""
        ...


def first_come(requests: Iterable[Request]) -> Request | None:
    """Who goes first outside the queues where arrival is all that counts there."""
    return next(iter(requests), None)


def least_important(candidates: Sequence[Request]) -> Request:
    """The newest of those with the least priority: the victim of every policy that has no better idea."""
    ranked = enumerate(candidates)
    _, victim = max(ranked, key=lambda entry: (-entry[1].priority, entry[1].arrived_at, entry[0]))
    return victim
