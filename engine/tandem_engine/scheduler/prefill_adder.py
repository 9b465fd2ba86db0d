"""Fills one step with prompt tokens, request by request, within a token budget and the free pages.

For each request the order is: token budget, row and cached prefix (locked), page estimate, pages. What
was taken is given back if the next thing is lacking (T36).

    chunk = min(budget left, chunk limit, rest of the prompt)

The page estimate covers the whole rest of the prompt and the expected part of the output, not only the
chunk, for this request and for everybody who runs (`reserved`). So a prompt that is begun can be
finished, unless outputs grow longer than expected.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import ceil

from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.scheduler.groups import Groups, PageCopy
from tandem_engine.scheduler.request import Request


class Admission(Enum):
    """Whether a request can run. The third answer, never, is given at ingress."""

    OK = "ok"
    LATER = "later"


@dataclass(frozen=True, kw_only=True, slots=True)
class Extend:
    """Compute tokens [start, stop) of `req.fill_ids` in this step."""

    req: Request
    start: int
    stop: int
    copies: tuple[PageCopy, ...] = ()
    """Pages that have to be there before: the part of the prompt that another request computed (`groups`)."""

    @property
    def samples(self) -> bool:
        """A chunk that is not the last of its prompt yields no token."""
        return self.stop == self.req.extend_target


def expected_pages(memory: KvMemory, req: Request, tokens: int, ratio: float) -> int:
    """Pages that `req` is expected to have at its end. `tokens`: its length now, tokens in flight included."""
    return memory.pages_for(tokens + ceil(req.remaining_tokens * ratio))


def reserved_pages(memory: KvMemory, running: Iterable[Request], ratio: float) -> int:
    """Pages that requests are expected to take beyond those they have."""
    reserved = 0
    for req in running:
        tokens = max(req.extend_target, req.launched_len + 1)
        missing = expected_pages(memory, req, tokens, ratio) - len(req.held_kv.pages)
        reserved += max(0, missing)
    return reserved


def _longest_match(req: Request) -> int:
    """Tokens that may come from the prefix cache: one at least is computed, and what wanted logprobs need (T21)."""
    longest = req.seq_len - 1
    allowed = None if req.prompt_logprobs is None else req.prompt_logprobs.longest_match
    return longest if allowed is None else min(longest, allowed)


@dataclass(kw_only=True, slots=True)
class PrefillAdder:
    """One pass over the queue."""

    memory: KvMemory
    groups: Groups
    tokens_left: int
    """Prompt tokens that this step may still compute."""
    chunk_limit: int
    """Prompt tokens that one request may compute in this step."""
    ratio: float
    reserved: int
    """Pages promised to running requests and to those added by this pass."""
    crowded: bool
    """Something else runs and will give pages back: a request that does not fit can wait for them."""
    may_chunk: bool
    """No other prompt is half computed: one at a time, so that the first in the queue is done first."""
    extends: list[Extend] = field(default_factory=list)

    def resume(self, req: Request) -> Admission:
        """The next chunk of a request that has row and prefix already."""
        chunk = self._chunk(req.extend_target - req.launched_len)
        if not self.memory.ensure(req.held_kv, req.launched_len + chunk):
            return Admission.LATER
        self._take(req, chunk)
        return Admission.OK

    def add(self, req: Request) -> Admission:
        """The first chunk of a waiting request: match its prefix, then count (T34)."""
        if self.tokens_left == 0 or (self.crowded and self.memory.available_pages() <= self.reserved):
            return Admission.LATER
        tokens = req.token_ids(0, req.seq_len)
        longest = _longest_match(req)
        kv = self.memory.begin(tokens, salt=req.cache_salt, max_match=longest)
        if kv is None:
            return Admission.LATER
        donor = self.groups.donor(req)
        start = kv.committed_len if donor is None else max(kv.committed_len, min(req.prompt_len, longest))
        chunk = self._chunk(len(tokens) - start)
        if not self._fits(req, kv, len(tokens), start + chunk):
            self.memory.release(kv, (), checkpoint=False, after_step=None)
            return Admission.LATER
        req.kv = kv
        req.extend_target = len(tokens)
        req.launched_len = start
        self._take(req, chunk, copies=() if donor is None else self._copies(donor, kv, start))
        self.crowded = True
        self.reserved += max(0, expected_pages(self.memory, req, len(tokens), self.ratio) - len(kv.pages))
        return Admission.OK

    def _fits(self, req: Request, kv: RequestKv, tokens: int, stop: int) -> bool:
        """Check the budgets under the lock and take the pages up to `stop` if they allow it."""
        if stop < tokens and not self.may_chunk:
            return False
        # Alone in the engine a request may use all there is, so only its prompt counts.
        ratio = self.ratio if self.crowded else 0.0
        missing = expected_pages(self.memory, req, tokens, ratio) - len(kv.pages)
        if missing > self.memory.available_pages() - self.reserved:
            return False
        return self.memory.ensure(kv, stop)

    def _copies(self, donor: RequestKv, kv: RequestKv, stop: int) -> tuple[PageCopy, ...]:
        """Pages of tokens [kv.committed_len, stop), which the cache did not have and `donor` does."""
        pages = slice(kv.committed_len // kv.page_size, self.memory.pages_for(stop))
        return tuple(map(PageCopy, donor.pages[pages], kv.pages[pages]))

    def _chunk(self, remaining: int) -> int:
        return min(self.tokens_left, self.chunk_limit, remaining)

    def _take(self, req: Request, chunk: int, *, copies: tuple[PageCopy, ...] = ()) -> None:
        self.extends.append(Extend(req=req, start=req.launched_len, stop=req.launched_len + chunk, copies=copies))
        self.tokens_left -= chunk
