"""The life of one choice: from a prompt to its last token, over as many workers as it takes.

    1. choose    the router names a decode worker and perhaps a prefill worker, and reserves the load
    2. send      to both at once, same room; ids carry the attempt, so late answers are recognised
    3. receive   tokens in order, each once (`Attempt`, `TokenSequence`)
    4. retry     on a lost worker or a retryable error: the attempt is aborted everywhere, the worker is
                 excluded, and the tokens received so far are sent along as `resume_ids`. Sampling noise is a
                 function of (seed, position), so the text goes on as if nothing had happened (B2.1)
                 A retry that a living worker made necessary is paid from the gateway's `RetryBudget`
    5. move      a worker that is to stop, or to do other work, asks for its request to go on elsewhere: as above, but
                 it sends its KV to whoever takes over. With no place to go to, it goes on where it is
    6. wait      for a worker when there is none: until the deadline once it has begun; before that for one with room,
                 in the gateway's queue (`Admission`)
    7. give up   after `max_attempts` that brought it no further, when two workers died of it (`Quarantine`), or when
                 workers that say nothing at all have used up `silence_s`
    8. release   the reservation, on every path

Whatever ends the iteration, a client that leaves included, runs the `finally` that aborts the attempt.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from tandem_engine.clock import Clock
from tandem_engine.errors import DrainingError, PausedError, TransferError, WireError
from tandem_engine.logs import about_request
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.pooling import PoolingParams
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, Peer, PrefixFetch, attempt_id
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError, internal_error, unavailable
from tandem_services.common.tasks import BackgroundTasks
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.attempt import Attempt, AttemptFailedError, FailureCause
from tandem_services.gateway.engine_client import EngineConnection, EnginePool
from tandem_services.gateway.explain import AttemptRecord, ChoiceRecord
from tandem_services.gateway.metrics import GatewayMetrics
from tandem_services.gateway.progress import LEAVING, LOST, Progress
from tandem_services.gateway.quarantine import Quarantine, quarantined
from tandem_services.gateway.queueing.admission import Admission
from tandem_services.gateway.request_trace import UNTRACED, AttemptStart, AttemptTrace, RequestTrace
from tandem_services.gateway.retry_budget import RetryBudget
from tandem_services.gateway.route_ticket import RouteTicket
from tandem_services.gateway.session_turns import SessionTurn, session_lost
from tandem_services.gateway.shared_route import SharedRoute
from tandem_services.gateway.suspicion import Suspects
from tandem_services.gateway.token_sequence import Accepted
from tandem_services.router.choice import Choice, NoWorkersError, Placement, PlannedFetch, RouteQuery, WorkerView
from tandem_services.router.registry import WorkerState

logger = logging.getLogger(__name__)

AWAY_S = 1.0
"""Seconds for which a worker that drains or is paused is not asked again: the registry says so too by then."""
MOVED = "moved"
"""Outcome of an attempt that another worker continues with its KV."""


class PairChooser(Protocol):
    """What the gateway needs of the router."""

    async def choose(self, query: RouteQuery) -> Choice:
        """Reserve and return the best workers. Raises `NoWorkersError` when nobody can take it now."""
        ...

    async def redeem(self, ticket_id: str, query: RouteQuery) -> Choice | None:
        """What a stand-alone router chose and reserved for this prompt; None when that does not hold."""
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

    def mark_alive(self, incarnation: str) -> None:
        """It has answered since: choose it again, if the registry has it."""
        ...

    def note_refusal(self, incarnation: str, state: WorkerState) -> None:
        """It has sent a request away because it is in `state`: do not choose it again until the registry says more."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long a choice fights for its life."""

    max_attempts: int = 3
    """In a row, each with fewer than `PROOF_TOKENS` new tokens."""
    recovery_s: float = math.inf
    """A choice that has begun waits this long for a worker when there is none; in any case its deadline ends it."""
    silence_s: float = 10.0
    """Workers that say nothing at all, one after the other, have this long together (RELIABILITY B2.6)."""
    poll_s: float = 0.1
    prefill_fallback: bool = True
    """Without prefill workers decode workers compute prompts, instead of nobody (B3.12)."""


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
    session_key: str = ""
    """Whose request it is, for routing by the policy `session`."""
    pooling: PoolingParams | None = None
    """An embedding is wanted instead of text; `sampling` then allows one token."""
    group: str = ""
    """Name that all choices of the prompt share, "" when there is one."""
    route: SharedRoute | None = None
    """Where their first attempts go."""
    ticket: RouteTicket = field(default_factory=RouteTicket)
    """Where the first attempt of all is to go, if a stand-alone router has chosen."""
    turn: SessionTurn | None = None
    """The session that it continues."""
    deadline: float
    """Monotonic time of the gateway's clock."""
    caller: Caller = field(default_factory=Caller)
    trace: RequestTrace = UNTRACED

    @property
    def about(self) -> dict[str, Any]:
        """Fields of log records about it."""
        return {**about_request(self.request_id, trace_id=self.trace.trace_id), "choice": self.index}


