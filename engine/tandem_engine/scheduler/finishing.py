"""How requests leave the engine: the single release path [single-release], and what it keeps count of.

finish     `to_finish` is set: abort, deadline. Nothing is released yet
fact     `finish` applies the pending finish, or a stop condition, once the newest result is in
release  row, pages and lock are released; pages that a step in flight may write to wait for it [page-fence]

Steps          step numbers, from 1 in launch order. Steps complete in that order, at most one behind in overlap
               mode. Releasing memory takes `newest_in_flight`: the step that it must wait for [page-fence]
EndedLog       finished requests with a sampled trace, at most `MAX_KEPT`, until the process takes them once per
               iteration. It affects no plan, so only a rank that exports spans sets `wanted`
PenaltySlots   rows of the device's tables of token counts. A penalized request has one from its first sampled token
               on a row until it releases that row. The lowest free number is taken, so the tables are as large as
               the most penalized requests that ran at once (`sampling.logits_processor`). They need no fence: the
               next owner loads its slot in a later step, after everything that steps in flight do to it
Deadlines      requests by the time at which they must end. The entry of a finished request stays until `overdue`
               reaches it, and must not keep its prompt in memory
"""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias
from weakref import ref

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import EngineError, InvalidRequestError
from tandem_engine.base.recording import recording
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.stats import EndedRequest
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.output_stream import OutputStream
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.sessions import Sessions

MAX_KEPT = 4096


