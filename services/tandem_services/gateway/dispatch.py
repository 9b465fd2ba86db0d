"""The life of one choice: from a prompt to its last token, over as many workers as it takes.

    1. choose    the router names a decode worker and perhaps a prefill worker, and reserves the load
    2. send      to both at once, same room; ids carry the attempt, so late answers are recognised
    3. receive   tokens in order, each once (`Attempt`, `TokenSequence`)
    4. retry     on a lost worker or a retryable error: the attempt is aborted everywhere, the worker is
                 excluded, and the tokens received so far are sent along as `resume_ids`. Sampling noise is a
                 function of (seed, position), so the text goes on as if nothing had happened (B2.1)
    5. move      a worker that is to stop, or to do other work, asks for its request to go on elsewhere: as above, but
                 it sends its KV to whoever takes over. With no place to go to, it goes on where it is
    6. give up   after `max_attempts`, or when workers that say nothing at all have used up `silence_s`
    7. release   the reservation, on every path

Whatever ends the iteration, a client that leaves included, runs the `finally` that aborts the attempt.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from tandem_engine.clock import Clock
from tandem_engine.errors import DrainingError, PausedError, TransferError, WireError
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.pooling import PoolingParams
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, Peer
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError, internal_error, unavailable
from tandem_services.gateway.attempt import Attempt, AttemptFailedError, FailureCause
from tandem_services.gateway.engine_client import EngineConnection, EnginePool
from tandem_services.gateway.explain import ChoiceRecord
from tandem_services.gateway.metrics import GatewayMetrics
from tandem_services.gateway.session_turns import SessionTurn, session_lost
from tandem_services.gateway.shared_route import SharedRoute
from tandem_services.gateway.token_sequence import Accepted
from tandem_services.router.choice import Choice, NoWorkersError, Placement, RouteQuery, WorkerView

logger = logging.getLogger(__name__)

MOVED = "moved"
"""Outcome of an attempt that another worker continues with its KV."""


class PairChooser(Protocol):
    """What the gateway needs of the router."""

    async def choose(self, query: RouteQuery) -> Choice:
        """Reserve and return the best workers. Raises `NoWorkersError` when nobody can take it now."""
        ...

    async def stay(self, query: RouteQuery, incarnation: str) -> Choice:
        """Reserve and return this worker alone. Raises `NoWorkersError` when it is gone."""
        ...

    async def relocate(self, query: RouteQuery, leaving: WorkerView) -> Choice:
        """Reserve and return who takes over from `leaving`, which is the choice's prefill worker.

        Raises `NoWorkersError` when nobody has room.
        """
        ...

    async def release(self, choice: Choice) -> None:
        """Give the reservation back. Called exactly once per choice."""
        ...

    def workers(self) -> tuple[WorkerView, ...]:
        """All live workers, from memory."""
        ...

    def mark_dead(self, incarnation: str) -> None:
        """The connection to this worker was lost: do not choose it for a while, whatever the registry says."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long a choice fights for its life."""

    max_attempts: int = 3
    recovery_s: float = 8.0
    """After a failure, wait this long for a worker to appear before giving up."""
    silence_s: float = 10.0
    """Workers that say nothing at all, one after the other, have this long together (RELIABILITY B2.6)."""
    poll_s: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceRequest:
    """One choice of one client request, ready to be sent."""

    request_id: str
    index: int
    model: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    priority: int
    pooling: PoolingParams | None = None
    """An embedding is wanted instead of text; `sampling` then allows one token."""
    group: str = ""
    """Name that all choices of the prompt share, "" when there is one."""
    route: SharedRoute | None = None
    """Where their first attempts go."""
    turn: SessionTurn | None = None
    """The session that it continues."""
    deadline: float
    """Monotonic time of the gateway's clock."""


