"""Runs `LateBinding` in real time: each new request waits here until it has workers or is rejected.

While requests wait, one task iterates: at once after each admission, otherwise when a request has ended, when a new
request goes before all that wait, or when a short interval has passed.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem_services.common.metrics import PROMPT_TOKENS, REQUEST_SECONDS, MetricFamilies
from tandem_services.common.recording import recording
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.observe.metrics import MODEL
from tandem_services.gateway.queueing.lanes import Lane
from tandem_services.gateway.queueing.late_binding import NEXT_S, LateBinding, QueueFigures
from tandem_services.gateway.queueing.queue_entry import Ask, QueueEntry
from tandem_services.router.decision import OtherCell, RouteDecision


@dataclass(slots=True)
class OutputCharge:
    """Output tokens of one tenant that have come in this iteration of the event loop: charged together after it."""

    tenant: Tenant
    charge: Callable[[Tenant, int], None]
    tokens: int = 0

    def begin(self) -> None:
        """Call before the first tokens of an iteration."""
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        tokens, self.tokens = self.tokens, 0
        self.charge(self.tenant, tokens)


@dataclass(kw_only=True, slots=True)
class Admission:
    """One per model service; belongs to its event loop."""

    binding: LateBinding
    """Receives charges. The end of a request is reported to `Admission` instead: a queued request may wait for it."""
    _charges: dict[str, OutputCharge] = field(default_factory=dict)
    """By tenant. One that leaves the key file leaves its charge, of a few hundred bytes."""
    _pump: "asyncio.Task[None] | None" = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(
        self,
        ask: Ask,
        *,
        tenant: Tenant,
        priority: int,
        prompt_tokens: int,
        lane: Lane | None = None,
        arrivals: asyncio.Semaphore | None = None,
    ) -> RouteDecision:
        """Workers with room for a new request, reserved for it; may take a while.

        `lane`: how it passes others. `arrivals`: bounds those of one request that query the router on arrival. Once one
        of them has found no room the next take seats, instead of a query each that turns of the queue wait behind.

        Raises:
            ApiError: 429 when its tenant's other requests fill the queue; 503 when it is full, or no worker takes it in
                time.
        """
        decision: asyncio.Future[RouteDecision] = asyncio.get_running_loop().create_future()
        entry = self.binding.entry(
            ask, decision, tenant=tenant, priority=priority, prompt_tokens=prompt_tokens, lane=lane
        )
        if arrivals is None:
            found = await self.binding.arrive(entry)
        else:
            async with arrivals:
                found = await self.binding.arrive(entry)
        return await self._wait(entry, decision) if found is None else found

    def freed(self, worker: str = "", cell: OtherCell | None = None) -> None:
        """As `LateBinding.freed`."""
        self.binding.freed(worker, cell)
        if self.binding.queue:
            self._changed.set()

    def output_charge(self, tenant: Tenant) -> OutputCharge:
        """What its attempts share."""
        charge = self._charges.get(tenant.name)
        if charge is None or charge.tenant is not tenant:
            charge = self._charges[tenant.name] = OutputCharge(tenant, self.binding.charge_output)
        return charge

    async def close(self) -> None:
        """At shutdown: no request waits any more."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        await self.binding.settle()

    async def _wait(self, entry: QueueEntry, decision: "asyncio.Future[RouteDecision]") -> RouteDecision:
        if self.binding.has_overtaken(entry):
            asyncio.get_running_loop().call_later(NEXT_S, self._try_now, entry)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="admission")
        try:
            return await decision
        except asyncio.CancelledError:
            # It may have been admitted in the very moment in which its client left.
            if not decision.cancelled() and decision.exception() is None:
                self.binding.give_back(decision.result())
            raise
        finally:
            self.binding.leave(entry)

    def _try_now(self, entry: QueueEntry) -> None:
        if self.binding.is_next(entry):
            self._changed.set()

    async def _run(self) -> None:
        """While requests wait."""
        while self.binding.queue:
            if not await self.binding.turn():
                await self._pause()

    async def _pause(self) -> None:
        """Until something has changed, or a moment has passed."""
        try:
            async with asyncio.timeout(self.binding.policy.poll_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()


class QueueMetrics:
    """The series of one model service's queue."""

    def __init__(self, families: MetricFamilies, *, model: str) -> None:
        self._model = model
        self._waiting = families.gauge(
            "tandem_gateway_num_requests_waiting",
            "Choices in the queue of this gateway, and requests of adapters that no worker has read yet",
            [MODEL],
        ).labels(model_name=model)
        self._by_tenant = families.gauge(
            "tandem_gateway_tenant_requests_waiting",
            "Choices in the queue of this gateway, by tenant",
            [MODEL, "tenant"],
        )
        self.wait = families.histogram(
            "tandem_gateway_queue_wait_seconds",
            "Time in this gateway's queue, of choices that were sent to a worker; 0 for those sent at once",
            [MODEL],
            buckets=(0.0, *REQUEST_SECONDS),
        ).series(model)
        self._refused = families.counter(
            "tandem_gateway_queue_refusals",
            "Choices rejected by the queue: full and pushed_out at its limit; no_worker and no_room at the timeout",
            [MODEL, "reason"],
        )
        start_waits = families.histogram(
            "tandem_gateway_worker_start_wait_seconds",
            "Time in this gateway's queue, of choices that waited for a starting worker; outcome: served or refused",
            [MODEL, "outcome"],
            buckets=REQUEST_SECONDS,
        )
        self._start_waits = {True: start_waits.series(model, "served"), False: start_waits.series(model, "refused")}
        self._asked = families.counter(
            "tandem_gateway_asked_prompt_tokens", "Prompt tokens of choices that arrived at the queue", [MODEL]
        ).series(model)
        self._gaps = families.counter(
            "tandem_gateway_arrival_gap_square_seconds",
            "Squares of the times between arrivals of choices at the queue: with their number, how bursty they are",
            [MODEL],
        ).series(model)
        self._uncached = families.histogram(
            "tandem_gateway_uncached_prompt_tokens",
            "Prompt tokens that the selected worker was predicted to compute, of choices that were sent to one",
            [MODEL],
            buckets=PROMPT_TOKENS,
        ).series(model)
        self._predicted = families.counter(
            "tandem_gateway_predicted_cached_tokens",
            "Arrived prompt tokens that were predicted to be cached on the selected worker",
            [MODEL],
        ).series(model)
        self._tokens = families.gauge(
            "tandem_gateway_waiting_prompt_tokens", "Prompt tokens of choices in the queue of this gateway", [MODEL]
        ).labels(model_name=model)
        self._oldest = families.gauge(
            "tandem_gateway_oldest_wait_seconds",
            "Wait so far of the oldest choice in the queue of this gateway",
            [MODEL],
        ).labels(model_name=model)
        self._held = families.gauge(
            "tandem_gateway_num_requests_held",
            "Choices that wait at this gateway because there is no worker, or none has read their adapter yet",
            [MODEL],
        ).labels(model_name=model)
        self._shown: set[str] = set()
        self._queued = self._expecting = 0

    def watch(self, figures: Callable[[], QueueFigures]) -> None:
        """Collect what each scrape reports."""
        self._tokens.set_function(lambda: figures().prompt_tokens)
        self._oldest.set_function(lambda: figures().oldest_wait_s)
        self._held.set_function(lambda: figures().held + self._expecting)

    def expecting(self, requests: int) -> None:
        """How many wait for an adapter that no worker has read yet: these are held, and in no queue."""
        self._expecting = requests
        self._waiting.set(self._queued + requests)

    @recording
    def note_demand(self, prompt_tokens: int, *, gap_s: float) -> None:
        """A request has come, so long after the one before it."""
        self._asked.inc(prompt_tokens)
        self._gaps.inc(gap_s * gap_s)

    @recording
    def admitted(self, wait_s: float, *, prompt_tokens: int, matched_tokens: int) -> None:
        """It has a worker, after `wait_s`, which is predicted to have `matched_tokens` of its tokens cached."""
        self.wait.observe(wait_s)
        self._predicted.inc(matched_tokens)
        self._uncached.observe(max(1, prompt_tokens - matched_tokens))

    @recording
    def start_awaited(self, wait_s: float, *, served: bool) -> None:
        """It has waited for a worker that starts, `wait_s` altogether, and was `served` by one."""
        self._start_waits[served].observe(wait_s)

    @recording
    def refused(self, reason: str) -> None:
        self._refused.series(self._model, reason).inc()

    @recording
    def waiting(self, lengths: Mapping[str, int]) -> None:
        """How many wait, by tenant."""
        self._queued = sum(lengths.values())
        self._waiting.set(self._queued + self._expecting)
        for tenant in self._shown - lengths.keys():
            self._by_tenant.labels(model_name=self._model, tenant=tenant).set(0)
        for tenant, length in lengths.items():
            self._by_tenant.labels(model_name=self._model, tenant=tenant).set(length)
        self._shown |= lengths.keys()
