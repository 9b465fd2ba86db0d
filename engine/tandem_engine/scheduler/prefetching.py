"""New requests whose prefix is in storage wait beside the queue until it is in host memory.

    1. arrives      storage has blocks after its prefix: reading begins, and the request stands aside
    2. joins        the queue, at its end, when all of them are there or did not come, or when time is up

Meanwhile others are served, so storage delays nobody but those it serves. Without storage nothing happens.
"""

from dataclasses import dataclass

from tandem_engine.clock import Clock
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request


@dataclass(kw_only=True, slots=True)
class Prefetching:
    """The way from arrival to the waiting queue."""

    memory: KvMemory
    queues: Queues
    clock: Clock

    def enter(self, req: Request) -> None:
        """Give a new request its place: in the queue, or beside it."""
        if not self.queues.enter(req):
            return
        host = self.memory.host
        prefetch = None
        if host is not None and host.cache is not None:
            tokens = req.token_ids(0, req.seq_len)
            until = self.clock.now() + host.prefetch_timeout
            prefetch = host.cache.prefetch(tokens, salt=req.cache_salt, max_tokens=len(tokens) - 1, until=until)
        if prefetch is None or host is None or host.prefetch_timeout == 0.0:
            self.queues.waiting.join(req)
        else:
            self.queues.prefetching[req] = prefetch

    def poll(self) -> bool:
        """Let those join whose time has come. True if any did."""
        if not self.queues.prefetching:
            return False
        now = self.clock.now()
        ready = [req for req, prefetch in self.queues.prefetching.items() if prefetch.done or now >= prefetch.until]
        for req in ready:
            del self.queues.prefetching[req]
            self.queues.waiting.join_in_order(req)
        return bool(ready)
