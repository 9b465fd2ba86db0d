"""Fills one step with prompt tokens, request by request, within a token budget and the free pages.

For each request the order is: token budget, row and cached prefix (locked), page estimate, pages. If one is lacking,
those taken before are released [admission-unwinds] and the result names the missing one. Once all are there, the part
of the prefix that only host memory has is copied to the first of the pages.

    chunk = min(budget left, chunk limit, rest of the prompt)

`PromptBudget` has less for all while several tenants have requests (`shared`), because the first token of one waits
for the step of another. A prompt of a tenant that is behind the others has the usual limits, and all that is left of
the step where it would have to wait for another's partly computed prompt. That adds up to at most as many tokens as the
others had before. Its step is short (`beside`): prompts of others would delay its first token, and have the next step.
A partly computed prompt gets its part of `shared` before them once others have passed it (`TenantOrder.has_passed`).

The page estimate covers the whole rest of the prompt and the expected part of the output, not only the chunk, for this
request and for all running ones (`reserved`). So a started prompt can be finished, unless outputs grow longer than
expected; for those, admission leaves the `watermark` free.

`OvertakenReserve` is memory for prompts that were overtaken before they reached the queue. A prompt for another worker
may be delayed by its grammar, its prefix in storage, or a choice that computes the same prompt. Its receiver still
grants pages in order of arrival, and later prompts keep their memory until they get such pages. If these took all
memory, both workers would block:

    writer     full of later prompts, which wait for ─▶ receiver's pages, which are granted to the earlier prompt
                                       ▲                                                                │
                                       └──────── memory for that prompt, once it is no longer delayed ◀─┘

So a prompt for another worker overtakes only while the overtaken ones still fit next to it. Requests that finish on
this worker release their memory in any case and are exempt. Where a tenant's turn is before that of an earlier prompt
for another worker, and memory is short, it gives its turn up (`Queues.give_up_turn`): the earlier prompt, behind it in
the queue, may be the one that memory waits for.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, repeat
from math import ceil
from typing import NamedTuple

from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.scheduler.queues import Groups, PageCopy, Queues
from tandem_engine.scheduler.request import Request, sends_kv


class OvertakenReserve(NamedTuple):
    """Rows and pages reserved for requests that were overtaken."""

    rows: int
    pages: int


NOTHING = OvertakenReserve(rows=0, pages=0)


def overtaken_reserve(memory: KvMemory, queues: Queues, req: Request, *, in_turns: bool = False) -> OvertakenReserve:
    """What `req`, which will wait for another worker, leaves to prompts that it overtakes.

    `in_turns`: it may overtake those of other tenants in the queue.
    """
    overtaken = chain(_held_up(queues), queues.of_other_tenants(req) if in_turns else ())
    earlier = [other for other in overtaken if other.arrived_at < req.arrived_at and _needs_memory(other)]
    if not earlier:
        return NOTHING
    return OvertakenReserve(rows=len(earlier), pages=sum(memory.pages_for(other.seq_len) for other in earlier))


def _held_up(queues: Queues) -> Iterator[Request]:
    """Requests that will be in the queue without another one releasing memory first."""
    yield from queues.compiling.values()
    yield from queues.prefetching
    for leader, followers in queues.groups.led():
        if leader.kv is not None or leader.rid in queues.compiling or leader in queues.prefetching:
            yield from followers


def _needs_memory(req: Request) -> bool:
    return req.kv is None and sends_kv(req) and req.to_finish is None


BESIDE_BEHIND = 4
"""The step that computes a prompt of a tenant that is behind has this part of the shared tokens for all prompts."""


@dataclass(kw_only=True, slots=True)
class PromptBudget:
    """Prompt tokens that one step may still compute."""

    left: int
    chunk: int
    """Of one request."""
    shared: int | None = None
    """Of `left`, those for prompts of tenants that are not behind; None: there is one tenant."""
    beside: int = field(init=False)
    """The most of `shared` once a prompt of a tenant that is behind is in the step: its first token waits for all of
    it."""

    def __post_init__(self) -> None:
        self.beside = (self.shared or 0) // BESIDE_BEHIND

    def most(self, req: Request, *, may_chunk: bool) -> int:
        """For `req`. `may_chunk`: it may be computed in parts."""
        if self.shared is None:
            return min(self.left, self.chunk)
        if req.is_behind:
            return min(self.left, self.chunk) if may_chunk else self.left
        return min(self.left, self.chunk, self.shared)

    def take(self, req: Request, tokens: int) -> None:
        self.left -= tokens
        if self.shared is not None:
            shared = min(self.shared, self.beside) if req.is_behind else self.shared
            self.shared = max(0, shared - tokens)

    def keep_going(self) -> None:
        """A partly computed prompt gets a token at least, if the step has one left."""
        if self.shared is not None:
            self.shared = max(1, self.shared)


class Admission(Enum):
    """Whether a request can run now; if not, why it is checked again later. Requests that can never run get a 400 at
    ingress."""

    OK = "ok"
    BUDGET = "budget"
    """The tokens of this step are spent."""
    NO_SEAT = "no_seat"
    """`max_running_requests` are running."""
    NO_ROW = "no_row"
    NO_PAGES = "no_pages"
    """It does not fit next to what running requests are expected to need."""
    WATERMARK = "watermark"
    """It would fit, but into pages that are kept free."""
    OVERTAKES = "overtakes"
    """It would fit, but into pages of an earlier prompt for another worker, which it overtakes (`OvertakenReserve`)."""
    CHUNK_IN_PROGRESS = "chunk_in_progress"
    """It would need chunks, and another prompt is half computed."""
    SHARED_PREFIX = "shared_prefix"
    """What it shares with another request is being computed."""
    AFTER_RETRACTION = "after_retraction"
    """A request was put back in this step: the two would change places forever."""
    SWAPPED_FIRST = "swapped_first"
    """Requests whose KV is in host memory resume before any new one starts."""
    DECODE_TURN = "decode_turn"
    """Prompts had several steps in a row; running requests have this one."""
    DELAYED = "delayed"
    """More prompts may come to be computed together with it (`--scheduler-delay-factor`)."""

    @property
    def ok(self) -> bool:
        return self is Admission.OK

    @property
    def lacks_pages(self) -> bool:
        """More free pages would help."""
        return self in (Admission.NO_PAGES, Admission.WATERMARK, Admission.OVERTAKES)

    @property
    def lacks_memory(self) -> bool:
        """More free pages or rows would help."""
        return self.lacks_pages or self is Admission.NO_ROW


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
    """Pages that `req` is expected to have at its end. `tokens`: its length now, tokens in flight included.

    A prompt for another worker ends here with its first token, which needs no KV.
    """
    if sends_kv(req):
        return memory.pages_for(tokens)
    return memory.pages_for(tokens + ceil(req.remaining_tokens * ratio))


def reserved_pages(memory: KvMemory, running: Iterable[Request], ratio: float) -> int:
    """Pages that requests are expected to take beyond those they have."""
    reserved = 0
    for req in running:
        tokens = max(req.extend_target, req.launched_len + 1)
        missing = expected_pages(memory, req, tokens, ratio) - len(req.held_kv.pages)
        reserved += max(0, missing)
    return reserved


def missing_in_windows(memory: KvMemory, req: Request, tokens: int, ratio: float) -> list[int]:
    """As `reserved_pages`, of one request, for each group of layers with a window: what it needs while it decodes."""
    kv, expected = req.held_kv, expected_pages(memory, req, tokens, ratio)
    return [
        max(0, window.blocks_for(expected) - (len(kv.pages) - passed))
        for window, passed in zip(memory.windows, kv.passed, strict=True)
    ]


def reserved_in_windows(memory: KvMemory, running: Iterable[Request], ratio: float) -> list[int]:
    """For each group of layers with a window, pages that requests are expected to take beyond those they have."""
    missing = [missing_in_windows(memory, req, max(req.extend_target, req.launched_len + 1), ratio) for req in running]
    return [sum(each) for each in zip(*missing, strict=True)] or [0] * len(memory.windows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a request starts with: row and prefix in `kv`, pages up to `stop`, tokens before `start` known."""

    kv: RequestKv
    donor: RequestKv | None
    """Where tokens [kv.committed_len, start) are copied from."""
    start: int
    stop: int
    tokens: int
    """All that its prefill must compute or find."""


