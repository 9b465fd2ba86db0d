"""What happens when pages run out: retraction, swapping to host memory, preemption for a higher priority.

`Retraction` puts running requests back until each of the rest has a page for its next token. The check is exact: one
page per request whose next token starts a page, against free and evictable pages. One function decides whether to
retract and when it is enough [one-memory-check]. A retracted request releases its pages, of which completed ones stay
in the prefix cache until evicted, and returns to the head of the queue. It is never in flight: the planner requires the
step in flight to be settled first, which also lets requests end [finish-before-retract] [settle-before-retract].

`NewTokenRatio` is the share of allowed output that admission reserves. Most requests stop long before max_tokens. The
share shrinks with each successful decode step, and a retraction resets it.

`Swapping` copies the KV of a retracted request to host memory where that is predicted to be cheaper than recomputing:

    swap        (pages to copy) / (measured pages/s out)  +  the same / (measured pages/s back)
    recompute   (tokens of those pages) / (measured prefill tokens/s)

Pages that other requests have locked are expected to stay cached and count in neither. Without a measured copy a
request is swapped, which measures it; without a measured prefill it is recomputed. Swapped requests return oldest
first, before any waiting request is admitted, and only while all running ones fit. One whose shared prefix was evicted
is recomputed. Output is the same either way.

`Preemption` acts when the head of the queue lacks a slot, a row, pages, or its turn for chunks. The policy names the
running requests that it outranks. If they hold enough, and no step is in flight [settle-before-retract], they are put
back one after the other, the most expendable first, until the head fits. The queue cap does not apply to them
[retraction-bounded], and a request is put back at most `max_retractions` times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from tandem_engine.base.errors import OutOfPagesError
from tandem_engine.config import PreemptionMode, SchedulerConfig
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyKind
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.finishing import Endings, error_finish
from tandem_engine.scheduler.policies import ByPriority, Policy
from tandem_engine.scheduler.prefill_adder import Admission, expected_pages, reserved_pages
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv
from tandem_engine.scheduler.sessions import Sessions


@dataclass(kw_only=True, slots=True)
class NewTokenRatio:
    """Share of the remaining output tokens, between the configured minimum and initial value."""

    config: SchedulerConfig
    value: float = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.config.init_new_token_ratio

    def decay(self) -> None:
        """A decode step had pages for all running requests."""
        span = self.config.init_new_token_ratio - self.config.min_new_token_ratio
        step = span / max(1, self.config.new_token_ratio_decay_steps)
        self.value = max(self.config.min_new_token_ratio, self.value - step)

    def reset(self) -> None:
        """A request had to be retracted."""
        self.value = self.config.init_new_token_ratio


class Return(Enum):
    """What became of a swapped request that was looked at."""

    BACK = "back"
    RECOMPUTE = "recompute"
    LATER = "later"


@dataclass(kw_only=True, slots=True)
class Swapping:
    """Swaps requests out and in. Without host memory it never does."""

    config: SchedulerConfig
    memory: KvMemory
    queues: Queues
    endings: Endings
    tally: Tally

    def swap_out(self, req: Request) -> bool:
        """Take the memory of `req`, which decodes and has left the running batch. False: recompute it instead."""
        if self.memory.host is None or self.config.preemption_mode is PreemptionMode.RECOMPUTE:
            return False
        swap, kv = self.memory.host.swap, req.held_kv
        shared = self.memory.kept_blocks(kv)
        if not self._pays(swap.pages_to_move(kv, shared=shared)):
            return False
        swapped = swap.out(kv, shared=shared)
        if swapped is None:
            return False
        self.endings.release(req, checkpoint=True)
        req.swapped = swapped
        self.queues.swapped.appendleft(req)
        self.tally.swapped_out += 1
        return True

    def bring_back(self, *, reserved: int | None, ratio: float) -> Return:
        """Let the first swapped request run again if it fits.

        `reserved`: pages promised to running requests; None without any, and it may have all pages.
        `ratio`: share of its remaining output that a request is expected to need.
        """
        assert self.memory.host is not None, "requests are swapped and there is no host memory"
        swap, req = self.memory.host.swap, self.queues.swapped[0]
        swapped = req.swapped
        assert swapped is not None, f"request {req.rid} stands among the swapped and has no KV there"
        tokens = req.token_ids(0, req.seq_len)
        kv = self.memory.begin(tokens, space=req.space, max_match=swapped.committed_len)
        if kv is None:
            return Return.LATER
        complete = swap.completes(swapped, kv)
        if not complete or not self._fits(req, kv, reserved, ratio):
            self.memory.release(kv, (), checkpoint=False, after_step=None)
            return Return.LATER if complete else self._recompute(req)
        self.memory.load_back(kv, tokens, with_state=False)
        self.memory.expect_state(kv)
        swap.back(swapped, kv)
        self._resume(req, kv)
        return Return.BACK

    def _resume(self, req: Request, kv: RequestKv) -> None:
        self.queues.swapped.remove(req)
        req.swapped, req.kv = None, kv
        req.extend_target = req.launched_len = kv.committed_len
        self.queues.running.append(req)
        self.tally.swapped_in += 1

    def _recompute(self, req: Request) -> Return:
        self.endings.release(req, checkpoint=False)
        self.queues.swapped.remove(req)
        self.queues.waiting.return_to_head(req)
        self.tally.swap_misses += 1
        return Return.RECOMPUTE

    def _fits(self, req: Request, kv: RequestKv, reserved: int | None, ratio: float) -> bool:
        if reserved is not None:
            missing = expected_pages(self.memory, req, req.seq_len, ratio) - len(kv.pages)
            if missing > self.memory.available_pages() - reserved:
                return False
        return self.memory.ensure(kv, req.seq_len)

    def _pays(self, pages: int) -> bool:
        """Whether moving `pages` out and back is predicted to take less than computing their tokens again."""
        if self.config.preemption_mode is PreemptionMode.SWAP:
            return True
        out = self.memory.copies.pages_per_s(CopyKind.DEVICE_TO_HOST)
        back = self.memory.copies.pages_per_s(CopyKind.HOST_TO_DEVICE) or out
        prefill = self.tally.prefill_tokens_per_s
        if prefill <= 0.0:
            return False
        if out is None or back is None:
            return True
        return pages / out + pages / back < pages * self.memory.page_size / prefill


class Room(Enum):
    """Whether the running requests can take their next token."""

    READY = "ready"
    SETTLE_FIRST = "settle_first"
    """Short, but a step is in flight whose result may change that."""
    SHORT = "short"
    """Short even with a single request: it waits for chunks and stages to give pages back."""


def short_of_page(memory: KvMemory, decodes: Sequence[Request]) -> list[Request]:
    """Those of `decodes` that have no page for their next token.

    A token lacks one only if it is the first of its page, so the others, nearly all, are not looked at.
    """
    size = memory.page_size
    first_of_page = [req for req in decodes if req.launched_len % size == 0]
    return [req for req in first_of_page if req.launched_len >= req.held_kv.allocated_len]


def decode_pages_fit(memory: KvMemory, decodes: Sequence[Request]) -> bool:
    """Whether each of `decodes` can have the page of its next token."""
    short = len(short_of_page(memory, decodes))
    return short <= memory.available_pages() and memory.windows_have(short)


@dataclass(kw_only=True, slots=True)
class Retraction:
    """Makes room for a decode step."""

    config: SchedulerConfig
    memory: KvMemory
    queues: Queues
    policy: Policy
    endings: Endings
    sessions: Sessions
    swapping: Swapping
    ratio: NewTokenRatio
    tally: Tally
    decode_steps: int = 0
    """Decode steps since the last forced retraction."""

    def make_room(self, decodes: list[Request], *, in_flight: bool) -> Room:
        """Retract until `decodes` fit, remove the retracted ones from it, and take the pages."""
        forced = self.force_is_due and bool(decodes)
        while not decode_pages_fit(self.memory, decodes) and self.sessions.unpin_idle_session():
            pass
        if in_flight and (forced or not decode_pages_fit(self.memory, decodes)):
            return Room.SETTLE_FIRST
        if forced:
            self.decode_steps = 0
            self._put_back(self.policy.victim(decodes), decodes)
        while not decode_pages_fit(self.memory, decodes):
            candidates = self._candidates(decodes)
            if len(candidates) == 1:
                return Room.SHORT
            self._retract(self.policy.victim(candidates), decodes)
        self._take_pages(decodes)
        return Room.READY

    def preempt(self, req: Request) -> None:
        """Put `req` back for a more important request. No step is in flight."""
        req.retractions += 1
        self.tally.preempted += 1
        self._put_back(req, [req] if req is not self.queues.chunked else [])

    def give_up_one(self) -> None:
        """Nothing can run and nothing will change: end the first victim [last-request-fails]."""
        holders = [*self.queues.running]
        if self.queues.chunked is not None:
            holders.append(self.queues.chunked)
        self._fail(self.policy.victim(holders), "the KV pool has no page left for its next token")

    def _candidates(self, decodes: Sequence[Request]) -> list[Request]:
        """Requests that may be put back. Pages of a chunk that is being sent must not change [settled-only-sent]."""
        chunked = self.queues.chunked
        if chunked is None or sends_kv(chunked):
            return [*decodes]
        return [*decodes, chunked]

    def _retract(self, req: Request, decodes: list[Request]) -> None:
        self.ratio.reset()
        req.retractions += 1
        if req.retractions <= self.config.max_retractions:
            self._put_back(req, decodes)
            return
        if req in decodes:
            decodes.remove(req)
        self._fail(req, f"it was put back {self.config.max_retractions} times for want of KV pages")

    def _put_back(self, req: Request, decodes: list[Request]) -> None:
        """Release everything and wait at the head of the queue, or of the swapped requests."""
        assert not req.steps_in_flight, f"request {req.rid} retracted with {req.steps_in_flight} steps in flight"
        self.tally.retracted += 1
        if req in decodes:
            decodes.remove(req)
            self.queues.running.remove(req)
            if self.swapping.swap_out(req):
                return
        else:
            self.queues.chunked = None
        self.endings.release(req, checkpoint=True)
        self.queues.waiting.return_to_head(req)

    def _fail(self, req: Request, why: str) -> None:
        error = OutOfPagesError(f"request {req.rid} ended early: {why}")
        self.endings.finish(req, error_finish(error))

    def _take_pages(self, decodes: Sequence[Request]) -> None:
        for req in short_of_page(self.memory, decodes):
            granted = self.memory.ensure(req.held_kv, req.launched_len + 1)
            assert granted, f"no page for token {req.launched_len} of {req.rid} after the check passed"
        if decodes:
            self.decode_steps += 1

    @property
    def force_is_due(self) -> bool:
        """Whether the next decode step retracts a request, short of pages or not."""
        every = self.config.force_retract_every
        return every > 0 and self.decode_steps >= every


Ask: TypeAlias = Callable[[Request], Admission]
"""Whether a waiting request would be admitted now. Changes nothing."""

CURABLE = frozenset({Admission.NO_SEAT, Admission.NO_ROW, Admission.NO_PAGES, Admission.WATERMARK})
"""What a request that is put back gives."""


@dataclass(kw_only=True, slots=True)
class Preemption:
    """Before each plan under the policy `priority`."""

    config: SchedulerConfig
    memory: KvMemory
    queues: Queues
    policy: ByPriority
    retraction: Retraction
    ratio: NewTokenRatio

    def make_way(self, ask: Ask, *, in_flight: bool) -> Room:
        """Put back requests that the head of the queue outranks, if it then fits."""
        head = next(self.policy.order(self.queues), None)
        victims = [] if head is None else self.policy.outranked(head, self._candidates())
        if head is None or not victims:
            return Room.READY
        victims = self._useful(victims, ask(head))
        if not victims or not self._enough(head, victims):
            return Room.READY
        if in_flight:
            return Room.SETTLE_FIRST
        for victim in victims:
            self.retraction.preempt(victim)
            if ask(head).ok:
                break
        return Room.READY

    def _candidates(self) -> list[Request]:
        """Requests that may be put back; pages that are being sent must not change [settled-only-sent]."""
        holders = [*self.queues.running]
        if self.queues.chunked is not None and not sends_kv(self.queues.chunked):
            holders.append(self.queues.chunked)
        return [req for req in holders if req.to_finish is None and req.retractions < self.config.max_retractions]

    def _useful(self, victims: Sequence[Request], answer: Admission) -> list[Request]:
        """Those of `victims` that can change `answer`."""
        if answer is Admission.CHUNK_IN_PROGRESS:
            return [req for req in victims if req is self.queues.chunked]
        return [*victims] if answer in CURABLE else []

    def _enough(self, head: Request, victims: Sequence[Request]) -> bool:
        """Whether `head` could fit without `victims`. Pages that they share with others count as theirs."""
        ratio = self.ratio.value
        staying = [req for req in self.queues.running if req not in victims]
        spare = self.memory.available_pages() - reserved_pages(self.memory, staying, ratio)
        given = sum(len(req.held_kv.pages) for req in victims)
        tokens = head.token_ids(0, head.seq_len)
        cached = self.memory.cached_len(tokens, space=head.space, max_match=head.longest_match)
        needed = expected_pages(self.memory, head, len(tokens), ratio) - self.memory.pages_for(cached)
        return needed <= spare + given
