"""Runs one choice from its prompt to its last token, over as many attempts as it takes.

    1. choose    the router selects a decode worker and optionally a prefill worker, and reserves the load (`Placing`)
    2. send      to both at once, with the same room; ids contain the attempt, so that late outputs are recognized
    3. receive   tokens in order, each once (`Attempt`, `TokenSequence`)
    4. retry     on a lost worker or a retryable error: abort the attempt everywhere, exclude the worker, and send
                 the tokens received so far as `resume_ids`. Sampling noise is a function of (seed, position), so the
                 text continues unchanged [resume-from-tokens]. A retry after an error of a live worker is charged to
                 the `RetryBudget`
    5. migrate   a worker that drains or changes its role requests the migration of a request: same as a retry, but it
                 sends its KV to the new worker. Without another worker the request stays where it is
    6. wait      while there is no worker: until the deadline for a request that has started; before that in the
                 gateway's queue for a worker with capacity (`Admission`)
    7. fail      after `max_attempts` without progress, when two workers died of the request (`Quarantine`), or when
                 workers without any response have used up `silence_s`
    8. release   the reservation, on every path

However the run ends, also by a disconnected client, its `finally` aborts the attempt.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tandem_engine.base.checked_dataclass import checked_dataclass
from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import WireError
from tandem_engine.base.release import RELEASE
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, Peer, PrefixFetch
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.dispatch.attempt import Attempt, AttemptFailedError, FailureCause, TokenSink
from tandem_services.gateway.dispatch.engine_client import EngineConnection
from tandem_services.gateway.dispatch.engine_pool import EnginePool
from tandem_services.gateway.dispatch.placement import Placing
from tandem_services.gateway.dispatch.plan import ChoiceRequest, RetryPolicy
from tandem_services.gateway.dispatch.progress import LEAVING, LOST, Progress, at_fault, gave_up, turn_failed
from tandem_services.gateway.dispatch.quarantine import Quarantine, Suspects, quarantined
from tandem_services.gateway.observe.explain import AttemptRecord, ChoiceRecord
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.observe.predictions import Predictions
from tandem_services.gateway.observe.tracing import UNTRACED, AttemptStart, AttemptTrace
from tandem_services.gateway.output.token_sequence import Accepted, Consume
from tandem_services.gateway.queueing.admission import Admission, OutputCharge
from tandem_services.router.calibration import Prediction
from tandem_services.router.decision import Placement, PlannedFetch, RouteDecision, WorkerView


def request_alone(
    request: ChoiceRequest, progress: Progress, trace: AttemptTrace, *, deadline_s: float
) -> GenerateRequest:
    """The request for the generating worker; `deadline_s` from now."""
    return GenerateRequest(
        rid=progress.rid,
        input_ids=request.input_ids,
        sampling=request.sampling.without_prompt_logprobs() if progress.scored else request.sampling,
        resume_ids=tuple(progress.received),
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        priority=request.priority,
        tenant=request.caller.tenant.name,
        group=request.group,
        pooling=request.pooling,
        session=None if request.turn is None else request.turn.ref,
        deadline_s=deadline_s,
        trace=trace.context,
        release=RELEASE,
    )


def with_fetch(alone: GenerateRequest, planned: PlannedFetch | None) -> GenerateRequest:
    """The request for the worker that computes the prompt, with the prefix that it should fetch from another worker."""
    if planned is None:
        return alone
    fetch = PrefixFetch(peer=_address(planned.source), tokens=planned.tokens, within_s=planned.within_s)
    return msgspec.structs.replace(alone, fetch=fetch)


def with_handoff(
    request: GenerateRequest, side: HandoffSide, generation: int, *, peer: WorkerView, moving: bool = False
) -> GenerateRequest:
    """One end of a handoff whose other end is `peer`."""
    handoff = Handoff(side=side, room=request.rid, generation=generation, peer=_address(peer), moving=moving)
    request = msgspec.structs.replace(request, handoff=handoff)
    if request.session is None or side is HandoffSide.RECEIVE:
        return request
    # The worker that receives the KV of a session's first turn keeps the session.
    return msgspec.structs.replace(request, session=None)


def _without_end(request: GenerateRequest, context_length: int) -> GenerateRequest:
    """The same next token, which does not end the output: if it did, no KV would be sent, and no session be kept.

    It still does where `context_length` has no room for another one, and where it completes a grammar.
    """
    sampling, received = request.sampling, len(request.resume_ids)
    if len(request.input_ids) + received + 2 > context_length:
        return request
    sampling = msgspec.structs.replace(sampling, max_tokens=max(sampling.max_tokens, received + 2))
    if sampling.min_tokens <= received:
        # Until then tokens that end the output are not sampled: these have to be the same.
        sampling = msgspec.structs.replace(sampling, ignore_eos=True, stop=(), stop_token_ids=())
    return msgspec.structs.replace(request, sampling=sampling)


def pair_of_requests(
    alone: GenerateRequest, choice: RouteDecision, generation: int, *, moving: bool
) -> tuple[GenerateRequest, GenerateRequest]:
    """For the decode worker and for the prefill worker of `choice`, which is a pair."""
    assert choice.prefill is not None, "a worker alone hands nothing over"
    receive = with_handoff(alone, HandoffSide.RECEIVE, generation, peer=choice.prefill)
    computing = with_fetch(alone, choice.fetch)
    if alone.session is not None:
        computing = _without_end(computing, choice.prefill.context_length)
    return receive, with_handoff(computing, HandoffSide.SEND, generation, peer=choice.decode, moving=moving)


def _address(worker: WorkerView) -> Peer:
    """Where other engines reach it."""
    return Peer(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        endpoint=worker.peer_endpoint,
        compat_hash=worker.compat_hash,
        release=worker.release,
    )


@dataclass(slots=True)
class _Receipt:
    """What is noted of the tokens of one attempt, before the choice gets them."""

    progress: Progress
    decode: WorkerView
    trace: AttemptTrace
    admission: Admission
    tenant: Tenant

    def note(self, accepted: Accepted) -> None:
        self.progress.receive(accepted, by=self.decode)
        self.trace.received(len(accepted.token_ids))
        self.admission.binding.charge_output(self.tenant, len(accepted.token_ids))

    def sink_of(self, choice: TokenSink) -> "_Pouring":
        """Notes tokens on their way to the sink of the choice."""
        return _Pouring(
            progress=self.progress,
            decode=self.decode,
            traced=None if self.trace is UNTRACED else self.trace.received,
            charge=self.admission.output_charge(self.tenant),
            is_ready=choice.is_ready,
            pass_on=choice.take,
        )


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class _Pouring:
    """The sink of one attempt. Implements `TokenSink`."""

    progress: Progress
    decode: WorkerView
    traced: Callable[[int], None] | None
    charge: OutputCharge
    is_ready: Callable[[], bool]
    """Of the choice's sink, as is `pass_on`."""
    pass_on: Callable[[list[int], float], bool]

    def take(self, token_ids: list[int], at: float) -> bool:
        self.progress.receive_tokens(token_ids, by=self.decode)
        if self.traced is not None:
            self.traced(len(token_ids))
        if not self.charge.tokens:
            self.charge.begin()
        self.charge.tokens += len(token_ids)
        return self.pass_on(token_ids, at)