@dataclass(kw_only=True, slots=True)
class PrefillAdder:
    """One pass over the queue."""

    memory: KvMemory
    groups: Groups
    overtaken_reserve: Callable[[Request], OvertakenReserve]
    """What a prompt for another worker leaves to those that it overtakes."""
    budget: PromptBudget
    ratio: float
    reserved: int
    """Pages promised to running requests and to those added by this pass."""
    crowded: bool
    """Something else runs and will give pages back: a request that does not fit can wait for them."""
    watermark: int
    """Pages that stay free unless nothing else runs."""
    may_chunk: bool
    """No other prompt is half computed: one at a time, so that the first in the queue is done first."""
    reserved_in_windows: list[int] = field(default_factory=list)
    """As `reserved`, for each group of layers with a window."""
    extends: list[Extend] = field(default_factory=list)

    def resume(self, req: Request) -> Admission:
        """The next chunk of a request that has row and prefix already."""
        chunk = min(self.budget.most(req, may_chunk=True), req.extend_target - req.launched_len)
        if not chunk:
            return Admission.BUDGET
        if not self.memory.ensure(req.held_kv, req.launched_len + chunk):
            return Admission.NO_PAGES
        self._take(req, chunk)
        return Admission.OK

    def full(self) -> Admission:
        """What every request would be answered, as far as that is known without looking at one."""
        if self.budget.left == 0:
            return Admission.BUDGET
        if self.crowded and (self.memory.available_pages() <= self.reserved or self._windows_are_full()):
            return Admission.NO_PAGES
        return Admission.OK

    def ask(self, req: Request) -> Admission:
        """What `add` would answer. Changes nothing but when the cached prefix was last used."""
        start = self._begin(req)
        if isinstance(start, Admission):
            return start
        self._give_back(start.kv)
        return Admission.OK

    def add(self, req: Request) -> Admission:
        """The first chunk of a waiting request: match its prefix, then count [match-then-count]."""
        start = self._begin(req)
        if isinstance(start, Admission):
            return start
        self.memory.load_back(start.kv, req.token_ids(0, start.tokens))
        req.kv = start.kv
        req.extend_target = start.tokens
        req.launched_len = start.start
        copies: tuple[PageCopy, ...] = ()
        if start.donor is not None:
            copies = self._copies(start.donor, start.kv, start.start)
            self.memory.mark_brought(start.kv, start.start)
        self._take(req, start.stop - start.start, copies=copies)
        self.crowded = True
        expected = expected_pages(self.memory, req, start.tokens, self.ratio)
        self.reserved += max(0, expected - len(start.kv.pages))
        if self.memory.windows:
            missing = missing_in_windows(self.memory, req, start.tokens, self.ratio)
            self.reserved_in_windows = [*map(sum, zip(self.reserved_in_windows, missing, strict=True))]
        return Admission.OK

    def _begin(self, req: Request) -> Start | Admission:
        """Row, locked prefix and the pages of the first chunk; or what is lacking, and nothing is held."""
        full = self.full()
        if not full.ok:
            return full
        most = self.budget.most(req, may_chunk=self.may_chunk)
        if not most:
            return Admission.BUDGET
        kept = self.overtaken_reserve(req) if sends_kv(req) else NOTHING
        if self.memory.rows.available <= kept.rows:
            return Admission.NO_ROW
        tokens = req.token_ids(0, req.seq_len)
        longest = req.longest_match
        kv = self.memory.begin(tokens, space=req.space, max_match=longest)
        if kv is None:
            return Admission.NO_ROW
        # A window may have passed pages that a copy of its whole prompt needs; a state is not in pages.
        donor = None if self.memory.windows or self.memory.stateful else self.groups.donor(req)
        first = kv.matched_len if donor is None else max(kv.matched_len, min(req.prompt_len, longest))
        stop = first + min(most, len(tokens) - first)
        answer = self._fits(req, kv, len(tokens), stop, kept.pages)
        if answer.ok:
            return Start(kv=kv, donor=donor, start=first, stop=stop, tokens=len(tokens))
        self._give_back(kv)
        return answer

    def _give_back(self, kv: RequestKv) -> None:
        self.memory.release(kv, (), checkpoint=False, after_step=None)

    def _fits(self, req: Request, kv: RequestKv, tokens: int, stop: int, kept: int) -> Admission:
        """Check the budgets under the lock and take the pages up to `stop` if they allow it."""
        if stop < tokens and not self.may_chunk:
            return Admission.CHUNK_IN_PROGRESS
        # Alone in the engine a request may use all there is, so only its prompt counts.
        ratio, watermark = (self.ratio, self.watermark) if self.crowded else (0.0, 0)
        missing = expected_pages(self.memory, req, tokens, ratio) - len(kv.pages)
        spare = self.memory.available_pages() - self.reserved
        if missing > spare:
            return Admission.NO_PAGES
        if missing > spare - kept:
            return Admission.OVERTAKES
        if missing > spare - watermark - kept:
            return Admission.WATERMARK
        if not self._windows_fit(kv, expected_pages(self.memory, req, tokens, ratio), stop):
            return Admission.NO_PAGES
        return Admission.OK if self.memory.ensure(kv, stop) else Admission.NO_PAGES

    def _windows_are_full(self) -> bool:
        """Whether a group of layers with a window has no page that is not reserved."""
        return any(
            window.available <= reserved
            for window, reserved in zip(self.memory.windows, self.reserved_in_windows, strict=False)
        )

    def _windows_fit(self, kv: RequestKv, expected: int, stop: int) -> bool:
        """Whether groups of layers with a window have pages for the chunk up to `stop` and for decodes after it."""
        return all(
            max(window.blocks_for(expected), self.memory.pages_for(stop) - passed) - (len(kv.pages) - passed)
            <= window.available - reserved
            for window, passed, reserved in zip(
                self.memory.windows, kv.passed, self.reserved_in_windows or repeat(0), strict=False
            )
        )

    def _copies(self, donor: RequestKv, kv: RequestKv, stop: int) -> tuple[PageCopy, ...]:
        """Pages of tokens [kv.committed_len, stop), which the cache did not have and `donor` does."""
        pages = slice(kv.committed_len // kv.page_size, self.memory.pages_for(stop))
        return tuple(map(PageCopy, donor.pages[pages], kv.pages[pages]))

    def _take(self, req: Request, chunk: int, *, copies: tuple[PageCopy, ...] = ()) -> None:
        self.extends.append(Extend(req=req, start=req.launched_len, stop=req.launched_len + chunk, copies=copies))
        self.budget.take(req, chunk)
