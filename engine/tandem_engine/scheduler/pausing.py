"""Pause and resume: the engine stops between two steps, and continues from the same state.

    abort      every request ends; nothing is left to resume
    retract    running requests release their KV and wait at the head of the queue; the cache can be flushed
    in_place   every request keeps its memory; resuming costs nothing

While paused, the engine computes nothing. Requests wait, aborts and deadlines take effect, and stages exchange messages
with peers. Output does not depend on a pause: what was retracted is recomputed. New requests wait too, unless other
engines could serve them: then they are rejected.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem_engine.base.errors import BusyError
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.fault_isolation import Isolation
from tandem_engine.scheduler.finishing import Endings
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv
from tandem_engine.scheduler.sessions import Sessions


@dataclass(kw_only=True, slots=True)
class Pausing:
    """What a pause does to requests. Called with no step in flight."""

    memory: KvMemory
    queues: Queues
    isolation: Isolation
    endings: Endings
    sessions: Sessions
    tally: Tally
    paused: bool = False

    def put_back_all(self) -> int:
        """Put every request with KV back at the head of the queue, in admission order; returns how many.

        One that waits for its grammar or adapter continues to wait, without KV. A request whose pages are being
        sent keeps them where they are [settled-only-sent].
        """
        holders = [req for req in self._holders() if not sends_kv(req)]
        for req in reversed(holders):
            self.endings.release(req, checkpoint=True)
            if not req.held_up:
                self.queues.waiting.return_to_head(req)
        self.queues.running = [req for req in self.queues.running if req.kv is not None]
        if self.queues.chunked is not None and self.queues.chunked.kv is None:
            self.queues.chunked = None
        self.isolation.drop(holders)
        self.tally.retracted += len(holders)
        return len(holders)

    def require_flushable(self) -> None:
        """Raise `BusyError` while requests hold KV."""
        holders = sum(req.kv is not None for req in self.queues.live())
        if holders:
            raise BusyError(
                f"{holders} requests hold KV pages: wait until they have ended, abort them, or pause with mode retract"
            )

    def forget_kv(self) -> None:
        """Empty the prefix cache, of what conversations have pinned too: their next turns compute it again."""
        while self.sessions.unpin_idle_session():
            pass
        self.memory.clear_cache()

    def _holders(self) -> Iterator[Request]:
        """Requests with KV that the scheduler keeps itself, those admitted first before others."""
        yield from (req for req in self.queues.running if req.finished is None)
        yield from self.isolation.suspects()
        if self.queues.chunked is not None:
            yield self.queues.chunked
        yield from self.queues.parked()
