"""Places attempts: queries the router, waits while no worker is available, and releases reservations.

    first attempt    through the gateway's queue (`Admission`), with the other choices of its prompt where it fits
    session          only on the worker that keeps it
    further ones     charged to the `RetryBudget` if a live worker failed them; on workers where the choice failed
                     before only if no other is left
    migration        to another worker; without one the request stays where it is

`RetryBudget` bounds retries, so that overloaded workers do not get more and more load. It is a token bucket over all
requests: a retry of an attempt that a live worker failed costs one token. Tokens are added per new choice (`share`) and
per second (`per_second`), up to `capacity`. A choice costs nothing if its worker died or migrated it, because its load
was accepted before.
"""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tandem_engine.base.clock import Clock
from tandem_services.common.errors import ApiError, unavailable
from tandem_services.gateway.dispatch.attempt import Attempt
from tandem_services.gateway.dispatch.choice_run import ChoiceRun, RetryPolicy, no_workers
from tandem_services.gateway.dispatch.sessions import session_lost
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.queueing.admission import Admission
from tandem_services.gateway.queueing.lanes import Lane
from tandem_services.gateway.queueing.slo_admission import SloAdmission
from tandem_services.router.decision import (
    MemberProofs,
    NoWorkersError,
    Placement,
    RouteDecision,
    RouteQuery,
    WorkerView,
)
from tandem_services.router.registry import WorkerState
from tandem_services.router.starting import StartingWorker
from tandem_services.router.tickets import RouteTicket


class PairChooser(Protocol):
    """What the gateway needs of the router."""

    async def choose(self, query: RouteQuery) -> RouteDecision:
        """Reserve and return the best workers. Raises `NoWorkersError` when no worker can take it now."""
        ...

    async def redeem(self, ticket_id: str, query: RouteQuery) -> RouteDecision | None:
        """What a stand-alone router chose and reserved for this prompt; None when that does not hold."""
        ...

    async def stay(self, query: RouteQuery, incarnation: str) -> RouteDecision:
        """Reserve and return this worker alone. Raises `NoWorkersError` when it is gone."""
        ...

    async def relocate(self, query: RouteQuery, leaving: WorkerView) -> RouteDecision:
        """Reserve and return the worker that takes over from `leaving`, which is the decision's prefill worker.

        Raises `NoWorkersError` when no worker has capacity.
        """
        ...

    async def release(self, decision: RouteDecision) -> None:
        """Give the reservation back. This or `release_soon` is called exactly once per decision."""
        ...

    def release_soon(self, decision: RouteDecision) -> None:
        """Give the reservation back, without a wait."""
        ...

    def prefill_rate(self, model: str) -> float:
        """Prompt tokens per second of all workers that compute prompts of `model`, from memory; 0 without any."""
        ...

    def workers(self) -> tuple[WorkerView, ...]:
        """All live workers, from memory."""
        ...

    def peers(self, worker: WorkerView) -> tuple[WorkerView, ...]:
        """Those of the fleet of `worker`: it exchanges KV with no others."""
        ...

    def offered(self) -> tuple[WorkerView, ...]:
        """Those of them that new requests may be sent to."""
        ...

    def starting(self) -> tuple[StartingWorker, ...]:
        """Those that are not registered yet, from memory."""
        ...

    def rely_on(self, proofs: MemberProofs) -> None:
        """From now on choose only workers that prove to be members."""
        ...

    def mark_dead(self, incarnation: str) -> None:
        """The connection to this worker was lost: do not choose it for a while, whatever the registry contains."""
        ...

    def mark_alive(self, incarnation: str) -> None:
        """It has answered since: choose it again, if the registry has it."""
        ...

    def note_refusal(self, incarnation: str, state: WorkerState) -> None:
        """It has rejected a request because it is in `state`: do not choose it again before a newer view."""
        ...


@dataclass(kw_only=True, slots=True)
class RetryBudget:
    """One per model service."""

    clock: Clock
    share: float = 0.2
    per_second: float = 5.0
    capacity: float = 64.0
    """Full at the start: many requests of one worker may fail at once."""
    _tokens: float = field(init=False)
    _counted_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._counted_at = self.capacity, self.clock.now()

    def choice_began(self) -> None:
        self._add(self.share)

    def spend(self) -> bool:
        """Take a token. False when there is none."""
        now = self.clock.now()
        self._add((now - self._counted_at) * self.per_second)
        self._counted_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    @property
    def wait_s(self) -> float:
        """Until there may be a token again, if no other retry takes it."""
        return 1 / self.per_second

    def _add(self, tokens: float) -> None:
        self._tokens = min(self.capacity, self._tokens + tokens)


logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Placing:
    """One per model service."""

    chooser: PairChooser
    clock: Clock
    policy: RetryPolicy
    metrics: GatewayMetrics
    budget: RetryBudget
    admission: Admission
    objectives: SloAdmission

    async def choose(self, run: ChoiceRun) -> RouteDecision:
        """Workers for the next attempt, reserved. Raises `ApiError` when there are none in time."""
        if run.unpaid:
            await self._pay(run)
        run.requested_at = self.clock.now()
        if run.number == 0 and self.admission.binding.queue:
            run.expected_wait_s = self.admission.binding.expected_wait_s(
                tenant=run.request.caller.tenant,
                priority=run.request.plan.priority,
                prompt_tokens=len(run.choice.input_ids),
            )
        try:
            decision = await self._choose_once(run)
        except NoWorkersError as error:
            run.record.lacked_workers = True
            return await self._await_worker(run, error)
        if run.attempts == 0:
            run.record.admission_s = self.clock.now() - run.requested_at
            run.record.lacked_workers = self.admission.binding.has_lacked_workers_since(run.requested_at)
        return decision

    async def finds_place(self, attempt: Attempt, run: ChoiceRun) -> bool:
        """Whether the worker of `attempt` requests its migration and another has capacity: the next attempt runs there.

        Without capacity the request stays where it is, until the next request for its migration.
        """
        leaving, attempt.leaving = attempt.leaving, None
        if leaving is None or len(run.received) >= run.choice.sampling.max_tokens:
            return False
        run.requested_at = self.clock.now()
        try:
            place = await self._timed(run, self.chooser.relocate(self._query(run), leaving))
        except NoWorkersError:
            return False
        run.move_to(place, leaving)
        fields = {**run.about, "worker": leaving.incarnation, "to": place.decode.incarnation}
        logger.info("migrating request", extra={"fields": fields})
        return True

    def release(self, decision: RouteDecision) -> None:
        """An attempt is over: the reservation goes back."""
        self.chooser.release_soon(decision)
        self.admission.freed(decision.decode.incarnation, decision.cell)

    async def _pay(self, run: ChoiceRun) -> None:
        """For another attempt. A stream that has begun waits for its turn; what has not is refused with a 503."""
        while run.unpaid and not self.budget.spend():
            if not run.received:
                self.metrics.retries_refused.inc()
                raise unavailable("The model workers are failing. Try again later.", retry_after=self.budget.wait_s)
            await asyncio.sleep(self.budget.wait_s)
        run.unpaid = False

    async def _await_worker(self, run: ChoiceRun, error: NoWorkersError) -> RouteDecision:
        # There is no worker that could be silent.
        run.silent_since = None
        give_up_at = self.clock.now() + self.policy.recovery_s
        while self.clock.now() < give_up_at:
            await asyncio.sleep(self.policy.poll_s)
            if not self.chooser.workers():
                continue
            try:
                return await self._choose_once(run)
            except NoWorkersError as again:
                error = again
        raise no_workers(error) from error

    async def _keeper(self, run: ChoiceRun, query: RouteQuery, incarnation: str) -> RouteDecision:
        """For a turn of an existing session, which no other worker can serve."""
        try:
            return await self._timed(run, self.chooser.stay(query, incarnation))
        except NoWorkersError as error:
            raise session_lost() from error

    async def _choose_once(self, run: ChoiceRun) -> RouteDecision:
        query, turn = self._query(run), run.request.plan.turn
        if turn is not None and turn.keeper is not None:
            return await self._keeper(run, query, turn.keeper)
        if run.attempts == 0:
            return await self._admitted(run, query)
        try:
            return await self._choose_suitable(run, query)
        except NoWorkersError:
            if not run.failed:
                raise
        # A live worker that has failed this request once is better than none; the dead stay excluded, and so do those
        # that have just sent it away.
        now = self.clock.now()
        away = frozenset(incarnation for incarnation, until in run.sent_away.items() if now < until)
        return await self._choose_suitable(run, replace(query, exclude=away))

    async def _admitted(self, run: ChoiceRun, query: RouteQuery) -> RouteDecision:
        """For the first attempt; with the other choices of its prompt, if there are any."""
        request = run.request
        if request.record.objectives is not None:
            self._judge_wait(run, query)

        async def apart(avoided: frozenset[str]) -> RouteDecision:
            """Without the workers that requests before it wait for; a ticket may be for one of them."""
            return await self._judged(run, replace(query, exclude=query.exclude | avoided), None)

        return await self.admission.admit(
            partial(self._judged, run, query, request.ticket),
            tenant=request.caller.tenant,
            priority=request.plan.priority,
            prompt_tokens=len(query.token_ids),
            lane=Lane(adapter=query.adapter, registered=query.registered, ask_apart=apart),
            arrivals=run.arrivals,
        )

    def _judge_wait(self, run: ChoiceRun, query: RouteQuery) -> None:
        """Raises `ApiError` 429 for a request that its wait alone would make miss its objectives."""
        try:
            self.objectives.judge_wait(
                run.request.record.objectives,
                tenant=run.request.caller.tenant.name,
                priority=run.request.plan.priority,
                wait_s=run.expected_wait_s,
                work_s=partial(self._work_s, query),
            )
        except ApiError:
            self.admission.binding.note_rejected(len(query.token_ids))
            raise

    async def _judged(self, run: ChoiceRun, query: RouteQuery, ticket: RouteTicket | None) -> RouteDecision:
        """Where the other choices of its prompt are, if there are any and it fits. Raises `ApiError` 429 where that
        cannot meet the objectives of the request."""
        if run.route is None:
            decision = await self._choose_suitable(run, query, ticket)
        else:
            beside = partial(self._choose_suitable, run)
            alone = partial(self._choose_suitable, run, query, ticket)
            decision = await run.route.choose(self.chooser, query, beside, alone)
        objectives = run.request.record.objectives
        if objectives is None:
            return decision
        rejection = self.objectives.judge(
            decision,
            objectives,
            tenant=run.request.caller.tenant.name,
            priority=run.request.plan.priority,
            waited_s=self.clock.now() - run.requested_at,
            work_s=partial(self._work_s, query),
        )
        if rejection is None:
            return decision
        self.chooser.release_soon(decision)
        raise rejection

    def _work_s(self, query: RouteQuery) -> float:
        """What the prompt takes of the whole fleet."""
        rate = self.chooser.prefill_rate(query.model)
        return len(query.token_ids) / rate if rate > 0.0 else 0.0

    def _query(self, run: ChoiceRun) -> RouteQuery:
        choice, plan, record = run.choice, run.request.plan, run.request.record
        adapter = plan.adapter
        return RouteQuery(
            request_id=run.rid,
            model=record.model,
            # Choices of one prompt share the object, and so the digests of its blocks.
            token_ids=(*choice.input_ids, *run.received) if run.received else choice.input_ids,
            cache_salt=plan.cache_salt,
            adapter=b"" if adapter is None else adapter.digest,
            registered=adapter is not None and bool(adapter.source),
            adapter_size=0 if adapter is None else adapter.size,
            max_tokens=choice.sampling.max_tokens - len(run.received),
            exclude=frozenset(run.failed),
            compat_hash=None if run.written_by is None else self._kind_wanted(run.written_by),
            session_key=plan.session_key,
            # A slow worker would miss its objectives, or get all choices of its prompt.
            may_probe=run.route is None
            and (record.objectives is None or not self.objectives.may_reject(plan.priority)),
        )

    def _kind_wanted(self, writer: WorkerView) -> str | None:
        """Weights that begin an output continue it [same-kind-paired], unless `writer`, their worker, has been given
        others since."""
        now = next((worker for worker in self.chooser.workers() if worker.incarnation == writer.incarnation), writer)
        return writer.compat_hash if now.compat_hash == writer.compat_hash else None

    async def _choose_suitable(
        self, run: ChoiceRun, query: RouteQuery, ticket: RouteTicket | None = None
    ) -> RouteDecision:
        """Not one whose decode worker would compute the prompt for want of others, when that is not wanted."""
        chosen = None if ticket is None else ticket.take()
        decision = None if chosen is None else await self.chooser.redeem(chosen, query)
        if decision is None:
            decision = await self._timed(run, self.chooser.choose(query))
        if decision.placement is not Placement.DEGRADED or self.policy.prefill_fallback:
            return decision
        self.chooser.release_soon(decision)
        raise NoWorkersError("no prefill worker is left", retry_after=1.0)

    async def _timed(self, run: ChoiceRun, asked: Awaitable[RouteDecision]) -> RouteDecision:
        began = self.clock.now()
        decision = await asked
        run.decided_s = self.clock.now() - began
        self.metrics.decision.observe(run.decided_s)
        return decision
