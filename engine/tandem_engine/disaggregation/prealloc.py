"""Requests that wait for the pages their KV will be written to.

The scheduling policy selects the first; with most policies that is the oldest. No request overtakes a long prompt that
waits for its pages, or it would starve. Pages are given only while running requests can spare them, so that transfers
neither starve these nor cause retractions, and no more requests are admitted than the running batch can take.

Choices of one response (`scheduler.queues`) share the pages of their prompt. The others are skipped while the first
receives it: afterwards they find it in the prefix cache and receive the rest.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.base.names import RequestId
from tandem_engine.disaggregation.base import RoomKey, StageHost, room_key
from tandem_engine.memory.allocator import Writer
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.requests import Handoff
from tandem_engine.scheduler.queues import same_prompt
from tandem_engine.scheduler.request import Request


@dataclass(kw_only=True, slots=True, eq=False)
class Waiting:
    """A request that has no pages yet."""

    req: Request
    handoff: Handoff
    tokens: tuple[int, ...]
    """Prompt and resumed output: what the writer computes."""
    deadline: float
    """Monotonic time, of the writer's next sign of life."""

    @property
    def key(self) -> RoomKey:
        return room_key(self.handoff.room, self.handoff.generation)


class Reserved(NamedTuple):
    """A request that left the queue, with row, cached prefix and private pages for the rest."""

    waiting: Waiting
    kv: RequestKv


@dataclass(kw_only=True, slots=True)
class PreallocQueue:
    """Waiting requests in order of arrival."""

    host: StageHost
    _waiting: deque[Waiting] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting)

    def join(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)

    def remove(self, waiting: Waiting) -> None:
        self._waiting.remove(waiting)

    def of_request(self, rid: RequestId) -> Waiting | None:
        return next((waiting for waiting in self._waiting if waiting.req.rid == rid), None)

    def in_room(self, key: RoomKey) -> Waiting | None:
        return next((waiting for waiting in self._waiting if waiting.key == key), None)

    def from_peer(self, incarnation: str) -> list[Waiting]:
        """Those that this peer is to write for."""
        return [waiting for waiting in self._waiting if waiting.handoff.peer.incarnation == incarnation]

    def renew(self, keys: Set[RoomKey], *, writer: str, deadline: float) -> None:
        """`writer` continues these rooms. Those that do not wait here are ignored."""
        for waiting in self.from_peer(writer):
            if waiting.key in keys:
                waiting.deadline = deadline

    def overdue(self) -> list[Waiting]:
        now = self.host.clock.now()
        return [waiting for waiting in self._waiting if now >= waiting.deadline]

    def reserve_next(self, *, under_way: Collection[Request]) -> Reserved | None:
        """Take the next one out with all the memory it needs, or leave it when that would crowd others out.

        Requests `under_way` hold their pages already; each becomes a running request that soon wants one page
        more.
        """
        if not self.host.memory.open_to_peers:
            return None  # whatever is released: ask again once the copies are acked
        prompts = [req for req in under_way if req.group]
        first = self.host.next_outside(each.req for each in self._waiting if not _comes(each.req, prompts))
        waiting = None if first is None else self.of_request(first.rid)
        if waiting is None:
            return None
        kv = self._reserve(waiting, len(under_way))
        while kv is None and self.host.unpin_idle_session():
            kv = self._reserve(waiting, len(under_way))
        if kv is None:
            return None
        self._waiting.remove(waiting)
        return Reserved(waiting, kv)

    def _reserve(self, waiting: Waiting, under_way: int) -> RequestKv | None:
        memory, tokens, space = self.host.memory, waiting.tokens, waiting.req.space
        kept = self.host.overtaken_reserve(waiting.req)
        if memory.rows.available <= kept.rows or under_way >= self.host.spare_requests():
            return None
        # At least one token is always received, or there would be nothing to wait for.
        longest = len(tokens) - 1
        cached = memory.cached_len(tokens, space=space, max_match=longest)
        if memory.pages_for(len(tokens) - cached) + under_way > self.host.spare_pages() - kept.pages:
            return None
        kv = memory.begin(tokens, space=space, max_match=longest)
        if kv is None:
            return None
        if not memory.ensure(kv, len(tokens), Writer.PEER):
            memory.release(kv, tokens, checkpoint=False, after_step=None)
            return None
        memory.load_back(kv, tokens, with_state=False)
        return kv


def _comes(req: Request, under_way: Sequence[Request]) -> bool:
    """Whether another choice of the same answer is receiving the prompt of `req`."""
    return bool(req.group) and any(
        (req.client, req.group) == (other.client, other.group) and same_prompt(req, other) for other in under_way
    )