@dataclass(kw_only=True, slots=True)
class EndedLog:
    """Owned by the scheduler; its process empties it."""

    clock: Clock
    """The one that requests are timed by."""
    unix_ns: Callable[[], int] = time.time_ns
    wanted: bool = False
    lost: int = 0
    """Since start: entries dropped before they were taken."""
    _ended: list[EndedRequest] = field(default_factory=list)

    @recording
    def note(self, req: Request, finish: Finish | None) -> None:
        """`req` is over here; `finish` is None when it continues elsewhere or is no longer wanted. Counts once."""
        context = req.trace
        if not self.wanted or context is None or not context.sampled or req.reported:
            return
        req.reported = True
        if len(self._ended) >= MAX_KEPT:
            self.lost += 1
            return
        self._ended.append(self._described(req, finish))

    def take(self) -> list[EndedRequest]:
        """Those noted since the last call."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return ended

    def _described(self, req: Request, finish: Finish | None) -> EndedRequest:
        assert req.trace is not None, f"{req.rid} is not traced"
        now = self.clock.now()
        unix_ns = self.unix_ns()

        def moment(at: float) -> int:
            return unix_ns - round((now - at) * 1e9)

        def perhaps(at: float | None) -> int | None:
            return None if at is None else moment(at)

        known = req.first_scheduled_at is not None or req.transfer is not None
        return EndedRequest(
            rid=req.rid,
            context=req.trace,
            arrived_ns=moment(req.arrived_at),
            ended_ns=unix_ns,
            scheduled_ns=perhaps(req.first_scheduled_at),
            first_token_ns=perhaps(req.first_token_at),
            transferred_ns=perhaps(req.transferred_at),
            side=None if req.handoff is None else req.handoff.side,
            moving=req.handoff is not None and req.handoff.moving,
            transfer=req.transfer,
            fetch=req.fetched,
            prompt_tokens=req.prompt_len,
            cached_tokens=req.cached_tokens if known else None,
            cache_hits=req.cache_hits if known else None,
            resumed_tokens=req.resumed,
            output_tokens=len(req.output_ids) - req.resumed,
            retractions=req.retractions,
            max_tokens=req.sampling.max_tokens,
            temperature=req.sampling.temperature,
            top_p=req.sampling.top_p,
            finish=None if finish is None else finish.reason,
            error="" if finish is None or finish.code is None else finish.code,
        )


@dataclass(kw_only=True, slots=True)
class PenaltySlots:
    """Scheduler thread only."""

    used: int = 0
    """Numbers given out so far: the size that the tables must have."""
    free: list[int] = field(default_factory=list)

    def of(self, req: Request) -> int:
        """The slot of `req`, given out now if it has none."""
        if req.penalty_slot is None:
            req.penalty_slot = heapq.heappop(self.free) if self.free else self._another()
        return req.penalty_slot

    def give_back(self, req: Request) -> None:
        """No-op for a request without a slot."""
        if req.penalty_slot is not None:
            heapq.heappush(self.free, req.penalty_slot)
            req.penalty_slot = None

    def _another(self) -> int:
        self.used += 1
        return self.used - 1


@dataclass(kw_only=True, slots=True)
class Steps:
    """Counts of the one scheduler."""

    launched: int = 0
    settled: int = 0

    def launch(self) -> int:
        """The number of the step that is launched now."""
        self.launched += 1
        return self.launched

    def settle(self, step: int) -> None:
        """`step` is over, for good or ill."""
        assert step == self.settled + 1, f"step {step} settled after step {self.settled}"
        self.settled = step

    @property
    def newest_in_flight(self) -> int | None:
        """The newest step that has not settled, None when there is none."""
        return self.launched if self.launched > self.settled else None


OnRelease: TypeAlias = Callable[[RequestKv, Sequence[int]], None]
"""Called with KV that is about to be given back and the tokens it holds: drop what is kept by row
[row-state-forgotten]."""


def error_finish(error: EngineError) -> Finish:
    """The end that `error` means to a client. Only a request at fault is not worth another attempt."""
    at_fault = isinstance(error, InvalidRequestError)
    return Finish(
        reason=FinishReason.ERROR,
        error=str(error),
        code=error.code,
        param=error.param if isinstance(error, InvalidRequestError) else None,
        retryable=not at_fault,
    )


@dataclass(kw_only=True, slots=True)
class Endings:
    """Finishes and releases requests, for every caller."""

    memory: KvMemory
    queues: Queues
    stream: OutputStream
    steps: Steps
    slots: PenaltySlots
    sessions: Sessions
    tally: Tally
    ended: EndedLog
    on_release: tuple[OnRelease, ...] = ()

    def finish(self, req: Request, finish: Finish, *, checkpoint: bool = True, first: bool = False) -> None:
        """Finish `req`: release its memory, notify the client, and the stages of a failure.

        `checkpoint` leaves its settled pages in the prefix cache. `first` as in `OutputStream.send`.
        """
        assert req.finished is None, f"request {req.rid} finished twice: {req.finished} and {finish}"
        req.finished = finish
        if req.kv is None:
            self.queues.leave_line(req)
        self.release(req, checkpoint=checkpoint)
        self.queues.forget(req)
        self.queues.leave_group(req)
        self.sessions.end_turn(req, finish)
        self.stream.send(req, finish=finish, first=first)
        self.tally.count_end(finish)
        self.ended.note(req, finish)
        if finish.reason in {FinishReason.ABORT, FinishReason.ERROR}:
            for stage in self.queues.stages:
                stage.aborted(req)

    def refuse(self, req: Request, error: EngineError) -> None:
        """Answer a request that was never admitted. Stages notify the other worker [abort-both-ways]."""
        req.finished = error_finish(error)
        self.stream.send(req, finish=req.finished)
        self.tally.refused += 1
        self.ended.note(req, req.finished)
        for stage in self.queues.stages:
            stage.aborted(req)

    def release(self, req: Request, *, checkpoint: bool) -> None:
        """Give back row and pages, on the device and in host memory, and the penalty slot, as far as it has any."""
        self.slots.give_back(req)
        if req.swapped is not None:
            assert self.memory.host is not None, f"request {req.rid} is swapped to no host memory"
            swapped, req.swapped = req.swapped, None
            self.memory.host.swap.drop(swapped)
        if req.kv is None:
            return
        kv, req.kv = req.kv, None
        req.launched_len = 0
        settled = req.token_ids(0, kv.committed_len)
        for forget in self.on_release:
            forget(kv, settled)
        self.memory.release(kv, settled, checkpoint=checkpoint, after_step=self.steps.newest_in_flight)


class Deadlines:
    """O(log n) per request with a deadline, O(1) per step."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ref[Request]]] = []
        self._order = count()

    def watch(self, req: Request) -> None:
        """Remember the deadline of `req`, if it has one."""
        if req.deadline is not None:
            heapq.heappush(self._heap, (req.deadline, next(self._order), ref(req)))

    def overdue(self, now: float) -> Iterator[Request]:
        """Take out and yield the live requests whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            req = heapq.heappop(self._heap)[2]()
            if req is not None and req.finished is None:
                yield req
