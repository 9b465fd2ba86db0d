"""One choice that runs: what it is of which request, how far it has come over all its attempts, and how they ended.

    AcceptedRequest   what the choices of one request share
    ChoiceRun         one object for each of them, from its first attempt to its end

What is planned does not change: a run refers to it (ADR 157).
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tandem_engine.base.checked_dataclass import checked_dataclass
from tandem_engine.base.errors import (
    AdapterMissingError,
    DrainingError,
    GrammarCompilerError,
    PausedError,
    TransferError,
)
from tandem_engine.base.logs import about_request
from tandem_services.common.errors import ApiError, internal_error, unavailable
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.dispatch.attempt import AttemptFailedError, FailureCause
from tandem_services.gateway.dispatch.plan import Choice, RequestPlan
from tandem_services.gateway.dispatch.quarantine import PROOF_TOKENS, Suspicion, Trial
from tandem_services.gateway.dispatch.sessions import session_lost
from tandem_services.gateway.observe.explain import ChoiceRecord, RequestRecord
from tandem_services.gateway.observe.tracing import UNTRACED, RequestTrace
from tandem_services.gateway.output.token_sequence import Accepted
from tandem_services.gateway.queueing.shared_route import SharedRoute
from tandem_services.router.decision import NoWorkersError, RouteDecision, WorkerView
from tandem_services.router.registry import WorkerState
from tandem_services.router.tickets import RouteTicket

PlanT_co = TypeVar("PlanT_co", bound=RequestPlan, covariant=True)

LOST = (FailureCause.WORKER_LOST, FailureCause.UNREACHABLE)

LEAVING = {DrainingError.code: WorkerState.DRAINING, PausedError.code: WorkerState.PAUSED}
"""Errors with which a healthy worker rejects its requests, and the state in which it does."""

MAX_UNREACHED = 12
"""Attempts in a row whose worker was lost before it is known to have taken the request in. Many workers may die at
once; a request that kills them before it can be identified must not reach all of them."""


OUT_OF_ROOM_S = 5.0
"""Retry-After where memory, threads or processes are short: a killed worker has started again by then."""


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class AcceptedRequest(Generic[PlanT_co]):
    """What to do for one request, where to note it, and by when. Times are the gateway's clock."""

    plan: PlanT_co
    record: RequestRecord
    arrived: float
    deadline: float
    caller: Caller
    ticket: RouteTicket = field(default_factory=RouteTicket)
    """Where the first attempt of all is to go, if a stand-alone router has chosen."""
    trace: RequestTrace = UNTRACED


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long a choice fights for its life."""

    max_attempts: int = 3
    """In a row, each with fewer than `PROOF_TOKENS` new tokens."""
    recovery_s: float = math.inf
    """A choice that has begun waits this long for a worker when there is none; in any case its deadline ends it."""
    silence_s: float = 10.0
    """Workers that say nothing at all, one after the other, have this long together [bounded-waits]."""
    poll_s: float = 0.1
    prefill_fallback: bool = True
    """Without prefill workers decode workers compute prompts, instead of failing them [decode-computes-prompts]."""


@dataclass(kw_only=True, slots=True)
class ChoiceRun:
    """One choice of a running request, over all its attempts. Belongs to the task of the choice."""

    request: AcceptedRequest[RequestPlan]
    choice: Choice
    record: ChoiceRecord
    """Of the choice, in that of the request."""
    group: str = ""
    """Name that all choices of its prompt share, "" when there is one."""
    route: SharedRoute | None = None
    """Where their first attempts go."""
    arrivals: asyncio.Semaphore | None = None
    """What its request's choices share: so many arrive in the queue at the same time. None: it is the only one."""
    received: list[int] = field(default_factory=list)
    written_by: WorkerView | None = None
    """The decode worker of the last of them, as it was then."""
    scored: bool = False
    """The logprobs of the prompt are here: they must not be computed, nor sent, again."""
    attempts: int = 0
    """Attempts that have failed."""
    number: int = 0
    """Of the current attempt: those before it have failed or moved."""
    rid: str = ""
    """Id of that attempt."""
    requested_at: float = 0.0
    """Since when a worker was wanted for it, on the gateway's clock."""
    expected_wait_s: float = 0.0
    """Predicted time in the gateway's queue, when it came."""
    decided_s: float = 0.0
    """How long the last route decision took; 0 of a ticket."""
    place: RouteDecision | None = None
    """Where the next attempt goes, with the KV of the one before."""
    failed: set[str] = field(default_factory=set)
    """Incarnations to avoid."""
    sent_away: dict[str, float] = field(default_factory=dict)
    """Healthy workers that accept no requests for now, and until when they are not tried again."""
    fruitless: int = 0
    """The last attempts that brought the output no further, on workers that had the request."""
    unreached: int = 0
    """And those whose worker is not known to have had it, or ran out of memory for several requests."""
    out_of_memory: bool = False
    """The last lost worker was killed by the kernel because memory was short."""
    _crowded: set[str] = field(default_factory=set)
    """Lost workers on which other unproven requests were."""
    unpaid: bool = False
    """The next attempt costs the gateway a token of its budget."""
    suspicion: Suspicion = field(default_factory=Suspicion)
    trial: Trial | None = None
    """Of the attempt under way, while it has to prove itself."""
    began_at: int = 0
    """Output tokens when the attempt under way began."""
    silent_since: float | None = None
    """Since when lost workers have kept the choice waiting; None while none has."""

    @property
    def about(self) -> dict[str, Any]:
        """Fields of log records about it."""
        record = self.request.record
        return {**about_request(record.request_id, trace_id=record.trace_id), "choice": self.choice.index}

    @property
    def gained(self) -> int:
        """Tokens of the attempt under way."""
        return len(self.received) - self.began_at

    def receive(self, accepted: Accepted, *, by: WorkerView) -> None:
        """`by`: the decode worker of the attempt under way."""
        self.scored = self.scored or accepted.prompt_logprobs is not None
        self.receive_tokens(accepted.token_ids, by=by)

    def receive_tokens(self, token_ids: list[int], *, by: WorkerView) -> None:
        """The same of tokens alone."""
        self.received += token_ids
        if self.received:
            self.written_by = by
        # `gained` would be another call for each token.
        if (self.trial is not None or self.suspicion.lost) and len(self.received) - self.began_at >= PROOF_TOKENS:
            self.suspicion.proved()
            self.end_trial()

    def end_trial(self) -> None:
        """The attempt under way has proved itself, or ended in some other way than with its worker. Idempotent."""
        if self.trial is not None:
            self.trial.cleared()
            self.trial = None

    def move_to(self, place: RouteDecision, leaving: WorkerView) -> None:
        """The next attempt takes over from `leaving`, which has not failed but will not be there much longer."""
        self.place = place
        self.number += 1
        self.failed.add(leaving.incarnation)

    def note_failure(self, failure: AttemptFailedError, *, alone: bool) -> None:
        """`alone`: no other suspect was on the worker that failed."""
        if self.gained >= PROOF_TOKENS:
            self.fruitless = self.unreached = 0
        self.attempts += 1
        self.number += 1
        self.out_of_memory = False
        self.unpaid = not (failure.cause in LOST or failure.code in LEAVING or failure.by_abort)
        if failure.cause is FailureCause.UNREACHABLE:
            self.unreached += 1
        elif failure.code not in LEAVING:
            self.fruitless += 1
        if failure.cause is FailureCause.WORKER_LOST:
            self._note_loss(failure.incarnation, alone=alone)
            if not alone:
                self._crowded.add(failure.incarnation)

    def note_memory_kills(self, killed: frozenset[str], *, last: str) -> None:
        """The kernel killed these of the lost workers because memory was short; `last` was lost last. A request that
        was one of many there is not held responsible, so it has as many attempts as one that did not arrive."""
        self.out_of_memory = last in killed
        self.suspicion.clear_losses(killed)
        unrelated = self._crowded & killed
        self._crowded -= unrelated
        self.fruitless = max(self.fruitless - len(unrelated), 0)
        self.unreached += len(unrelated)

    def exhausted(self, max_attempts: int) -> bool:
        """Whether it is time to give up."""
        return self.fruitless >= max_attempts or self.unreached >= MAX_UNREACHED

    def note_silence(self, since: float) -> None:
        self.silent_since = since if self.silent_since is None else min(self.silent_since, since)

    def _note_loss(self, incarnation: str, *, alone: bool) -> None:
        self.suspicion.note_loss(incarnation, gained=self.gained, alone=alone)
        if self.trial is not None:
            self.trial.lost(incarnation)
            self.trial = None