logger = logging.getLogger(__name__)

AWAY_S = 1.0
"""Seconds for which a worker that drains or is paused is not tried again: by then the registry has its state."""

MOVED = "moved"
"""Outcome of an attempt that another worker continues with its KV."""


@dataclass(kw_only=True, slots=True)
class Dispatcher:
    """Runs choices. One per model service."""

    placing: Placing
    engines: EnginePool
    clock: Clock
    policy: RetryPolicy
    metrics: GatewayMetrics
    predictions: Predictions
    quarantine: Quarantine
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end an output of the model, as far as its tokenizer names them."""
    suspects: Suspects = field(default_factory=Suspects)

    async def run(
        self, request: ChoiceRequest, record: ChoiceRecord, consume: Consume, sink: TokenSink | None = None
    ) -> None:
        """`consume` gets new tokens as they come, the last of them with the finish. Cancel it to abort.

        With a `sink`, ordinary tokens may go there instead. Tokens without any for `consume` then say that it has taken
        some that need a look.

        Raises `ApiError` when no attempt succeeded, and what `consume` raises.
        """
        if request.turn is None or request.turn.begins:
            self.quarantine.check(request)
        self.placing.budget.choice_began()
        self.metrics.choices.inc()
        began = self.clock.now()
        progress = Progress()
        while len(progress.received) < request.sampling.max_tokens:
            place, progress.place = progress.place, None
            progress.rid = request.attempt_id(progress)
            choice = place or await self.placing.choose(request, progress, record)
            workers = choice if request.pooling is None else _one_worker(choice)
            note = record.begin_attempt(
                workers,
                predicted=self._predicted(request, choice, progress),
                resumed_tokens=len(progress.received),
                began_s=self.clock.now() - began,
            )
            trace = request.trace.attempt(_attempt_start(request, progress, choice, note))
            attempt = Attempt(
                progress.rid,
                len(progress.received),
                record,
                began=self.clock.now(),
                awaits_prompt=request.sampling.prompt_logprobs is not None and not progress.scored,
            )
            try:
                if request.turn is not None:
                    await request.turn.bind(workers.decode.incarnation, about=request.about)
                await self._enter(attempt, workers, progress)
                self._send(attempt, request, workers, progress, trace, moving=place is not None)
                received = _Receipt(progress, workers.decode, trace, self.placing.admission, request.caller.tenant)
                pouring = None if sink is None else received.sink_of(sink)
                while True:
                    waiting = attempt.next(pouring) if progress.silent_since is None else self._next(attempt, progress)
                    accepted = await waiting
                    received.note(accepted)
                    if accepted.finish is not None:
                        note.outcome = "finished"
                    if await consume(accepted) or accepted.finish is not None:
                        return
                    if attempt.leaving is not None and await self.placing.finds_place(attempt, request, progress):
                        note.outcome = MOVED
                        break
            except AttemptFailedError as failure:
                note.outcome = failure.cause.value
                if failure.cause in LOST:
                    progress.note_silence(attempt.quiet_since)
                await self._note_failure(request, workers, progress, failure)
            except ApiError:
                note.outcome = "refused"
                raise
            finally:
                attempt.close()
                progress.end_trial()
                self._correct_charge(request, choice, progress, record)
                self._ended(choice, note, at=self.clock.now() - began)
                trace.ended()
        # The worker died between its last token and its finish.
        await consume(Accepted([], [], Finish(reason=FinishReason.LENGTH)))

    def _predicted(self, request: ChoiceRequest, choice: RouteDecision, progress: Progress) -> Prediction | None:
        """Of a first attempt to generate."""
        if progress.number or request.pooling is not None:
            return None
        return self.predictions.predict(choice, gateway_wait_s=progress.expected_wait_s)

    def _ended(self, choice: RouteDecision, note: AttemptRecord, *, at: float) -> None:
        """An attempt is over, however it ended; `at` seconds after the choice began."""
        if note.outcome == "running":
            note.outcome = "stopped"
        note.ended_s = at
        self.metrics.attempt_ended(note.outcome)
        self.placing.release(choice)

    def _correct_charge(
        self, request: ChoiceRequest, choice: RouteDecision, progress: Progress, record: ChoiceRecord
    ) -> None:
        """The tenant was charged for the prompt of each choice by what the router predicted to be cached. Once, for the
        first attempt."""
        if progress.number == 0 and record.cached_tokens is not None:
            self.placing.admission.binding.correct_prompt(
                request.caller.tenant,
                len(request.input_ids),
                predicted=choice.matched_tokens,
                cached=record.cached_tokens,
            )

    async def _enter(self, attempt: Attempt, workers: RouteDecision, progress: Progress) -> None:
        """Note where an attempt goes whose request may have killed a worker; it may have to wait its turn."""
        progress.began_at = len(progress.received)
        both = [worker.incarnation for worker in (workers.decode, workers.prefill) if worker is not None]
        progress.trial = await self.suspects.enter(progress.suspicion, progress.rid, both)
        if progress.suspicion.needs_trial:
            # The wait was no worker's silence.
            attempt.began, progress.silent_since = self.clock.now(), None

    async def _next(self, attempt: Attempt, progress: Progress) -> Accepted:
        """The next output of `attempt`, after lost workers: a silent one has only the time that they left."""
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

    def _send(
        self,
        attempt: Attempt,
        request: ChoiceRequest,
        choice: RouteDecision,
        progress: Progress,
        trace: AttemptTrace,
        *,
        moving: bool,
    ) -> None:
        left_s = max(request.deadline - self.clock.now(), 0.0)
        alone = request_alone(request, progress, trace, deadline_s=left_s)
        if choice.prefill is None:
            attempt.submit(self._connect(choice.decode), with_fetch(alone, choice.fetch), is_prefill=False)
            return
        receive, send = pair_of_requests(alone, choice, progress.number, moving=moving)
        attempt.submit(self._connect(choice.decode), receive, is_prefill=False)
        withheld = None if receive.session is None else self._may_end(receive.sampling)
        attempt.submit(self._connect(choice.prefill), send, is_prefill=True, withheld=withheld)

    def _may_end(self, sampling: SamplingParams) -> Callable[[Sequence[int]], bool]:
        """Whether tokens may end an output. Which of them complete a stop string is not known here."""
        if sampling.stop:
            return bool
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        ends = eos.union(sampling.stop_token_ids)
        return lambda token_ids: not ends.isdisjoint(token_ids)

    def _connect(self, worker: WorkerView) -> EngineConnection:
        try:
            return self.engines.connect(worker)
        except WireError as error:
            self.placing.chooser.mark_dead(worker.incarnation)
            raise AttemptFailedError(FailureCause.UNREACHABLE, worker.incarnation) from error

    async def _note_failure(
        self, request: ChoiceRequest, choice: RouteDecision, progress: Progress, failure: AttemptFailedError
    ) -> None:
        """Decide whether there is another attempt; raises `ApiError` when there is none."""
        progress.suspicion.clear_losses(worker.incarnation for worker in self.placing.chooser.workers())
        progress.note_failure(failure, alone=self.suspects.alone(failure.incarnation))
        progress.failed.add(at_fault(choice, failure))
        if (state := LEAVING.get(failure.code or "")) is not None:
            self.placing.chooser.note_refusal(failure.incarnation, state)
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
            raise turn_failed(failure) from failure
        suspected = progress.suspicion.needs_trial or progress.exhausted(self.policy.max_attempts)
        if failure.cause is FailureCause.WORKER_LOST and suspected:
            killed = await self.quarantine.killed_for_memory({*progress.suspicion.lost, failure.incarnation})
            progress.note_memory_kills(killed, last=failure.incarnation)
        if progress.suspicion.is_poison:
            self.quarantine.quarantine(request, about=request.about, workers=progress.suspicion.lost)
            raise quarantined() from failure
        if not failure.retryable or progress.exhausted(self.policy.max_attempts):
            raise gave_up(failure, out_of_memory=progress.out_of_memory) from failure


def _attempt_start(
    request: ChoiceRequest, progress: Progress, choice: RouteDecision, note: AttemptRecord
) -> AttemptStart:
    return AttemptStart(
        attempt_id=progress.rid,
        index=request.index,
        number=progress.number,
        requested_at=progress.requested_at,
        decided_s=progress.decided_s,
        choice=choice,
        note=note,
        sampling=request.sampling,
        model=request.model,
    )


def _one_worker(choice: RouteDecision) -> RouteDecision:
    """A prompt alone is the prefill worker's work, where there is one."""
    return (
        choice
        if choice.prefill is None
        else replace(choice, decode=choice.prefill, prefill=None, placement=Placement.ALONE)
    )
