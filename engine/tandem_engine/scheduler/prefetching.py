"""New requests whose prefix is in storage wait beside the queue until it is in host memory.

    1. arrives      storage has blocks after its prefix: reading begins, and the request stands aside
    2. joins        the queue, where it would have stood, when all of them are there or did not come, or when time is up

Meanwhile others are served, so storage delays nobody but those it serves. Without storage nothing happens. Who waits
for a grammar, too, has both at once: it stands with those until it is compiled, and here for what is then missing.
"""

from dataclasses import dataclass

from tandem_engine.clock import Clock
from tandem_engine.memory.host.prefetch import Prefetch
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
        entered = self.queues.enter(req)
        if not entered and not req.awaits_grammar:
            return
        prefetch = self._read(req)
        if not entered:
            if prefetch is not None:
                self.queues.reading[req] = prefetch
        elif prefetch is None:
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

    def _read(self, req: Request) -> Prefetch | None:
        """Begin to read its prefix. None if there is nothing to wait for."""
        host = self.memory.host
        if host is None or host.cache is None:
            return None
        tokens = req.token_ids(0, req.seq_len)
        until = self.clock.now() + host.prefetch_timeout
        prefetch = host.cache.prefetch(tokens, salt=req.cache_salt, max_tokens=len(tokens) - 1, until=until)
        return prefetch if host.prefetch_timeout else None