def at_fault(decision: RouteDecision, failure: AttemptFailedError) -> str:
    """The worker to avoid next time. A receiver that reports a failed transfer is well: its sender is not."""
    if failure.code == TransferError.code and decision.prefill is not None:
        return decision.prefill.incarnation
    return failure.incarnation


def no_workers(error: NoWorkersError) -> ApiError:
    """No worker came in time."""
    return unavailable("No worker can take the request now. Try again later.", retry_after=error.retry_after)


def gave_up(failure: AttemptFailedError, *, out_of_memory: bool = False) -> ApiError:
    """`failure` was the last attempt's. `out_of_memory`: its worker was killed because memory was short."""
    if out_of_memory:
        return unavailable(
            "The model workers ran out of memory. Try again later, or ask an administrator to provide more memory.",
            retry_after=OUT_OF_ROOM_S,
        )
    if failure.cause is FailureCause.OVERLOADED:
        return unavailable("All workers are at their limit. Try again later.", retry_after=1.0)
    if failure.code == AdapterMissingError.code:
        return unavailable("No worker has the adapter any more. Try again later.", retry_after=1.0)
    if failure.code == GrammarCompilerError.code:
        return unavailable("No worker can compile the grammar now. Try again later.", retry_after=OUT_OF_ROOM_S)
    return internal_error("The model workers failed while generating. Try again.")


def turn_failed(failure: AttemptFailedError) -> ApiError:
    """Of a turn that only this worker could compute."""
    gone = failure.cause in (*LOST, FailureCause.SILENCE)
    if gone or failure.code in (DrainingError.code, AdapterMissingError.code):
        return session_lost()
    if failure.code == PausedError.code:
        return unavailable("The worker that keeps the session is paused. Try again later.", retry_after=1.0)
    return gave_up(failure)
