"""Retracted requests whose KV goes to host memory and comes back, instead of being computed again.

Life of a swapped request
    1. retracted   swapping is predicted to be cheaper, and host memory has room
    2. swapped     at the head of its line: the newest gives way first, so the oldest stands first
    3. back        before anybody who waits is admitted, and only while all who run can go on: never in a step
                   that takes pages from somebody. It decodes in the step that is being planned
       waiting     if the cache has lost a prefix that it shared when it was swapped: computed again

    swap        (pages to move) / (measured pages/s out)  +  the same / (measured pages/s back)
    recompute   (tokens of those pages) / (measured prefill tokens/s)

Pages that other requests have locked are expected to stay in the prefix cache and count for neither. Until a
copy has been measured a request is swapped, which measures; until a prefill has been, it is recomputed.
Output is the same either way.
"""

from dataclasses import dataclass
from enum import Enum

from tandem_engine.config import PreemptionMode, SchedulerConfig
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copy import CopyKind
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.scheduler.endings import Endings
from tandem_engine.scheduler.prefill_adder import expected_pages
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.tally import Tally


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
        assert kv.lock is not None, f"request {req.rid} holds no lock"
        shared = self.memory.cache.shared_pages(kv.lock)
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

        `reserved`: pages promised to those who run; None when nobody does, and it may have all there is.
        `ratio`: share of its remaining output that a request is expected to need.
        """
        assert self.memory.host is not None, "requests are swapped and there is no host memory"
        swap, req = self.memory.host.swap, self.queues.swapped[0]
        swapped = req.swapped
        assert swapped is not None, f"request {req.rid} stands among the swapped and has no KV there"
        tokens = req.token_ids(0, req.seq_len)
        kv = self.memory.begin(tokens, salt=req.cache_salt, max_match=swapped.committed_len)
        if kv is None:
            return Return.LATER
        complete = swap.completes(swapped, kv)
        if not complete or not self._fits(req, kv, reserved, ratio):
            self.memory.release(kv, (), checkpoint=False, after_step=None)
            return Return.LATER if complete else self._recompute(req)
        self.memory.load_back(kv, tokens)
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