@dataclass(kw_only=True, slots=True)
class Dispatcher:
    """Runs choices. One per gateway."""

    chooser: PairChooser
    engines: EnginePool
    clock: Clock
    policy: RetryPolicy
    metrics: GatewayMetrics
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, request: ChoiceRequest, record: ChoiceRecord) -> AsyncGenerator[Accepted, None]:
        """New tokens as they come; the last piece carries the finish. Close the generator to abort.

        Raises `ApiError` when no attempt succeeded.
        """
        progress = _Progress()
        while len(progress.received) < request.sampling.max_tokens:
            place, progress.place = progress.place, None
            choice = place or await self._choose(request, progress)
            workers = choice if request.pooling is None else _one_worker(choice)
            note = record.begin_attempt(workers, resumed_tokens=len(progress.received))
            attempt = Attempt(
                _attempt_id(request, progress),
                len(progress.received),
                record,
                began=self.clock.now(),
                awaits_prompt=request.sampling.prompt_logprobs is not None and not progress.scored,
            )
            try:
                if request.turn is not None:
                    await request.turn.bind(workers.decode.incarnation)
                self._send(attempt, request, workers, progress, moving=place is not None)
                while True:
                    accepted = await self._next(attempt, progress)
                    progress.received += accepted.token_ids
                    progress.scored = progress.scored or accepted.prompt_logprobs is not None
                    if accepted.finish is not None:
                        note.outcome = "finished"
                    yield accepted
                    if accepted.finish is not None:
                        return
                    if await self._finds_place(attempt, request, progress):
                        note.outcome = MOVED
                        break
            except AttemptFailedError as failure:
                note.outcome = failure.cause.value
                if failure.cause is FailureCause.WORKER_LOST:
                    progress.note_silence(attempt.quiet_since)
                self._note_failure(request, workers, progress, failure)
            except ApiError:
                note.outcome = "refused"
                raise
            finally:
                attempt.close()
                if note.outcome == "running":
                    note.outcome = "stopped"
                self.metrics.attempts.labels(outcome=note.outcome).inc()
                if request.route is None or request.route.let_go(choice):
                    self._in_background(self.chooser.release(choice))
        # The worker died between its last token and its finish.
        yield Accepted([], [], Finish(reason=FinishReason.LENGTH))

    async def _next(self, attempt: Attempt, progress: "_Progress") -> Accepted:
        """What `attempt` gives next. After lost workers, one that says nothing has only what they left of the time."""
        if progress.silent_since is None:
            return await attempt.next()
        left = progress.silent_since + self.policy.silence_s - self.clock.now()
        try:
            async with asyncio.timeout(left):
                accepted = await attempt.next()
        except TimeoutError as error:
            if attempt.quiet_since == attempt.began:
                raise attempt.gone_silent() from error
            progress.silent_since = None
            return await attempt.next()
        progress.silent_since = None
        return accepted

    async def _finds_place(self, attempt: Attempt, request: ChoiceRequest, progress: "_Progress") -> bool:
        """Whether the worker of `attempt` has asked to be left and another one has room: then the next attempt is its.

        Without room the request stays where it is, until it is asked again.
        """
        leaving, attempt.leaving = attempt.leaving, None
        if leaving is None or len(progress.received) >= request.sampling.max_tokens:
            return False
        try:
            place = await self.chooser.relocate(_query(request, progress), leaving)
        except NoWorkersError:
            return False
        progress.move_to(place, leaving)
        fields = {
            "request_id": request.request_id,
            "choice": request.index,
            "worker": leaving.incarnation,
            "to": place.decode.incarnation,
        }
        logger.info("moving", extra={"fields": fields})
        return True

    async def settle(self) -> None:
        """Wait for releases under way. Call at shutdown."""
        await asyncio.gather(*self._background, return_exceptions=True)

    def _send(
        self, attempt: Attempt, request: ChoiceRequest, choice: Choice, progress: "_Progress", *, moving: bool
    ) -> None:
        decode, prefill = choice.decode, choice.prefill
        alone = GenerateRequest(
            rid=_attempt_id(request, progress),
            input_ids=request.input_ids,
            sampling=request.sampling.without_prompt_logprobs() if progress.scored else request.sampling,
            resume_ids=tuple(progress.received),
            cache_salt=request.cache_salt,
            priority=request.priority,
            group=request.group,
            pooling=request.pooling,
            session=None if request.turn is None else request.turn.ref,
            deadline_s=max(request.deadline - self.clock.now(), 0.0),
        )
        if prefill is None:
            attempt.submit(self._connect(decode), alone, is_prefill=False)
            return
        receive = _with_handoff(alone, HandoffSide.RECEIVE, progress.number, peer=prefill)
        send = _with_handoff(alone, HandoffSide.SEND, progress.number, peer=decode, moving=moving)
        attempt.submit(self._connect(decode), receive, is_prefill=False)
        attempt.submit(self._connect(prefill), send, is_prefill=True)

    def _connect(self, worker: WorkerView) -> EngineConnection:
        try:
            return self.engines.connect(worker)
        except WireError as error:
            self.chooser.mark_dead(worker.incarnation)
            raise AttemptFailedError(FailureCause.WORKER_LOST, worker.incarnation) from error

    async def _choose(self, request: ChoiceRequest, progress: "_Progress") -> Choice:
        give_up_at = self.clock.now() + self.policy.recovery_s
        if progress.silent_since is not None:
            give_up_at = min(give_up_at, progress.silent_since + self.policy.silence_s)
        while True:
            try:
                return await self._choose_once(request, progress)
            except NoWorkersError as error:
                # A new request may be refused at once; one that has begun deserves some patience.
                if progress.attempts == 0 or self.clock.now() >= give_up_at:
                    raise unavailable(
                        "No worker can take the request now. Try again later.", retry_after=error.retry_after
                    ) from error
            await asyncio.sleep(self.policy.poll_s)

    async def _keeper(self, query: RouteQuery, incarnation: str) -> Choice:
        """Of a session that is continued: nobody else can."""
        try:
            return await self.chooser.stay(query, incarnation)
        except NoWorkersError as error:
            raise session_lost() from error

    async def _choose_once(self, request: ChoiceRequest, progress: "_Progress") -> Choice:
        query = _query(request, progress)
        if request.turn is not None and request.turn.keeper is not None:
            return await self._keeper(query, request.turn.keeper)
        try:
            if request.route is not None and progress.attempts == 0:
                return await request.route.choose(query)
            return await self.chooser.choose(query)
        except NoWorkersError:
            if not progress.failed:
                raise
        # A live worker that has failed this request once is better than none; the dead stay excluded.
        return await self.chooser.choose(replace(query, exclude=frozenset()))

    def _note_failure(
        self, request: ChoiceRequest, choice: Choice, progress: "_Progress", failure: AttemptFailedError
    ) -> None:
        """Decide whether there is another attempt; raises `ApiError` when there is none."""
        progress.attempts += 1
        progress.number += 1
        progress.failed.add(_at_fault(choice, failure))
        fields = {
            "request_id": request.request_id,
            "choice": request.index,
            "attempt": progress.attempts,
            "cause": failure.cause.value,
            "worker": failure.incarnation,
            "code": failure.code,
        }
        logger.warning("attempt failed", extra={"fields": fields})
        if request.turn is not None and not request.turn.begins:
            raise _turn_failed(failure) from failure
        if not failure.retryable or progress.attempts >= self.policy.max_attempts:
            raise _gave_up(failure) from failure

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        # The client's last chunk must not wait for the registry.
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


