"""One attempt of one choice: the same request on one decode worker, or on a prefill and a decode worker.

    prefill ── token 0 ──────────────▶ ┐
    decode  ── token 0 again, 1, 2, … ▶ ┴─ TokenSequence ─▶ next() ─▶ the choice

The readers of the connections accept outputs at once and keep them until the choice takes them. A slow client therefore
delays no other request, and outputs that have accumulated leave in one piece.

An ordinary output, of tokens alone, that comes while the choice waits goes to its `TokenSink` instead, on the reader's
call stack: no task is woken for it. Those of one choice that the reader finds together go there together (`pour`). Both
ways lead through the same objects, so that the choice may change between them after each output.

An attempt finishes, or fails with `AttemptFailedError` when another worker may succeed. A failure of the prefill worker
counts only until the decode worker has sent its first output.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from tandem_engine.base.errors import SessionError, SessionLostError
from tandem_engine.messages.outputs import Finish, FinishReason, TokenOutput
from tandem_engine.messages.requests import GenerateRequest
from tandem_services.common.errors import bad_request, conflict, timed_out
from tandem_services.gateway.dispatch.engine_client import EngineConnection, Pouring
from tandem_services.gateway.dispatch.sessions import PARAM, session_lost
from tandem_services.gateway.observe.explain import ChoiceRecord
from tandem_services.gateway.output.token_sequence import Accepted, SequenceGapError, TokenSequence
from tandem_services.router.decision import WorkerView

GAP_TIMEOUT_S = 2.0
"""The first token may come this much later on one connection than later ones on the other."""

DEADLINE_EXCEEDED = "deadline_exceeded"
"""The engine's code for a request that it aborted in time, not in error."""


class FailureCause(StrEnum):
    WORKER_LOST = "worker_lost"
    """With the request in hand."""
    UNREACHABLE = "unreachable"
    """Lost before it took the request in."""
    WORKER_ERROR = "worker_error"
    OVERLOADED = "overloaded"
    OUTPUT_LOST = "output_lost"
    SILENCE = "silence"
    """This worker and those before it sent nothing for too long."""


class AttemptFailedError(Exception):
    """This attempt is over. When `retryable`, another one can continue after the tokens received so far."""

    def __init__(
        self,
        cause: FailureCause,
        incarnation: str,
        *,
        code: str | None = None,
        retryable: bool = True,
        by_abort: bool = False,
    ) -> None:
        super().__init__(f"{cause.value} on {incarnation}")
        self.cause = cause
        self.incarnation = incarnation
        """The worker that reported the failure, or is it."""
        self.code = code
        """The engine's own code, when it gave one."""
        self.retryable = retryable
        self.by_abort = by_abort
        """The worker ended it in order, because it leaves."""


class TokenSink(Protocol):
    """Takes outputs of a choice that waits for them. Belongs to its task; must not block."""

    @property
    def is_ready(self) -> Callable[[], bool]:
        """Whether `take` can pass tokens on now."""
        ...

    def take(self, token_ids: list[int], at: float) -> bool:
        """New tokens, the last of which came at `at`, on the gateway's clock. False when the choice has to look at what
        has become of them. What it raises is raised there."""
        ...


@dataclass(eq=False, slots=True)
class Side:
    """One of the attempt's workers; the listener of its connection."""

    attempt: "Attempt"
    connection: EngineConnection
    is_prefill: bool
    taken: bool = False
    """The worker is known to have the request in hand."""
    spoke: bool = False
    ended: bool = False

    def on_taken(self) -> None:
        self.taken = True

    def on_output(self, output: TokenOutput) -> Pouring | None:
        return self.attempt.arrived(self, output)

    def on_lost(self) -> None:
        self.attempt.arrived(self, None)


@dataclass(eq=False, slots=True, kw_only=True)
class EndlessSide(Side):
    """The prefill worker of a session's first turn, which ends no output (`with_handoff`).

    A token that may end it is taken from the decode worker alone, with the end: no client sees its text, and no attempt
    resumes after it.
    """

    withheld: Callable[[Sequence[int]], bool]
    """Whether tokens are left to the decode worker."""

    def on_output(self, output: TokenOutput) -> Pouring | None:
        if self.withheld(output.token_ids):
            output = msgspec.structs.replace(output, token_ids=(), logprobs=None)
        return self.attempt.arrived(self, output)


