"""New requests whose prefix is in storage, or at another engine, wait beside the queue until it is here.

    1. arrives      the gateway has named an engine that has more of its prefix, or storage has blocks after it:
                    bringing them begins, and the request stands aside
    2. joins        the queue, where it would have stood, when all of them are there or did not come, or when time is up

Meanwhile others are served, so this delays nobody but those it serves. Who waits for a grammar, too, has both at once:
it stands with those until it is compiled, and here for what is then missing.
"""

from dataclasses import dataclass

from tandem_engine.clock import Clock
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.stage import AwaitedPages


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
        # What another engine has is more than what is here, in whatever tier: that is why it was named.
        awaited = self._fetch(req) or self._read(req)
        if not entered:
            if awaited is not None:
                self.queues.reading[req] = awaited
        elif awaited is None:
            self.queues.waiting.join(req)
        else:
            self.queues.prefetching[req] = awaited

    def poll(self) -> bool:
        """Let those join whose time has come. True if any did."""
        if not self.queues.prefetching:
            return False
        now = self.clock.now()
        ready = [req for req, awaited in self.queues.prefetching.items() if awaited.done or now >= awaited.until]
        for req in ready:
            del self.queues.prefetching[req]
            self.queues.waiting.join_in_order(req)
        return bool(ready)

    def _fetch(self, req: Request) -> AwaitedPages | None:
        """Begin to bring its prefix from another engine. None if there is nothing to wait for."""
        if req.fetch is None:
            return None
        begun = (stage.fetch(req) for stage in self.queues.stages)
        return next((awaited for awaited in begun if awaited is not None), None)

    def _read(self, req: Request) -> AwaitedPages | None:
        """Begin to read its prefix from storage. None if there is nothing to wait for."""
        host = self.memory.host
        if host is None or host.cache is None:
            return None
        tokens = req.token_ids(0, req.seq_len)
        until = self.clock.now() + host.prefetch_timeout
        prefetch = host.cache.prefetch(tokens, salt=req.cache_salt, max_tokens=len(tokens) - 1, until=until)
        return prefetch if host.prefetch_timeout else None
