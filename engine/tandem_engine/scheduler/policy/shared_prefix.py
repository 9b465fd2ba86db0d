"""Prefixes that some request is computing: others had better wait for them than compute them again.

A request waits when at least `WORTH_WAITING` tokens behind what the cache has for it are the tokens that
somebody else computes now, or will in this step. It waits until they are in the cache, which settled chunks of
a prompt enter one by one; so it runs beside the rest of a long prompt of which it shares only the beginning.
"""

from collections.abc import Iterable

from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.block_hash import pack_tokens
from tandem_engine.scheduler.request import Request

WORTH_WAITING = 32
"""Tokens, rounded up to pages. SGLang's threshold for the same decision."""


class SharedPrefixes:
    """What is being computed now, as prefixes that end `WORTH_WAITING` tokens behind what is cached."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._worth = memory.pages_for(WORTH_WAITING) * memory.page_size
        self._prefixes: set[tuple[str, bytes]] = set()

    def cached(self, req: Request) -> int:
        """Tokens of `req` that the cache has now."""
        tokens = req.token_ids(0, req.seq_len)
        return self._memory.cached_len(tokens, salt=req.cache_salt, max_match=req.longest_match)

    def computing(self, requests: Iterable[Request]) -> None:
        """Note those of `requests` whose prompt is on its way to the cache."""
        for req in requests:
            if req.kv is not None and req.kv.committed_len < req.extend_target:
                self.add(req, self.cached(req))

    def add(self, req: Request, cached: int) -> None:
        """`req`, of which `cached` tokens are cached, is computed now."""
        if cached + self._worth <= req.seq_len:
            self._prefixes.add(self._prefix(req, cached))

    def worth_waiting(self, req: Request, cached: int) -> bool:
        """Whether somebody computes enough of what `req` needs next and may take from the cache."""
        return cached + self._worth <= req.longest_match and self._prefix(req, cached) in self._prefixes

    def _prefix(self, req: Request, cached: int) -> tuple[str, bytes]:
        return req.cache_salt, pack_tokens(req.token_ids(0, cached + self._worth))
