"""Composition of a scheduler: the parts that most others share, then each part with those it calls.

shared   queues, tally, stream, steps, stop rule, policy
         └▶ endings, sessions ─▶ ingress   what comes in
                             ─▶ isolation, planner ─▶ loop   what is computed
                             ─▶ pausing, health, departures   operations, and checks of invariants
"""

from dataclasses import dataclass, field

from tandem_engine.base.clock import Clock
from tandem_engine.config import SchedulerConfig
from tandem_engine.executor.interface import ModelExecutor
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.parallel.agreement import Least
from tandem_engine.sampling.grammar.compiler import Grammars
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.fault_isolation import Health, Isolation
from tandem_engine.scheduler.finishing import EndedLog, Endings, PenaltySlots, Steps
from tandem_engine.scheduler.gates.adapters import AdapterGate, AdapterShelf
from tandem_engine.scheduler.gates.grammar import GrammarGate
from tandem_engine.scheduler.ingress import Ingress, Prefetching
from tandem_engine.scheduler.loop import Loop
from tandem_engine.scheduler.migration import Departures
from tandem_engine.scheduler.output_stream import OutputStream
from tandem_engine.scheduler.pausing import Pausing
from tandem_engine.scheduler.planner import Planner
from tandem_engine.scheduler.policies import ByPriority, Policy, PromptDelay
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.retraction import NewTokenRatio, Preemption, Retraction, Swapping
from tandem_engine.scheduler.schedule_batch import BatchBuilder
from tandem_engine.scheduler.sessions import Sessions
from tandem_engine.scheduler.speculation import Speculation
from tandem_engine.scheduler.step_completion import Settlement
from tandem_engine.scheduler.step_times import StepTimes
from tandem_engine.scheduler.stop import ModelFacts, StopRule


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What most parts need."""

    config: SchedulerConfig
    memory: KvMemory
    facts: ModelFacts
    """With the context length that this engine serves."""
    clock: Clock
    """What decisions go by."""
    stopwatch: Clock
    """What durations are measured with."""
    policy: Policy
    speculation: Speculation | None
    stop: StopRule
    stream: OutputStream
    ended: EndedLog
    ratio: NewTokenRatio
    tally: Tally = field(default_factory=Tally)
    queues: Queues = field(default_factory=Queues)
    steps: Steps = field(default_factory=Steps)
    slots: PenaltySlots = field(default_factory=PenaltySlots)

    @property
    def capacity_tokens(self) -> int:
        """Pages of the pool, without the dummy page 0."""
        return (self.memory.allocator.num_pages - 1) * self.memory.page_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerParts:
    """What `Scheduler` speaks to."""

    sessions: Sessions
    endings: Endings
    prefetching: Prefetching
    gate: GrammarGate
    adapters: AdapterGate
    ingress: Ingress
    isolation: Isolation
    planner: Planner
    loop: Loop
    pausing: Pausing
    health: Health
    departures: Departures


def make_parts(
    shared: Shared,
    executor: ModelExecutor,
    *,
    session_pages: int,
    grammars: Grammars,
    shelf: AdapterShelf,
    least: Least,
    allow_stop_strings: bool,
) -> SchedulerParts:
    """See `Scheduler.__init__`."""
    config, memory, queues, tally = shared.config, shared.memory, shared.queues, shared.tally
    sessions = Sessions(config=config, memory=memory, clock=shared.clock, max_pages=session_pages)
    endings = _endings(shared, sessions)
    prefetching = Prefetching(memory=memory, queues=queues, clock=shared.clock)
    gate = GrammarGate(grammars=grammars, queues=queues, endings=endings, model=shared.facts, least=least)
    adapters = AdapterGate(shelf=shelf, queues=queues, endings=endings, tally=tally, clock=shared.clock)
    ingress = Ingress(
        config=config,
        model=shared.facts,
        capacity_tokens=shared.capacity_tokens,
        allow_stop_strings=allow_stop_strings,
        clock=shared.clock,
        queues=queues,
        endings=endings,
        sessions=sessions,
        prefetching=prefetching,
        gate=gate,
        adapters=adapters,
        tally=tally,
    )
    isolation = Isolation(config=config, memory=memory, queues=queues, endings=endings, tally=tally)
    planner = _planner(shared, endings, sessions, isolation)
    loop = _loop(shared, endings, isolation, planner, executor)
    adapters.stand_still = loop.stand_still
    return SchedulerParts(
        sessions=sessions,
        endings=endings,
        prefetching=prefetching,
        gate=gate,
        adapters=adapters,
        ingress=ingress,
        isolation=isolation,
        planner=planner,
        loop=loop,
        pausing=Pausing(
            memory=memory, queues=queues, isolation=isolation, endings=endings, sessions=sessions, tally=tally
        ),
        health=Health(config=config, memory=memory, queues=queues, tally=tally),
        departures=Departures(queues=queues, stream=shared.stream, clock=shared.clock),
    )


def _endings(shared: Shared, sessions: Sessions) -> Endings:
    speculation = shared.speculation
    return Endings(
        memory=shared.memory,
        queues=shared.queues,
        stream=shared.stream,
        steps=shared.steps,
        slots=shared.slots,
        sessions=sessions,
        tally=shared.tally,
        ended=shared.ended,
        on_release=() if speculation is None else (speculation.released,),
    )


def _planner(shared: Shared, endings: Endings, sessions: Sessions, isolation: Isolation) -> Planner:
    swapping = Swapping(
        config=shared.config, memory=shared.memory, queues=shared.queues, endings=endings, tally=shared.tally
    )
    retraction = Retraction(
        config=shared.config,
        memory=shared.memory,
        queues=shared.queues,
        policy=shared.policy,
        endings=endings,
        sessions=sessions,
        swapping=swapping,
        ratio=shared.ratio,
        tally=shared.tally,
    )
    return Planner(
        config=shared.config,
        memory=shared.memory,
        queues=shared.queues,
        policy=shared.policy,
        endings=endings,
        retraction=retraction,
        sessions=sessions,
        swapping=swapping,
        isolation=isolation,
        ratio=shared.ratio,
        clock=shared.clock,
        tally=shared.tally,
        preemption=_preemption(shared, retraction),
        speculation=shared.speculation,
        delay=_delay(shared),
    )


def _delay(shared: Shared) -> PromptDelay | None:
    factor = shared.config.scheduler_delay_factor
    if not factor:
        return None
    return PromptDelay(clock=shared.clock, factor=factor, lag=int(shared.config.enable_overlap))


def _preemption(shared: Shared, retraction: Retraction) -> Preemption | None:
    if not isinstance(shared.policy, ByPriority):
        return None
    return Preemption(
        config=shared.config,
        memory=shared.memory,
        queues=shared.queues,
        policy=shared.policy,
        retraction=retraction,
        ratio=shared.ratio,
    )


def _loop(shared: Shared, endings: Endings, isolation: Isolation, planner: Planner, executor: ModelExecutor) -> Loop:
    settlement = Settlement(
        memory=shared.memory,
        queues=shared.queues,
        steps=shared.steps,
        stop=shared.stop,
        endings=endings,
        isolation=isolation,
        stream=shared.stream,
        stopwatch=shared.stopwatch,
        tally=shared.tally,
        step_times=StepTimes(stopwatch=shared.stopwatch, tally=shared.tally),
        speculation=shared.speculation,
    )
    return Loop(
        overlap=shared.config.enable_overlap,
        planner=planner,
        builder=BatchBuilder(
            memory=shared.memory,
            stop=shared.stop,
            slots=shared.slots,
            adapter_slots=shared.facts.adapter_slots,
        ),
        executor=executor,
        longest_step=shared.config.watchdog_timeout,
        settlement=settlement,
        steps=shared.steps,
        clock=shared.stopwatch,
        tally=shared.tally,
        stages=shared.queues.stages,
        speculation=shared.speculation,
    )
