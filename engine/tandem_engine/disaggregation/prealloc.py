"""Requests that wait for the pages their KV will be written to.

First come, first served: a long prompt at the head waits for its pages and nothing overtakes it, or it
would wait for ever. Pages are given only while running requests can spare them, so that transfers neither
starve them nor push them into retraction, and no more are let in than the running batch can take.
"""

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.disaggregation.host import StageHost
from tandem_engine.disaggregation.room_key import RoomKey, room_key
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.requests import Handoff
from tandem_engine.names import RequestId
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
        """`writer` goes on with these rooms. Those that do not wait here are ignored."""
        for waiting in self.from_peer(writer):
            if waiting.key in keys:
                waiting.deadline = deadline

    def overdue(self) -> list[Waiting]:
        now = self.host.clock.now()
        return [waiting for waiting in self._waiting if now >= waiting.deadline]

    def reserve_next(self, *, under_way: int) -> Reserved | None:
        """Take the head out with all the memory it needs, or leave it when that would crowd others out.

        `under_way` transfers hold their pages already; each becomes a running request that soon wants
        one page more.
        """
        if not self._waiting:
            return None
        kv = self._reserve(self._waiting[0], under_way)
        return None if kv is None else Reserved(self._waiting.popleft(), kv)

    def _reserve(self, waiting: Waiting, under_way: int) -> RequestKv | None:
        memory, tokens, salt = self.host.memory, waiting.tokens, waiting.req.cache_salt
        if memory.rows.available == 0 or under_way >= self.host.spare_requests():
            return None
        # At least one token is always received, or there would be nothing to wait for.
        longest = len(tokens) - 1
        cached = memory.cached_len(tokens, salt=salt, max_match=longest)
        if memory.pages_for(len(tokens) - cached) + under_way > self.host.spare_pages():
            return None
        kv = memory.begin(tokens, salt=salt, max_match=longest)
        if kv is not None and not memory.ensure(kv, len(tokens)):
            memory.release(kv, tokens, checkpoint=False, after_step=None)
            return None
        return kv