@dataclass(kw_only=True, slots=True)
class _Progress:
    """What one choice has achieved so far, over all its attempts."""

    received: list[int] = field(default_factory=list)
    scored: bool = False
    """The logprobs of the prompt are here: they must not be computed, nor sent, again."""
    attempts: int = 0
    """Attempts that have failed."""
    number: int = 0
    """Of the current attempt: those before it have failed or moved."""
    place: Choice | None = None
    """Where the next attempt goes, with the KV of the one before."""
    failed: set[str] = field(default_factory=set)
    """Incarnations to avoid."""
    silent_since: float | None = None
    """Since when lost workers have kept the choice waiting; None while none has."""

    def move_to(self, place: Choice, leaving: WorkerView) -> None:
        """The next attempt takes over from `leaving`, which has not failed but will not be there much longer."""
        self.place = place
        self.number += 1
        self.failed.add(leaving.incarnation)

    def note_silence(self, since: float) -> None:
        self.silent_since = since if self.silent_since is None else min(self.silent_since, since)


def _attempt_id(request: ChoiceRequest, progress: _Progress) -> str:
    return f"{request.request_id}-{request.index}-{progress.number}"


def _query(request: ChoiceRequest, progress: _Progress) -> RouteQuery:
    return RouteQuery(
        request_id=_attempt_id(request, progress),
        model=request.model,
        token_ids=(*request.input_ids, *progress.received),
        cache_salt=request.cache_salt,
        max_tokens=request.sampling.max_tokens - len(progress.received),
        exclude=frozenset(progress.failed),
    )


def _one_worker(choice: Choice) -> Choice:
    """A prompt alone is the prefill worker's work, where there is one."""
    return (
        choice
        if choice.prefill is None
        else replace(choice, decode=choice.prefill, prefill=None, placement=Placement.ALONE)
    )


def _with_handoff(
    request: GenerateRequest, side: HandoffSide, generation: int, *, peer: WorkerView, moving: bool = False
) -> GenerateRequest:
    address = Peer(
        worker_id=peer.worker_id,
        incarnation=peer.incarnation,
        endpoint=peer.peer_endpoint,
        compat_hash=peer.compat_hash,
    )
    handoff = Handoff(side=side, room=request.rid, generation=generation, peer=address, moving=moving)
    # Who receives the KV of a session's first turn keeps the session.
    session = request.session if side is HandoffSide.RECEIVE else None
    return msgspec.structs.replace(request, handoff=handoff, session=session)


def _at_fault(choice: Choice, failure: AttemptFailedError) -> str:
    """The worker to avoid next time. A receiver that reports a failed transfer is well: its sender is not."""
    if failure.code == TransferError.code and choice.prefill is not None:
        return choice.prefill.incarnation
    return failure.incarnation


def _turn_failed(failure: AttemptFailedError) -> ApiError:
    """Of a turn that only this worker could compute."""
    gone = failure.cause in (FailureCause.WORKER_LOST, FailureCause.SILENCE) or failure.code == DrainingError.code
    if gone:
        return session_lost()
    if failure.code == PausedError.code:
        return unavailable("The worker that keeps the session is paused. Try again later.", retry_after=1.0)
    return _gave_up(failure)


def _gave_up(failure: AttemptFailedError) -> ApiError:
    if failure.cause is FailureCause.OVERLOADED:
        return unavailable("All workers are at their limit. Try again later.", retry_after=1.0)
    return internal_error("The model workers failed while generating. Try again.")
