"""Room for the next token of every running request, made by putting some of them back.

Admission guesses how long outputs get; here the guess meets the truth. The check is exact: one page for
each request whose next token starts a page, against pages that are free or evictable. The same function
decides whether anybody is retracted and when it is enough [one-memory-check].

A retracted request gives everything back; its settled pages stay in the prefix cache until somebody needs
them. It returns to the head of the queue, to be computed again, or is swapped to host memory where that is
predicted to be cheaper (`swapping`). It is never in flight: the planner asks to settle first,
which also lets a request that is about to end do so and give up its pages for nothing [finish-before-retract]
[settle-before-retract].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tandem_engine.config import SchedulerConfig
from tandem_engine.errors import OutOfPagesError
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.endings import Endings, error_finish
from tandem_engine.scheduler.new_token_ratio import NewTokenRatio
from tandem_engine.scheduler.policy.interface import Policy
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv
from tandem_engine.scheduler.sessions import Sessions
from tandem_engine.scheduler.swapping import Swapping
from tandem_engine.scheduler.tally import Tally


class Room(Enum):
    """Whether the running requests can take their next token."""

    READY = "ready"
    SETTLE_FIRST = "settle_first"
    """Short, but a step is in flight whose result may change that."""
    SHORT = "short"
    """Short even with a single request: it waits for chunks and stages to give pages back."""


def short_of_page(memory: KvMemory, decodes: Sequence[Request]) -> list[Request]:
    """Those of `decodes` that have no page for their next token.

    A token lacks one only if it is the first of its page, so the others, nearly all, are not looked at.
    """
    size = memory.page_size
    first_of_page = [req for req in decodes if req.launched_len % size == 0]
    return [req for req in first_of_page if req.launched_len >= req.held_kv.allocated_len]


def decode_pages_fit(memory: KvMemory, decodes: Sequence[Request]) -> bool:
    """Whether each of `decodes` can have the page of its next token."""
    return len(short_of_page(memory, decodes)) <= memory.available_pages()


@dataclass(kw_only=True, slots=True)
class Retraction:
    """Makes room for a decode step."""

    config: SchedulerConfig
    memory: KvMemory
    queues: Queues
    policy: Policy
    endings: Endings
    sessions: Sessions
    swapping: Swapping
    ratio: NewTokenRatio
    tally: Tally
    decode_steps: int = 0
    """Decode steps since the last forced retraction."""

    def make_room(self, decodes: list[Request], *, in_flight: bool) -> Room:
        """Retract until `decodes` fit, removing from it who was retracted, and take their pages."""
        forced = self.force_is_due and bool(decodes)
        while not decode_pages_fit(self.memory, decodes) and self.sessions.give_way():
            pass
        if in_flight and (forced or not decode_pages_fit(self.memory, decodes)):
            return Room.SETTLE_FIRST
        if forced:
            self.decode_steps = 0
            self._put_back(self.policy.victim(decodes), decodes)
        while not decode_pages_fit(self.memory, decodes):
            candidates = self._candidates(decodes)
            if len(candidates) == 1:
                return Room.SHORT
            self._retract(self.policy.victim(candidates), decodes)
        self._take_pages(decodes)
        return Room.READY

    def preempt(self, req: Request) -> None:
        """Put `req` back for somebody who matters more. No step is in flight."""
        req.retractions += 1
        self.tally.preempted += 1
        self._put_back(req, [req] if req is not self.queues.chunked else [])

    def give_up_one(self) -> None:
        """Nothing can run and nothing will change: end the request that gives way first [last-request-fails]."""
        holders = [*self.queues.running]
        if self.queues.chunked is not None:
            holders.append(self.queues.chunked)
        self._fail(self.policy.victim(holders), "the KV pool has no page left for its next token")

    def _candidates(self, decodes: Sequence[Request]) -> list[Request]:
        """Who may be put back. Pages of a chunk that is being sent must stay what they are [settled-only-sent]."""
        chunked = self.queues.chunked
        if chunked is None or sends_kv(chunked):
            return [*decodes]
        return [*decodes, chunked]

    def _retract(self, req: Request, decodes: list[Request]) -> None:
        self.ratio.reset()
        req.retractions += 1
        if req.retractions <= self.config.max_retractions:
            self._put_back(req, decodes)
            return
        if req in decodes:
            decodes.remove(req)
        self._fail(req, f"it was put back {self.config.max_retractions} times for want of KV pages")

    def _put_back(self, req: Request, decodes: list[Request]) -> None:
        """Give back everything and wait at the head of the queue, or of those who are swapped."""
        assert not req.steps_in_flight, f"request {req.rid} retracted with {req.steps_in_flight} steps in flight"
        self.tally.retracted += 1
        if req in decodes:
            decodes.remove(req)
            self.queues.running.remove(req)
            if self.swapping.swap_out(req):
                return
        else:
            self.queues.chunked = None
        self.endings.release(req, checkpoint=True)
        self.queues.waiting.return_to_head(req)

    def _fail(self, req: Request, why: str) -> None:
        error = OutOfPagesError(f"request {req.rid} ended early: {why}")
        self.endings.finish(req, error_finish(error))

    def _take_pages(self, decodes: Sequence[Request]) -> None:
        for req in short_of_page(self.memory, decodes):
            granted = self.memory.ensure(req.held_kv, req.launched_len + 1)
            assert granted, f"no page for token {req.launched_len} of {req.rid} after the check passed"
        if decodes:
            self.decode_steps += 1

    @property
    def force_is_due(self) -> bool:
        """Whether the next decode step retracts somebody, short of pages or not."""
        every = self.config.force_retract_every
        return every > 0 and self.decode_steps >= every
