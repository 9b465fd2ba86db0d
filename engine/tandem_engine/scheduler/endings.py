"""How requests leave: the single release path [single-release].

wish     `to_finish` is set: abort, deadline. Nothing is torn down.
fact     `finish`: the wish, or a stop condition, at a moment when the newest result is in
release  row, pages and lock go back; pages that a step in flight may write to wait for it [page-fence]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tandem_engine.errors import EngineError, InvalidRequestError
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.scheduler.ended_log import EndedLog
from tandem_engine.scheduler.penalty_slots import PenaltySlots
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.sessions import Sessions
from tandem_engine.scheduler.steps import Steps
from tandem_engine.scheduler.stream import OutputStream
from tandem_engine.scheduler.tally import Tally

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
    """Finishes and releases requests, whoever asks for it."""

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
        """Make the end of `req` a fact: release its memory, tell the client, tell stages of a failure.

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
        """Answer a request that was never admitted. Stages hear of it, to tell the other worker [abort-both-ways]."""
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
