"""Room for a waiting request that matters more, made by putting back running ones that matter less.

    1. the head of the queue cannot be admitted for want of a seat, a row, pages, or a turn for its chunks
    2. the policy says which running requests it outranks
    3. those that are outranked have enough to give, or nobody is disturbed
    4. no step is in flight, or the loop settles first [settle-before-retract]
    5. one after the other is put back, the most expendable first, until the head fits

A request that is put back waits under the policy as any other, whatever the cap on the queue [retraction-bounded], and
its computed pages stay in the prefix cache while there is room. It is put back no more than `max_retractions` times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tandem_engine.config import SchedulerConfig
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.new_token_ratio import NewTokenRatio
from tandem_engine.scheduler.policy.priority import ByPriority
from tandem_engine.scheduler.prefill_adder import Admission, expected_pages, reserved_pages
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv
from tandem_engine.scheduler.retraction import Retraction, Room

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
        """Put back whom the head of the queue outranks, if that gets it in."""
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
        """Who may be put back; pages that are being sent must stay what they are [settled-only-sent]."""
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
        cached = self.memory.cached_len(tokens, salt=head.cache_salt, max_match=head.longest_match)
        needed = expected_pages(self.memory, head, len(tokens), ratio) - self.memory.pages_for(cached)
        return needed <= spare + given
