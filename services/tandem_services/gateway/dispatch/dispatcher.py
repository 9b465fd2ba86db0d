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
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, Peer, PrefixFetch, attempt_id
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError
from tandem_services.gateway.dispatch.attempt import Attempt, AttemptFailedError, FailureCause, TokenSink
from tandem_services.gateway.dispatch.choice_run import (
    LEAVING,
    LOST,
    ChoiceRun,
    RetryPolicy,
    at_fault,
    gave_up,
    turn_failed,
)
from tandem_services.gateway.dispatch.engine_client import EngineConnection
from tandem_services.gateway.dispatch.engine_pool import EnginePool
from tandem_services.gateway.dispatch.placement import Placing
from tandem_services.gateway.dispatch.quarantine import Quarantine, Suspects, quarantined
from tandem_services.gateway.observe.explain import AttemptRecord
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.observe.predictions import Predictions
from tandem_services.gateway.observe.tracing import UNTRACED, AttemptStart, AttemptTrace
from tandem_services.gateway.output.token_sequence import Accepted, Consume
from tandem_services.gateway.queueing.admission import OutputCharge
from tandem_services.router.calibration import Prediction
from tandem_services.router.decision import Placement, PlannedFetch, RouteDecision, WorkerView


def request_alone(run: ChoiceRun, trace: AttemptTrace, *, deadline_s: float) -> GenerateRequest:
    """The request for the generating worker; `deadline_s` from now."""
    choice, plan = run.choice, run.request.plan
    return GenerateRequest(
        rid=run.rid,
        input_ids=choice.input_ids,
        sampling=choice.sampling.without_prompt_logprobs() if run.scored else choice.sampling,
        resume_ids=tuple(run.received),
        cache_salt=plan.cache_salt,
        adapter=plan.adapter,
        priority=plan.priority,
        tenant=run.request.caller.tenant.name,
        group=run.group,
        pooling=plan.pooling,
        session=None if plan.turn is None else plan.turn.ref,
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
    return msgspec.structs.replace(request, session=None, handoff=msgspec.structs.replace(handoff, keeps_session=True))


def _without_end(request: GenerateRequest, context_length: int) -> GenerateRequest:
    """The same next token, which does not end the output: if it did, no KV would be sent, and no session be kept.

    It still does where `context_length` has no room for another one. What completes a grammar is handed over all the
    same (`Handoff.keeps_session`).
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
    alone: GenerateRequest, decision: RouteDecision, generation: int, *, moving: bool
) -> tuple[GenerateRequest, GenerateRequest]:
    """For the decode worker and for the prefill worker of `decision`, which is for a pair."""
    assert decision.prefill is not None, "a worker alone hands nothing over"
    receive = with_handoff(alone, HandoffSide.RECEIVE, generation, peer=decision.prefill)
    computing = with_fetch(alone, decision.fetch)
    if alone.session is not None:
        computing = _without_end(computing, decision.prefill.context_length)
    return receive, with_handoff(computing, HandoffSide.SEND, generation, peer=decision.decode, moving=moving)


def _address(worker: WorkerView) -> Peer:
    """Where other engines reach it."""
    return Peer(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        endpoint=worker.peer_endpoint,
        compat_hash=worker.compat_hash,
        release=worker.release,
    )


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class _Pouring:
    """Notes tokens of one attempt on their way to the sink of the choice, as `Dispatcher._note` does. Implements
    `TokenSink`."""

    run: ChoiceRun
    decode: WorkerView
    traced: Callable[[int], None] | None
    charge: OutputCharge
    is_ready: Callable[[], bool]
    """Of the choice's sink, as is `pass_on`."""
    pass_on: Callable[[list[int], float], bool]

    def take(self, token_ids: list[int], at: float) -> bool:
        self.run.receive_tokens(token_ids, by=self.decode)
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

    async def run(self, run: ChoiceRun, consume: Consume, sink: TokenSink | None = None) -> None:
        """`consume` gets new tokens as they come, the last of them with the finish. Cancel it to abort.

        With a `sink`, ordinary tokens may go there instead. Tokens without any for `consume` then say that it has taken
        some that need a look.

        Raises `ApiError` when no attempt succeeded, and what `consume` raises.
        """
        request, choice, plan = run.request, run.choice, run.request.plan
        if plan.turn is None or plan.turn.begins:
            self.quarantine.check(plan, choice)
        self.placing.budget.choice_began()
        self.metrics.choices.inc()
        began = self.clock.now()
        while len(run.received) < choice.sampling.max_tokens:
            place, run.place = run.place, None
            run.rid = attempt_id(request.record.request_id, choice.index, run.number)
            decision = place or await self.placing.choose(run)
            workers = decision if plan.pooling is None else _one_worker(decision)
            note = run.record.begin_attempt(
                workers,
                predicted=self._predicted(run, decision),
                resumed_tokens=len(run.received),
                began_s=self.clock.now() - began,
            )
            trace: AttemptTrace = UNTRACED
            if request.trace is not UNTRACED:
                trace = request.trace.attempt(_attempt_start(run, decision, note))
            attempt = Attempt(
                run.rid,
                len(run.received),
                run.record,
                began=self.clock.now(),
                awaits_prompt=choice.sampling.prompt_logprobs is not None and not run.scored,
            )
            try:
                if plan.turn is not None:
                    await plan.turn.bind(workers.decode.incarnation, about=run.about)
                await self._enter(run, attempt, workers)
                self._send(run, attempt, workers, trace, moving=place is not None)
                pouring = None if sink is None else self._pouring(run, workers.decode, trace, sink)
                while True:
                    waiting = attempt.next(pouring) if run.silent_since is None else self._next(run, attempt)
                    accepted = await waiting
                    self._note(run, accepted, workers.decode, trace)
                    if accepted.finish is not None:
                        note.outcome = "finished"
                    if await consume(accepted) or accepted.finish is not None:
                        return
                    if attempt.leaving is not None and await self.placing.finds_place(attempt, run):
                        note.outcome = MOVED
                        break
            except AttemptFailedError as failure:
                note.outcome = failure.cause.value
                if failure.cause in LOST:
                    run.note_silence(attempt.quiet_since)
                await self._note_failure(run, workers, failure)
            except ApiError:
                note.outcome = "refused"
                raise
            finally:
                attempt.close()
                run.end_trial()
                self._correct_charge(run, decision)
                self._ended(decision, note, at=self.clock.now() - began)
                trace.ended()
        # The worker died between its last token and its finish.
        await consume(Accepted([], [], Finish(reason=FinishReason.LENGTH)))

    def _note(self, run: ChoiceRun, accepted: Accepted, decode: WorkerView, trace: AttemptTrace) -> None:
        """New tokens of `decode`, before the choice gets them."""
        run.receive(accepted, by=decode)
        trace.received(len(accepted.token_ids))
        self.placing.admission.binding.charge_output(run.request.caller.tenant, len(accepted.token_ids))

    def _pouring(self, run: ChoiceRun, decode: WorkerView, trace: AttemptTrace, sink: TokenSink) -> _Pouring:
        return _Pouring(
            run=run,
            decode=decode,
            traced=None if trace is UNTRACED else trace.received,
            charge=self.placing.admission.output_charge(run.request.caller.tenant),
            is_ready=sink.is_ready,
            pass_on=sink.take,
        )

    def _predicted(self, run: ChoiceRun, decision: RouteDecision) -> Prediction | None:
        """Of a first attempt to generate."""
        if run.number or run.request.plan.pooling is not None:
            return None
        return self.predictions.predict(decision, gateway_wait_s=run.expected_wait_s)

    def _ended(self, decision: RouteDecision, note: AttemptRecord, *, at: float) -> None:
        """An attempt is over, however it ended; `at` seconds after the choice began."""
        if note.outcome == "running":
            note.outcome = "stopped"
        note.ended_s = at
        self.metrics.attempt_ended(note.outcome)
        self.placing.release(decision)

    def _correct_charge(self, run: ChoiceRun, decision: RouteDecision) -> None:
        """The tenant was charged for the prompt of each choice by what the router predicted to be cached. Once, for the
        first attempt."""
        if run.number == 0 and run.record.cached_tokens is not None:
            self.placing.admission.binding.correct_prompt(
                run.request.caller.tenant,
                len(run.choice.input_ids),
                predicted=decision.matched_tokens,
                cached=run.record.cached_tokens,
            )

    async def _enter(self, run: ChoiceRun, attempt: Attempt, workers: RouteDecision) -> None:
        """Note where an attempt goes whose request may have killed a worker; it may have to wait its turn."""
        run.began_at = len(run.received)
        both = [worker.incarnation for worker in (workers.decode, workers.prefill) if worker is not None]
        run.trial = await self.suspects.enter(run.suspicion, run.rid, both)
        if run.suspicion.needs_trial:
            # The wait was no worker's silence.
            attempt.began, run.silent_since = self.clock.now(), None

    async def _next(self, run: ChoiceRun, attempt: Attempt) -> Accepted:
        """The next output of `attempt`, after lost workers: a silent one has only the time that they left."""
        assert run.silent_since is not None, "no worker was lost"
        left = run.silent_since + self.policy.silence_s - self.clock.now()
        try:
            async with asyncio.timeout(left):
                accepted = await attempt.next()
        except TimeoutError as error:
            if attempt.quiet_since == attempt.began:
                raise attempt.gone_silent() from error
            run.silent_since = None
            return await attempt.next()
        run.silent_since = None
        return accepted

    def _send(
        self, run: ChoiceRun, attempt: Attempt, decision: RouteDecision, trace: AttemptTrace, *, moving: bool
    ) -> None:
        left_s = max(run.request.deadline - self.clock.now(), 0.0)
        alone = request_alone(run, trace, deadline_s=left_s)
        if decision.prefill is None:
            attempt.submit(self._connect(decision.decode), with_fetch(alone, decision.fetch), is_prefill=False)
            return
        receive, send = pair_of_requests(alone, decision, run.number, moving=moving)
        attempt.submit(self._connect(decision.decode), receive, is_prefill=False)
        withheld = None if receive.session is None else self._may_end(receive.sampling)
        attempt.submit(self._connect(decision.prefill), send, is_prefill=True, withheld=withheld)

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

    async def _note_failure(self, run: ChoiceRun, decision: RouteDecision, failure: AttemptFailedError) -> None:
        """Decide whether there is another attempt; raises `ApiError` when there is none."""
        run.suspicion.clear_losses(worker.incarnation for worker in self.placing.chooser.workers())
        run.note_failure(failure, alone=self.suspects.alone(failure.incarnation))
        run.failed.add(at_fault(decision, failure))
        if (state := LEAVING.get(failure.code or "")) is not None:
            self.placing.chooser.note_refusal(failure.incarnation, state)
            run.sent_away[failure.incarnation] = self.clock.now() + AWAY_S
        fields = {
            **run.about,
            "attempt": run.attempts,
            "cause": failure.cause.value,
            "worker": failure.incarnation,
            "code": failure.code,
        }
        logger.warning("attempt failed", extra={"fields": fields})
        turn = run.request.plan.turn
        if turn is not None and not turn.begins:
            raise turn_failed(failure) from failure
        suspected = run.suspicion.needs_trial or run.exhausted(self.policy.max_attempts)
        if failure.cause is FailureCause.WORKER_LOST and suspected:
            killed = await self.quarantine.killed_for_memory({*run.suspicion.lost, failure.incarnation})
            run.note_memory_kills(killed, last=failure.incarnation)
        if run.suspicion.is_poison:
            self.quarantine.quarantine(run.request.plan, run.choice, about=run.about, workers=run.suspicion.lost)
            raise quarantined() from failure
        if not failure.retryable or run.exhausted(self.policy.max_attempts):
            raise gave_up(failure, out_of_memory=run.out_of_memory) from failure


def _attempt_start(run: ChoiceRun, decision: RouteDecision, note: AttemptRecord) -> AttemptStart:
    return AttemptStart(
        attempt_id=run.rid,
        index=run.choice.index,
        number=run.number,
        requested_at=run.requested_at,
        decided_s=run.decided_s,
        decision=decision,
        note=note,
        sampling=run.choice.sampling,
        model=run.request.record.model,
    )


def _one_worker(decision: RouteDecision) -> RouteDecision:
    """A prompt alone is the prefill worker's work, where there is one."""
    return (
        decision
        if decision.prefill is None
        else replace(decision, decode=decision.prefill, prefill=None, placement=Placement.ALONE)
    )