class Attempt:
    """Single consumer: only the task of the choice calls `next` and `close`."""

    __slots__ = ("_arrivals", "_kept", "_record", "_rid", "_sequence", "_sides", "_sink", "_wake", "began", "leaving")

    def __init__(
        self, rid: str, start: int, record: ChoiceRecord, *, began: float, awaits_prompt: bool = False
    ) -> None:
        self.began = began
        """On the gateway's clock."""
        self.leaving: WorkerView | None = None
        """The worker that generates, once it has requested a migration."""
        self._rid = rid
        self._record = record
        self._sequence = TokenSequence(start, awaits_prompt=awaits_prompt)
        self._sides: list[Side] = []
        self._arrivals: deque[tuple[Side, TokenOutput | None]] = deque()
        self._wake: asyncio.Future[bool] | None = None
        """Done with True: a sink has taken tokens that the choice has to look at."""
        self._sink: TokenSink | None = None
        """While the choice waits."""
        self._kept: list[int] = []
        """Tokens for it that have come together so far; empty whenever other code than the reader runs."""

    def submit(
        self,
        connection: EngineConnection,
        request: GenerateRequest,
        *,
        is_prefill: bool,
        withheld: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        """Send `request` to one worker. Raises `AttemptFailedError` when it cannot be sent.

        Args:
            withheld: which tokens of this worker do not count, as another one sends them with the end of the output.
        """
        side = (
            Side(self, connection, is_prefill)
            if withheld is None
            else EndlessSide(self, connection, is_prefill, withheld=withheld)
        )
        if not connection.submit(request, side):
            raise AttemptFailedError(FailureCause.UNREACHABLE, connection.worker.incarnation)
        self._sides.append(side)

    def arrived(self, side: Side, output: TokenOutput | None) -> "Attempt | None":
        """Called by a connection's reader; None means that the worker is lost. Returns itself for a later `pour`."""
        # Once per token: what follows is spelled out, since each function of its own would cost as much again.
        sink, wake = self._sink, self._wake
        if output is not None and sink is not None and wake is not None and not wake.done():
            try:
                # The choice waits for nothing but the next tokens, and these are they. They then count as accepted.
                if (
                    output.token_ids
                    and output.finish is None
                    and output.logprobs is None
                    and output.cached_tokens is None
                    and output.prefill_s is None
                    and output.transfer is None
                    and output.prompt_logprobs is None
                    and output.embedding is None
                    and not output.leaving
                    and sink.is_ready()
                    and self._sequence.accept_next(output)
                ):
                    side.spoke = True
                    first = not self._kept
                    self._kept += output.token_ids
                    return self if first else None
            except Exception as error:  # noqa: BLE001  # raised where the choice waits
                wake.set_exception(error)
        self.pour(side.connection.received_at)
        self._arrivals.append((side, output))
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(False)
        return None

    def pour(self, at: float) -> None:
        """Into the sink, what was kept for it."""
        if not self._kept:
            return
        wake, sink = self._wake, self._sink
        assert wake is not None, "only a choice that waits has a sink"
        assert sink is not None, "tokens are kept for one"
        tokens, self._kept = self._kept, []
        if wake.done():
            # A later output has failed, and so does the choice.
            return
        try:
            if not sink.take(tokens, at):
                wake.set_result(True)
        except Exception as error:  # noqa: BLE001  # raised where the choice waits
            wake.set_exception(error)

    async def next(self, sink: TokenSink | None = None) -> Accepted:
        """At least one new token, or the finish. Raises `AttemptFailedError`, or `ApiError` for the client.

        With a `sink`, outputs that come before may go there; without new tokens, it has taken some that need a look.
        """
        while True:
            while not self._arrivals:
                if await self._arrival(sink):
                    return Accepted([], [], None)
            accepted = self._take()
            if accepted.token_ids or accepted.finish is not None:
                return accepted

    @property
    def quiet_since(self) -> float:
        """Since when a relevant worker has sent nothing, not even a pong; the start of the attempt at the earliest."""
        times = (side.connection.received_at for side in self._sides if not side.ended and not self._superseded(side))
        return max(self.began, min(times, default=self.began))

    def gone_silent(self) -> AttemptFailedError:
        """The failure of an attempt whose workers say nothing. There is no time left for another one."""
        incarnation = self._sides[0].connection.worker.incarnation
        return AttemptFailedError(FailureCause.SILENCE, incarnation, retryable=False)

    def close(self) -> None:
        """Stop whatever is still running, on both workers. Idempotent."""
        for side in self._sides:
            side.connection.forget(self._rid, abort=not side.ended and not self._superseded(side))
        self._sides.clear()

    async def _arrival(self, sink: TokenSink | None) -> bool:
        """Until something has arrived, or else the choice has to look at what `sink` has taken: True. Raises
        `AttemptFailedError` for outputs that stay missing."""
        self._wake = asyncio.get_running_loop().create_future()
        if self._sequence.has_gap:
            return await self._within_gap(self._wake)
        # A request to leave is answered by the dispatcher, after the next tokens.
        self._sink = sink if self.leaving is None else None
        try:
            return await self._wake
        finally:
            self._sink = None

    async def _within_gap(self, wake: "asyncio.Future[bool]") -> bool:
        try:
            async with asyncio.timeout(GAP_TIMEOUT_S):
                return await wake
        except TimeoutError as error:
            raise self._output_lost() from error

    def _take(self) -> Accepted:
        """All that has arrived, up to a finish or a failure. What came before a failure is not lost."""
        accepted = Accepted([], [], None)
        while self._arrivals and accepted.finish is None:
            side, output = self._arrivals[0]
            failure = _failure(output, side)
            if failure is not None and accepted.token_ids:
                break
            self._arrivals.popleft()
            if failure is None:
                assert output is not None, "a lost worker is a failure"
                accepted = self._accept(side, output, accepted)
            elif not self._superseded(side):
                raise failure
        return accepted

    def _accept(self, side: Side, output: TokenOutput, accepted: Accepted) -> Accepted:
        side.spoke = True
        side.ended = output.finish is not None
        if output.leaving:
            self.leaving = side.connection.worker
            return accepted
        if output.transfer is not None or output.prefill_s is not None or output.cached_tokens is not None:
            self._record.note_output(output)
        try:
            return self._sequence.accept(output, accepted)
        except SequenceGapError as error:
            raise self._output_lost() from error

    def _superseded(self, side: Side) -> bool:
        """The decode worker has spoken, and nothing is missing: the prefill worker's part is over."""
        if self._sequence.awaits_prompt:
            return False
        return side.is_prefill and any(other.spoke for other in self._sides if not other.is_prefill)

    def _output_lost(self) -> AttemptFailedError:
        return AttemptFailedError(FailureCause.OUTPUT_LOST, self._sides[-1].connection.worker.incarnation)


def _failure(output: TokenOutput | None, side: Side) -> Exception | None:
    """What an arrival means for the choice when it is not tokens: the worker is lost, or gives up."""
    if output is None:
        cause = FailureCause.WORKER_LOST if side.taken or side.spoke else FailureCause.UNREACHABLE
        return AttemptFailedError(cause, side.connection.worker.incarnation)
    if output.finish is None or output.finish.reason not in (FinishReason.ERROR, FinishReason.ABORT):
        return None
    return _finish_failure(output.finish, side.connection.worker.incarnation)


def _finish_failure(finish: Finish, incarnation: str) -> Exception:
    if finish.code == DEADLINE_EXCEEDED:
        return timed_out("The request did not finish before its deadline.")
    if finish.reason is FinishReason.ABORT:
        # An attempt that the gateway aborted itself has no listener: this worker is shutting down.
        return AttemptFailedError(FailureCause.WORKER_ERROR, incarnation, code=finish.code, by_abort=True)
    if finish.code == "invalid_request":
        return bad_request(finish.error or "The model worker refused the request.", finish.param)
    if finish.code == SessionLostError.code:
        return session_lost()
    if finish.code == SessionError.code:
        return conflict(finish.error or "The session cannot take this turn.", PARAM, reason=finish.code)
    cause = FailureCause.OVERLOADED if finish.code == "queue_full" else FailureCause.WORKER_ERROR
    return AttemptFailedError(cause, incarnation, code=finish.code, retryable=finish.retryable)
