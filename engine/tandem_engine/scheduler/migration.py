"""Migration of running requests to another worker, because this one stops or becomes a prefill worker.

    1. running   as before
    2. asked     its client was notified and looks for a worker with capacity; the request keeps running here
    3. moving    the client ends it here and sends it again as a handoff (side SEND) to the worker it found. Its pages
                 are in the prefix cache, so only the last, partial page is recomputed, and the token after it, which
                 the client has before the transfer begins
    4. moved     the other worker has verified the pages and continues

If no worker has capacity, the request keeps running here and its client is notified again. A request gives nothing up
before a worker is found, or before its time to migrate is over: then it is recomputed elsewhere.

Only a few requests migrate at a time. Each costs the step that it joins some prompt tokens; the limit keeps the effect
on other requests, and on clients that wait for a migrated request's next token, small.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from tandem_engine.base.clock import Clock
from tandem_engine.base.names import RequestId
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.scheduler.output_stream import OutputStream
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request

AT_ONCE = 8
"""Requests that are notified or migrating at any time."""

ASK_AGAIN_S = 1.0
"""As often as a gateway's view of the fleet changes."""

FEW_TOKENS = 8
"""With so few tokens left, a request ends here sooner than it would begin elsewhere."""


def is_moving(message: GenerateRequest) -> bool:
    """Whether `message` continues what this worker was generating, to hand it to another worker."""
    return message.handoff is not None and message.handoff.moving


@dataclass(kw_only=True, slots=True)
class Departures:
    """Selects which requests migrate, and when."""

    queues: Queues
    stream: OutputStream
    clock: Clock
    wanted: bool = False
    within_s: float = inf
    """Time that each has for leaving, from the moment when it is to leave and runs."""
    _since: dict[RequestId, float] = field(default_factory=dict)
    """Since when requests are to migrate."""
    _asked: dict[RequestId, float] = field(default_factory=dict)
    """Running requests whose clients were notified, and when last."""

    def poll(self) -> list[Request]:
        """Once per turn: requests the migration of those that have waited longest for it, while few migrate.

        Returns those that no worker has taken within their time.
        """
        if not self.wanted or not self.queues.running:
            self._since.clear()
            return []
        now = self.clock.now()
        leaving = {req.rid: req for req in self.leaving()}
        self._since = {rid: self._since.get(rid, now) for rid in leaving}
        self._asked = {rid: at for rid, at in self._asked.items() if rid in leaving}
        free = AT_ONCE - self._moving() - sum(now < at + ASK_AGAIN_S for at in self._asked.values())
        idle = [req for rid, req in leaving.items() if now >= self._asked.get(rid, -ASK_AGAIN_S) + ASK_AGAIN_S]
        idle.sort(key=lambda req: self._asked.get(req.rid, -ASK_AGAIN_S))
        for req in idle[: max(free, 0)]:
            self._asked[req.rid] = now
            self.stream.ask_to_leave(req)
        return [req for rid, req in leaving.items() if now - self._since[rid] >= self.within_s]

    def leaving(self) -> Iterator[Request]:
        """Running requests that are to migrate."""
        return (req for req in self.queues.running if self.wanted and _may_leave(req))

    def _moving(self) -> int:
        return sum(req.handoff is not None and req.handoff.moving for req in self.queues.live())


def _may_leave(req: Request) -> bool:
    """A conversation that is kept here ends its turn here; so does an output that is nearly complete."""
    if req.finished is not None or req.to_finish is not None or req.session is not None:
        return False
    return req.remaining_tokens > FEW_TOKENS
