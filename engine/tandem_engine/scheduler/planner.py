"""What the next step computes.

    1. sweep      finished requests leave the running batch; ending without a step in flight take effect
       back       swapped requests run again while all running ones fit
    2. decodes    requests that may take another token; pages for all of them, or some are retracted
    3. extends    the chunked request first, then the queue in order, while tokens and pages last. A prompt of another
                  tenant goes before the chunked request if its turn has come
    4. together   in one MIXED step if allowed, else prefill before decode

Prefill and decode cannot starve each other. Every running request that can take a token has one in every MIXED step,
and prompts have at least what those leave of the token budget, never less than one token. Without MIXED, at most
`MAX_PREFILL_STREAK` steps of prompts run before running requests have theirs.

A plan moves requests between queues and takes memory, but uses no device; the result states what to launch. Reasons
why a request did not fit are not kept: the next plan checks again [admission-not-latched].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from tandem_engine.base.clock import Clock
from tandem_engine.config import SchedulerConfig
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.outputs import CacheHits
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.fault_isolation import Isolation
from tandem_engine.scheduler.finishing import Endings
from tandem_engine.scheduler.policies import Fcfs, Policy, PromptDelay
from tandem_engine.scheduler.prefill_adder import (
    Admission,
    Extend,
    PrefillAdder,
    PromptBudget,
    overtaken_reserve,
    reserved_in_windows,
    reserved_pages,
)
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv
from tandem_engine.scheduler.retraction import NewTokenRatio, Preemption, Retraction, Return, Room, Swapping
from tandem_engine.scheduler.sessions import Sessions
from tandem_engine.scheduler.speculation import Speculation


def cache_hits(req: Request, page_size: int) -> CacheHits:
    """Of a request that holds its KV and has its `cached_tokens`, before its first step.

    The device has what comes first, then host memory, then files; what was fetched is on the device by now, at its end.
    What a resumed request finds of its output is not counted.
    """
    loaded = req.held_kv.loaded
    host, disk = loaded.host * page_size, loaded.disk * page_size
    on_device = min(req.cached_tokens, req.launched_len - host - disk)
    slower = req.cached_tokens - on_device
    fetched = 0 if req.fetched is None else req.fetched.pages * page_size
    return CacheHits(
        host=min(host, slower),
        disk=min(disk, max(0, slower - host)),
        fetched=min(fetched, on_device),
        unusable=max(0, min(req.held_kv.known_len, req.prompt_len) - req.cached_tokens),
    )


MAX_PREFILL_STREAK = 4
"""Steps without a decode that a running request endures while MIXED is off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Work for one step; at least one of the two is not empty."""

    extends: Sequence[Extend]
    decodes: Sequence[Request]


class Hold(Enum):
    """Why there is nothing to launch."""

    NOTHING = "nothing"
    SETTLE_FIRST = "settle_first"
    """Plan again when the step in flight has settled."""
    TAKE_IN_FIRST = "take_in_first"
    """The same, and after requests that come until then have been taken in."""


def _goes_before(req: Request, chunked: Request) -> bool:
    """Whether `req`, the head of the queue, has its turn before the next chunk of `chunked`."""
    if req.tenant == chunked.tenant or req.priority < chunked.priority:
        return False
    return req.is_behind or req.turn <= chunked.turn + chunked.launched_len


@dataclass(kw_only=True, slots=True)
class Planner:
    """Chooses each step's requests."""

    config: SchedulerConfig
    memory: KvMemory
    queues: Queues
    policy: Policy
    endings: Endings
    retraction: Retraction
    sessions: Sessions
    swapping: Swapping
    isolation: Isolation
    ratio: NewTokenRatio
    clock: Clock
    tally: Tally
    preemption: Preemption | None = None
    """Only under a policy that preempts."""
    speculation: Speculation | None = None
    delay: PromptDelay | None = None
    """Only with a `scheduler_delay_factor`."""
    head_waits: Admission = Admission.OK
    """Why the last plan did not admit the first that still waits; for the statistics alone [admission-not-latched]."""
    computes_prompts: bool = False
    """The last plan had prompts."""
    prefill_streak: int = 0
    """Steps in a row that made running requests wait."""

    def plan(self, *, in_flight: bool) -> StepPlan | Hold:
        """`in_flight`: a step was launched whose result is not settled."""
        if in_flight and self._may_be_overtaken():
            return Hold.TAKE_IN_FIRST
        if self.delay is not None:
            self.delay.begin_plan()
        plan = self._plan(in_flight=in_flight)
        self.computes_prompts = isinstance(plan, StepPlan) and bool(plan.extends)
        if self.delay is not None:
            self.delay.planned(prompts=self.computes_prompts)
        return plan

    def _may_be_overtaken(self) -> bool:
        """Whether the next step has prompts that one of another tenant, which comes during this step, goes before."""
        more = self.queues.chunked is not None or (self.computes_prompts and len(self.queues.waiting) > 0)
        return more and self._is_shared()

    def _plan(self, *, in_flight: bool) -> StepPlan | Hold:
        self.sweep()
        if self.isolation.active and (trial := self.isolation.trial()):
            return StepPlan(extends=trial, decodes=())
        retracted = self.tally.retracted
        if self.preemption is not None and len(self.queues.waiting):
            room = self.preemption.make_way(self._ask, in_flight=in_flight)
            if room is Room.SETTLE_FIRST:
                return Hold.SETTLE_FIRST
        if self.queues.swapped and self.tally.retracted == retracted:
            self._bring_back()
        decodes = [req for req in self.queues.running if req.may_decode]
        plan = self._mixed(decodes, in_flight) if self._joins(decodes) else self._prefill_first(decodes, in_flight)
        if plan is Hold.NOTHING and not in_flight:
            self._break_stall()
        return plan

    def _joins(self, decodes: Sequence[Request]) -> bool:
        return self.config.enable_mixed_chunk and bool(decodes)

    def _mixed(self, decodes: list[Request], in_flight: bool) -> StepPlan | Hold:
        retracted = self.tally.retracted
        room = self._make_room(decodes, in_flight)
        if room is Room.SETTLE_FIRST:
            return Hold.SETTLE_FIRST
        if room is Room.SHORT:
            decodes = []
        # A step that put a request back takes in no new one, or the two would change places forever.
        extends = self._extends(decodes, admit=not decodes or self.tally.retracted == retracted)
        return self._step(extends, decodes)

    def _prefill_first(self, decodes: list[Request], in_flight: bool) -> StepPlan | Hold:
        if not decodes or self.prefill_streak < MAX_PREFILL_STREAK:
            extends = self._extends(decodes, admit=True)
            if extends:
                self.prefill_streak += bool(decodes)
                return self._step(extends, ())
        else:
            self.head_waits = Admission.DECODE_TURN
        room = self._make_room(decodes, in_flight)
        if room is Room.SETTLE_FIRST:
            return Hold.SETTLE_FIRST
        self.prefill_streak = 0
        if room is Room.READY and decodes:
            return self._step((), decodes)
        return self._step(self._extends((), admit=True), ())

    def _make_room(self, decodes: list[Request], in_flight: bool) -> Room:
        if in_flight and self.speculation is not None and self.speculation.wants(decodes):
            return Room.SETTLE_FIRST
        return self.retraction.make_room(decodes, in_flight=in_flight)

    def _step(self, extends: Sequence[Extend], decodes: Sequence[Request]) -> StepPlan | Hold:
        if decodes:
            self.ratio.decay()
        return StepPlan(extends=extends, decodes=decodes) if extends or decodes else Hold.NOTHING

    def _bring_back(self) -> None:
        """Swapped requests run again, unless this step takes pages from a request [swapped-first]."""
        if self.retraction.force_is_due and self.queues.running:
            return
        while self._swapped_go_first() and self._has_seat():
            reserved = self.reserved_pages() if self._is_crowded() else None
            answer = self.swapping.bring_back(reserved=reserved, ratio=self.ratio.value)
            if answer is Return.LATER and not self.sessions.unpin_idle_session():
                return

    def _swapped_go_first(self) -> bool:
        """Whether no request is admitted before a swapped one: a waiting one may outrank it."""
        if not self.queues.swapped or self.preemption is None:
            return bool(self.queues.swapped)
        head = next(self.policy.order(self.queues), None)
        return head is None or not self.preemption.policy.outranked(head, [self.queues.swapped[0]])

    def _extends(self, decodes: Sequence[Request], *, admit: bool) -> list[Extend]:
        """The prefill half of the step. `admit`: the queue may follow the chunked request."""
        adder = self._adder(decodes, admit=admit)
        answer = Admission.OK if admit else Admission.AFTER_RETRACTION
        if answer.ok and self._swapped_go_first():
            answer = Admission.SWAPPED_FIRST
        if self.delay is not None:
            held = answer.ok and bool(decodes) and self.delay.holds(self.queues)
            self.delay.note(self.queues, held=held)
            answer = Admission.DELAYED if held else answer
        chunked = self.queues.chunked
        if chunked is not None and chunked.to_finish is None:
            if answer.ok and adder.budget.shared is not None:
                if not self.queues.tenants.has_passed(chunked):
                    self._admit(adder, before=chunked)
                adder.budget.keep_going()
            resumed = self._resume(adder, chunked)
            answer = answer if resumed.ok else resumed
        self.head_waits = self._admit(adder) if answer.ok else answer
        for extend in adder.extends:
            self.queues.tenants.computed(extend.req, extend.stop, self.clock.now())
        return adder.extends

    def _resume(self, adder: PrefillAdder, chunked: Request) -> Admission:
        resumed = self._fit(adder.resume, chunked)
        if resumed.ok:
            self._house(adder.extends[-1:])
            adder.may_chunk = self.queues.chunked is None
        return resumed

    def _admit(self, adder: PrefillAdder, *, before: Request | None = None) -> Admission:
        """Add waiting requests as the policy orders them, until one has to wait: why it does, OK if none does.

        `before`: only those that may go before this request, whose prompt is partly computed.
        """
        order = self.policy.order(self.queues)
        while len(self.queues.waiting):
            answer = adder.full() if self._has_seat() else Admission.NO_SEAT
            if answer.lacks_pages and self.sessions.unpin_idle_session():
                continue
            if not answer.ok:
                return answer
            req = next(order, None)
            if req is None:
                return Admission.SHARED_PREFIX
            if before is not None and not _goes_before(req, before):
                return Admission.CHUNK_IN_PROGRESS
            answer = self._fit(adder.add, req)
            if answer.lacks_memory and self._in_turns and self.queues.give_up_turn(req):
                continue
            if not answer.ok:
                return answer
            self.queues.waiting.discard(req)
            self._mark_scheduled(req)
            self._house(adder.extends[-1:])
            adder.may_chunk = self.queues.chunked is None
        return Admission.OK

    def _fit(self, add: Callable[[Request], Admission], req: Request) -> Admission:
        """Add `req`, if need be into the pages of idle conversations."""
        answer = add(req)
        while answer.lacks_pages and self.sessions.unpin_idle_session():
            answer = add(req)
        return answer

    @property
    def _in_turns(self) -> bool:
        """Whether the policy serves the queue in its order."""
        return isinstance(self.policy, Fcfs)

    def _ask(self, req: Request) -> Admission:
        """Whether `req` would be admitted by a step that computes nothing else."""
        return self._fit(self._adder((), admit=True).ask, req) if self._has_seat() else Admission.NO_SEAT

    def _is_shared(self) -> bool:
        """Whether steps are small because several tenants have requests."""
        return bool(self.config.shared_prefill_tokens) and self.queues.tenants.shared(self.clock.now())

    def _budget(self, decodes: int) -> PromptBudget:
        left = self.config.prefill_budget(decodes=decodes)
        return PromptBudget(
            left=left,
            chunk=self.config.chunk_limit(decodes=decodes),
            shared=min(left, self.config.shared_prefill_tokens) if self._is_shared() else None,
        )

    def _adder(self, decodes: Sequence[Request], *, admit: bool) -> PrefillAdder:
        admits = admit and len(self.queues.waiting) > 0
        return PrefillAdder(
            memory=self.memory,
            groups=self.queues.groups,
            overtaken_reserve=partial(overtaken_reserve, self.memory, self.queues, in_turns=self._in_turns),
            budget=self._budget(len(decodes)),
            ratio=self.ratio.value,
            reserved=self.reserved_pages() if admits else 0,
            reserved_in_windows=self._reserved_in_windows() if admits and self.memory.windows else [],
            crowded=self._is_crowded(),
            watermark=int(self.config.watermark * self.memory.allocator.num_pages),
            may_chunk=self.queues.chunked is None,
        )

    def _is_crowded(self) -> bool:
        """Whether any request holds memory that will be released."""
        return len(self.queues.requests) > self.queues.without_memory or self.queues.stage_keeps_memory()

    def reserved_pages(self) -> int:
        """Pages that admitted requests are expected to take beyond those they have."""
        return reserved_pages(self.memory, self._admitted(), self.ratio.value)

    def _reserved_in_windows(self) -> list[int]:
        return reserved_in_windows(self.memory, self._admitted(), self.ratio.value)

    def _admitted(self) -> list[Request]:
        running = (req for req in self.queues.running if req.finished is None)
        admitted = [*running, *self.queues.parked(), *self.isolation.suspects()]
        if self.queues.chunked is not None:
            admitted.append(self.queues.chunked)
        return admitted

    def _house(self, extends: Sequence[Extend]) -> None:
        """Give the request of an extend its home for the time after this step."""
        for extend in extends:
            if not extend.samples:
                self.queues.chunked = extend.req
                continue
            if self.queues.chunked is extend.req:
                self.queues.chunked = None
            # A stage may keep it once its token is known; until then it must not decode.
            if not sends_kv(extend.req):
                self.queues.running.append(extend.req)

    def _has_seat(self) -> bool:
        taken = len(self.queues.running) + (self.queues.chunked is not None) + self._arriving()
        return taken < self.config.max_running_requests

    def _arriving(self) -> int:
        """Requests whose KV is on its way here: each has its memory and will want a seat at any moment."""
        kept = (req for stage in self.queues.stages for req in stage.live())
        arriving = sum(req.kv is not None and not sends_kv(req) for req in kept)
        return arriving + len(self.queues.parked())

    def _mark_scheduled(self, req: Request) -> None:
        if req.first_scheduled_at is not None:
            return
        req.first_scheduled_at = self.clock.now()
        req.cached_tokens = min(req.launched_len, req.prompt_len)
        self.tally.prompt_tokens += req.prompt_len
        self.tally.cached_tokens += req.cached_tokens
        req.cache_hits = cache_hits(req, self.memory.page_size)
        self.tally.host_cached_tokens += req.cache_hits.host
        self.tally.disk_cached_tokens += req.cache_hits.disk
        self.tally.unusable_tokens += req.cache_hits.unusable

    def sweep(self) -> None:
        """Finished rows leave whatever the last step did [finished-rows-filtered]; pending finishes of idle requests
        take effect [one-home]."""
        self.queues.drop_finished()
        ending, self.queues.to_finish = self.queues.to_finish, []
        for req in ending:
            if req.finished is not None or req.to_finish is None:
                continue
            if req.steps_in_flight:
                self.queues.to_finish.append(req)
            else:
                self.endings.finish(req, req.to_finish)
        if ending:
            self.queues.drop_finished()

    def _break_stall(self) -> None:
        """End one request when the rest cannot continue: no step is in flight and no stage will give pages back."""
        stuck = bool(self.queues.running) or self.queues.chunked is not None
        if stuck and not self.queues.stage_keeps_memory():
            self.retraction.give_up_one()