@dataclass(kw_only=True, slots=True)
class Dispatcher:
    """Runs choices. One per model service."""

    chooser: PairChooser
    engines: EnginePool
    clock: Clock
    policy: RetryPolicy
    metrics: GatewayMetrics
    budget: RetryBudget
    admission: Admission
    quarantine: Quarantine
    suspects: Suspects = field(default_factory=Suspects)
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def run(self, request: ChoiceRequest, record: ChoiceRecord) -> AsyncGenerator[Accepted, None]:
        """New tokens as they come; the last piece carries the finish. Close the generator to abort.

        Raises `ApiError` when no attempt succeeded.
        """
        if request.turn is None or request.turn.begins:
            self.quarantine.check(request)
        self.budget.choice_began()
        self.metrics.choices.inc()
        began = self.clock.now()
        progress = Progress()
        while len(progress.received) < request.sampling.max_tokens:
            place, progress.place = progress.place, None
            choice = place or await self._choose(request, progress, record)
            workers = choice if request.pooling is None else _one_worker(choice)
            at = self.clock.now() - began
            note = record.begin_attempt(workers, resumed_tokens=len(progress.received), began_s=at)
            trace = request.trace.attempt(_attempt_start(request, progress, choice, note))
            attempt = Attempt(
                _attempt_id(request, progress),
                len(progress.received),
                record,
                began=self.clock.now(),
                awaits_prompt=request.sampling.prompt_logprobs is not None and not progress.scored,
            )
            try:
                if request.turn is not None:
                    await request.turn.bind(workers.decode.incarnation, about=request.about)
                await self._enter(attempt, request, workers, progress)
                self._send(attempt, request, workers, progress, trace, moving=place is not None)
                while True:
                    waiting = attempt.next() if progress.silent_since is None else self._next(attempt, progress)
                    accepted = await waiting
                    progress.receive(accepted, by=workers.decode)
                    trace.received(len(accepted.token_ids))
                    self.admission.charge_output(request.caller.tenant, len(accepted.token_ids))
                    if accepted.finish is not None:
                        note.outcome = "finished"
                    yield accepted
                    if accepted.finish is not None:
                        return
                    if attempt.leaving is not None and await self._finds_place(attempt, request, progress):
                        note.outcome = MOVED
                        break
            except AttemptFailedError as failure:
                note.outcome = failure.cause.value
                if failure.cause in LOST:
                    progress.note_silence(attempt.quiet_since)
                self._note_failure(request, workers, progress, failure)
            except ApiError:
                note.outcome = "refused"
                raise
            finally:
                attempt.close()
                progress.end_trial()
                self._correct_charge(request, choice, progress, record)
                self._ended(request, choice, note, at=self.clock.now() - began)
                trace.ended()
        # The worker died between its last token and its finish.
        yield Accepted([], [], Finish(reason=FinishReason.LENGTH))

    def _ended(self, request: ChoiceRequest, choice: Choice, note: AttemptRecord, *, at: float) -> None:
        """An attempt is over, however it ended; `at` seconds after the choice began."""
        if note.outcome == "running":
            note.outcome = "stopped"
        note.ended_s = at
        self.metrics.attempt_ended(note.outcome)
        self._release(request, choice)

    def _correct_charge(self, request: ChoiceRequest, choice: Choice, progress: Progress, record: ChoiceRecord) -> None:
        """The tenant was charged for the prompt by what the router predicted to be cached. Once, for the first attempt;
        choices that share a prompt share that charge."""
        if progress.number == 0 and request.route is None and record.cached_tokens is not None:
            self.admission.correct_prompt(
                request.caller.tenant,
                len(request.input_ids),
                predicted=choice.matched_tokens,
                cached=record.cached_tokens,
            )

    async def _enter(self, attempt: Attempt, request: ChoiceRequest, workers: Choice, progress: Progress) -> None:
        """Note where an attempt goes whose request may have killed a worker; it may have to wait its turn."""
        progress.began_at = len(progress.received)
        both = [worker.incarnation for worker in (workers.decode, workers.prefill) if worker is not None]
        progress.trial = await self.suspects.enter(progress.suspicion, _attempt_id(request, progress), both)
        if progress.suspicion.needs_trial:
            # The wait was no worker's silence.
            attempt.began, progress.silent_since = self.clock.now(), None

    async def _next(self, attempt: Attempt, progress: Progress) -> Accepted:
        """What `attempt` gives next, after lost workers: one that says nothing has only what they left of the time."""
        assert progress.silent_since is not None, "no worker was lost"
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

    async def _finds_place(self, attempt: Attempt, request: ChoiceRequest, progress: Progress) -> bool:
        """Whether the worker of `attempt` has asked to be left and another one has room: then the next attempt is its.

        Without room the request stays where it is, until it is asked again.
        """
        leaving, attempt.leaving = attempt.leaving, None
        if leaving is None or len(progress.received) >= request.sampling.max_tokens:
            return False
        progress.asked_at = self.clock.now()
        try:
            place = await self._timed(self.chooser.relocate(self._query(request, progress), leaving))
        except NoWorkersError:
            return False
        progress.move_to(place, leaving)
        fields = {**request.about, "worker": leaving.incarnation, "to": place.decode.incarnation}
        logger.info("moving", extra={"fields": fields})
        return True

    async def settle(self) -> None:
        """Wait for releases under way. Call at shutdown."""
        await self._background.settle()

    def _send(
        self,
        attempt: Attempt,
        request: ChoiceRequest,
        choice: Choice,
        progress: Progress,
        trace: AttemptTrace,
        *,
        moving: bool,
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
            trace=trace.context,
        )
        fetch = None if choice.fetch is None else _fetch(choice.fetch)
        computing = msgspec.structs.replace(alone, fetch=fetch)
        if prefill is None:
            attempt.submit(self._connect(decode), computing, is_prefill=False)
            return
        receive = with_handoff(alone, HandoffSide.RECEIVE, progress.number, peer=prefill)
        send = with_handoff(computing, HandoffSide.SEND, progress.number, peer=decode, moving=moving)
        attempt.submit(self._connect(decode), receive, is_prefill=False)
        attempt.submit(self._connect(prefill), send, is_prefill=True)

    def _connect(self, worker: WorkerView) -> EngineConnection:
        try:
            return self.engines.connect(worker)
        except WireError as error:
            self.chooser.mark_dead(worker.incarnation)
            raise AttemptFailedError(FailureCause.UNREACHABLE, worker.incarnation) from error

    async def _choose(self, request: ChoiceRequest, progress: Progress, record: ChoiceRecord) -> Choice:
        await self._pay(progress)
        progress.asked_at = self.clock.now()
        try:
            choice = await self._choose_once(request, progress)
        except NoWorkersError as error:
            return await self._await_worker(request, progress, error)
        if progress.attempts == 0:
            record.admission_s = self.clock.now() - progress.asked_at
        return choice

    async def _await_worker(self, request: ChoiceRequest, progress: Progress, error: NoWorkersError) -> Choice:
        # Nobody is there who could be silent.
        progress.silent_since = None
        give_up_at = self.clock.now() + self.policy.recovery_s
        while self.clock.now() < give_up_at:
            await asyncio.sleep(self.policy.poll_s)
            if not self.chooser.workers():
                continue
            try:
                return await self._choose_once(request, progress)
            except NoWorkersError as again:
                error = again
        raise _nobody(error) from error

    async def _keeper(self, query: RouteQuery, incarnation: str) -> Choice:
        """Of a session that is continued: nobody else can."""
        try:
            return await self._timed(self.chooser.stay(query, incarnation))
        except NoWorkersError as error:
            raise session_lost() from error

    async def _choose_once(self, request: ChoiceRequest, progress: Progress) -> Choice:
        query = self._query(request, progress)
        if request.turn is not None and request.turn.keeper is not None:
            return await self._keeper(query, request.turn.keeper)
        if progress.attempts == 0:
            return await self._admitted(request, query)
        try:
            return await self._choose_suitable(query)
        except NoWorkersError:
            if not progress.failed:
                raise
        # A live worker that has failed this request once is better than none; the dead stay excluded, and so do those
        # that have just sent it away.
        now = self.clock.now()
        away = frozenset(incarnation for incarnation, until in progress.sent_away.items() if now < until)
        return await self._choose_suitable(replace(query, exclude=away))

    async def _admitted(self, request: ChoiceRequest, query: RouteQuery) -> Choice:
        """For the first attempt; together with the other choices of its prompt, if there are any."""

        async def enter(asked: RouteQuery) -> Choice:
            return await self.admission.admit(
                partial(self._choose_suitable, asked, request.ticket),
                tenant=request.caller.tenant,
                priority=request.priority,
                prompt_tokens=len(asked.token_ids),
            )

        return await (enter(query) if request.route is None else request.route.choose(query, enter))

    def _query(self, request: ChoiceRequest, progress: Progress) -> RouteQuery:
        return RouteQuery(
            request_id=_attempt_id(request, progress),
            model=request.model,
            token_ids=(*request.input_ids, *progress.received),
            cache_salt=request.cache_salt,
            max_tokens=request.sampling.max_tokens - len(progress.received),
            exclude=frozenset(progress.failed),
            compat_hash=self._kind_wanted(progress),
            session_key=request.session_key,
        )

    def _kind_wanted(self, progress: Progress) -> str | None:
        """Weights that begin an output go on with it (B3.52), unless their worker has been given others since."""
        writer = progress.written_by
        if writer is None:
            return None
        now = next((worker for worker in self.chooser.workers() if worker.incarnation == writer.incarnation), writer)
        return writer.compat_hash if now.compat_hash == writer.compat_hash else None

    async def _choose_suitable(self, query: RouteQuery, ticket: RouteTicket | None = None) -> Choice:
        """Not one whose decode worker would compute the prompt for want of others, when that is not wanted."""
        chosen = None if ticket is None else ticket.take()
        choice = None if chosen is None else await self.chooser.redeem(chosen, query)
        if choice is None:
            choice = await self._timed(self.chooser.choose(query))
        if choice.placement is not Placement.DEGRADED or self.policy.prefill_fallback:
            return choice
        self._background.start(self.chooser.release(choice))
        raise NoWorkersError("no prefill worker is left", retry_after=1.0)

    async def _timed(self, decision: Awaitable[Choice]) -> Choice:
        asked = self.clock.now()
        choice = await decision
        took = self.clock.now() - asked
        self.metrics.decision.observe(took)
        return replace(choice, decided_s=took)

    def _release(self, request: ChoiceRequest, choice: Choice) -> None:
        if request.route is None or request.route.let_go(choice):
            self._background.start(self.chooser.release(choice))
        self.admission.freed()

    async def _pay(self, progress: Progress) -> None:
        """For another attempt. A stream that has begun waits for its turn; what has not is refused with a 503."""
        while progress.unpaid and not self.budget.spend():
            if not progress.received:
                self.metrics.retries_refused.inc()
                raise unavailable("The model workers are in trouble. Try again later.", retry_after=self.budget.wait_s)
            await asyncio.sleep(self.budget.wait_s)
        progress.unpaid = False

    def _note_failure(
        self, request: ChoiceRequest, choice: Choice, progress: Progress, failure: AttemptFailedError
    ) -> None:
        """Decide whether there is another attempt; raises `ApiError` when there is none."""
        progress.suspicion.acquit(worker.incarnation for worker in self.chooser.workers())
        progress.note_failure(failure, alone=self.suspects.alone(failure.incarnation))
        progress.failed.add(_at_fault(choice, failure))
        if (state := LEAVING.get(failure.code or "")) is not None:
            self.chooser.note_refusal(failure.incarnation, state)
            progress.sent_away[failure.incarnation] = self.clock.now() + AWAY_S
        fields = {
            **request.about,
            "attempt": progress.attempts,
            "cause": failure.cause.value,
            "worker": failure.incarnation,
            "code": failure.code,
        }
        logger.warning("attempt failed", extra={"fields": fields})
        if request.turn is not None and not request.turn.begins:
            raise _turn_failed(failure) from failure
        if progress.suspicion.convicted:
            self.quarantine.convict(request, about=request.about, workers=progress.suspicion.lost)
            raise quarantined() from failure
        if not failure.retryable or progress.exhausted(self.policy.max_attempts):
            raise _gave_up(failure) from failure


def _nobody(error: NoWorkersError) -> ApiError:
    return unavailable("No worker can take the request now. Try again later.", retry_after=error.retry_after)


def _attempt_id(request: ChoiceRequest, progress: Progress) -> str:
    return attempt_id(request.request_id, request.index, progress.number)


def _attempt_start(request: ChoiceRequest, progress: Progress, choice: Choice, note: AttemptRecord) -> AttemptStart:
    return AttemptStart(
        attempt_id=_attempt_id(request, progress),
        index=request.index,
        number=progress.number,
        asked_at=progress.asked_at,
        choice=choice,
        note=note,
        sampling=request.sampling,
        model=request.model,
    )


def _one_worker(choice: Choice) -> Choice:
    """A prompt alone is the prefill worker's work, where there is one."""
    return (
        choice
        if choice.prefill is None
        else replace(choice, decode=choice.prefill, prefill=None, placement=Placement.ALONE)
    )


def _address(worker: WorkerView) -> Peer:
    """Where other engines reach it."""
    return Peer(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        endpoint=worker.peer_endpoint,
        compat_hash=worker.compat_hash,
    )


def _fetch(planned: PlannedFetch) -> PrefixFetch:
    return PrefixFetch(peer=_address(planned.source), tokens=planned.tokens, within_s=planned.within_s)


def with_handoff(
    request: GenerateRequest, side: HandoffSide, generation: int, *, peer: WorkerView, moving: bool = False
) -> GenerateRequest:
    handoff = Handoff(side=side, room=request.rid, generation=generation, peer=_address(peer), moving=moving)
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
    gone = failure.cause in (*LOST, FailureCause.SILENCE) or failure.code == DrainingError.code
    if gone:
        return session_lost()
    if failure.code == PausedError.code:
        return unavailable("The worker that keeps the session is paused. Try again later.", retry_after=1.0)
    return _gave_up(failure)


def _gave_up(failure: AttemptFailedError) -> ApiError:
    if failure.cause is FailureCause.OVERLOADED:
        return unavailable("All workers are at their limit. Try again later.", retry_after=1.0)
    return internal_error("The model workers failed while generating. Try again.")
