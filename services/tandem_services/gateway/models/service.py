"""One model service: a model and everything between a plan and the workers of its fleet (docs/multi-model.md).

Services share no worker, queue, quarantine or session. They do share the gateway's keys and limits, the request journal
and the tokenizer threads.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem_engine.base.clock import Clock
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.metrics import MetricFamilies
from tandem_services.gateway.access.keys import deployment_secret
from tandem_services.gateway.config import ModelConfig
from tandem_services.gateway.dispatch.choice_run import RetryPolicy
from tandem_services.gateway.dispatch.dispatcher import Dispatcher
from tandem_services.gateway.dispatch.engine_client import LivenessTiming, Revival
from tandem_services.gateway.dispatch.engine_pool import EnginePool
from tandem_services.gateway.dispatch.generation import Generator
from tandem_services.gateway.dispatch.placement import PairChooser, Placing, RetryBudget
from tandem_services.gateway.dispatch.quarantine import Board as QuarantineBoard
from tandem_services.gateway.dispatch.quarantine import EndReports, Quarantine
from tandem_services.gateway.dispatch.reading_pace import ReadingPace
from tandem_services.gateway.dispatch.sessions import SessionDirectory, SessionManager
from tandem_services.gateway.models.adapter_updates import AdapterUpdates
from tandem_services.gateway.models.expected_adapters import ExpectedAdapters
from tandem_services.gateway.models.model import ServedModel, checkpoint_length
from tandem_services.gateway.models.prompts import PromptEncoder
from tandem_services.gateway.models.tokenizer_threads import TokenizerThreads
from tandem_services.gateway.models.worker_commands import WorkerCommands
from tandem_services.gateway.objectives import Objectives
from tandem_services.gateway.observe.cells import watch_cells
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.observe.predictions import Predictions
from tandem_services.gateway.output.reader import OutputDialect
from tandem_services.gateway.queueing.admission import Admission, QueueMetrics
from tandem_services.gateway.queueing.fair_queue import Board as FairBoard
from tandem_services.gateway.queueing.fair_queue import FairQueue, SharedCounters
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy
from tandem_services.gateway.queueing.slo_admission import SloAdmission
from tandem_services.gateway.queueing.worker_starts import WorkerStarts
from tandem_services.router.cells.cell_router import CellFigures
from tandem_services.router.registered_adapters import RegisteredAdapters
from tandem_services.router.usage_counters import VirtualCounters


@dataclass(slots=True)
class OpenRequests:
    """Of one model service. All methods belong to one event loop."""

    open: int = 0
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        self.open += 1
        self._over.clear()

    def end(self) -> None:
        self.open -= 1
        if self.open == 0:
            self._over.set()

    async def over(self) -> None:
        """Returns when there is none."""
        if self.open:
            await self._over.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """What a model service is built on. Its creator closes it, after the gateway."""

    config: ModelConfig
    chooser: PairChooser
    sessions: SessionDirectory
    context: IpcContext
    tokenizer: TextTokenizer
    quarantine: QuarantineBoard | None = None
    """What all gateways of the fleet share through Redis, as `fairness`. None: this gateway keeps it for itself."""
    fairness: FairBoard | None = None
    end_reports: EndReports | None = None
    """How workers have ended. None: it is not known."""
    adapters: RegisteredAdapters | None = None
    """Names that commands have registered; None: none yet."""
    folder: Path | None = None
    """With the model's config.json, until the service is built; None: `config.path`."""
    upkeep: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Runs for as long as the model is served."""
    cells: Callable[[], Sequence[CellFigures]] | None = None
    """Other cells as they are; None where there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Parts of a gateway that its model services share."""

    clock: Clock
    families: MetricFamilies
    tokenizing: TokenizerThreads
    timing: LivenessTiming
    pace: ReadingPace
    turn_s: float
    """Longest life of a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelService:
    """The parts of one that routes use."""

    model: ServedModel
    prompts: PromptEncoder
    session_manager: SessionManager
    chooser: PairChooser
    engines: EnginePool
    generator: Generator
    metrics: GatewayMetrics
    predictions: Predictions
    updates: AdapterUpdates
    expected: ExpectedAdapters
    objectives: Objectives
    """Of requests that name none."""
    policies: str
    """Of the router, as spans name them."""
    cluster: str = ""
    """Of its fleet."""
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    """Requests that are answered here."""
    upkeep: Callable[[], Coroutine[Any, Any, None]] | None = None
    """See `Fleet.upkeep`."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def dispatcher(self) -> Dispatcher:
        return self.generator.dispatcher

    @property
    def takes_requests(self) -> bool:
        """Whether new requests are served, or wait for workers that are expected."""
        if self.model.context_length or self.model.from_zero:
            return True
        binding = self.dispatcher.placing.admission.binding
        has_served = self.model.last_context_length is not None
        return has_served and binding.starts is not None and binding.starts.expected(within_s=binding.policy.worker_s)

    def start(self) -> None:
        """Begin what runs as long as it serves."""
        work = {
            f"quarantine of {self.model.name}": self.dispatcher.quarantine.run(),
            f"adapters of {self.model.name}": self.updates.run(),
            f"virtual token counters of {self.model.name}": self.dispatcher.placing.admission.binding.run(),
        }
        if self.upkeep is not None:
            work[f"tokenizer of {self.model.name}"] = self.upkeep()
        self._tasks.extend(asyncio.create_task(run, name=name) for name, run in work.items())

    async def close(self) -> None:
        """Stop what was started here. Running requests have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.dispatcher.placing.admission.close()
        self.engines.close()


def build_model_service(fleet: Fleet, shared: Shared) -> ModelService:
    """Compose the parts."""
    config, tokenizer = fleet.config, fleet.tokenizer
    metrics = GatewayMetrics(shared.families, model=config.name)
    if fleet.cells is not None:
        watch_cells(shared.families, fleet.cells, model=config.name, names=[place.name for place in config.cells])
    predictions = Predictions(shared.families, model=config.name, clock=shared.clock, percentile=config.slo_percentile)
    dialect = OutputDialect.of(
        tokenizer, tool_call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
    )
    registered = fleet.adapters or RegisteredAdapters(model=config.name)
    model = ServedModel(
        names=config.names,
        root=config.root,
        tokenizer=tokenizer,
        dialect=dialect,
        workers=fleet.chooser.workers,
        offered=fleet.chooser.offered,
        registered=registered,
        checkpoint_length=checkpoint_length(_folder(fleet)) if config.from_zero else None,
    )
    engines = _engines(fleet, shared, metrics)
    policy = _retry_policy(config)
    queue_metrics = QueueMetrics(shared.families, model=config.name)
    admission = _admission(fleet, shared, queue_metrics)
    waits = admission.binding.policy
    dispatcher = Dispatcher(
        placing=Placing(
            chooser=fleet.chooser,
            clock=shared.clock,
            policy=policy,
            metrics=metrics,
            budget=RetryBudget(clock=shared.clock),
            admission=admission,
            objectives=SloAdmission(
                shared.families,
                model=config.name,
                mode=config.slo_admission,
                clock=shared.clock,
                predictions=predictions,
            ),
        ),
        engines=engines,
        clock=shared.clock,
        policy=policy,
        metrics=metrics,
        predictions=predictions,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        quarantine=Quarantine(
            model=model.name,
            clock=shared.clock,
            metrics=metrics,
            salt=deployment_secret(fleet.context.keys, config.cluster),
            board=fleet.quarantine,
            reports=fleet.end_reports,
        ),
    )
    return ModelService(
        model=model,
        prompts=PromptEncoder(model=model, threads=shared.tokenizing, parse_special_tokens=config.parse_special_tokens),
        session_manager=SessionManager(directory=fleet.sessions, ttl_s=config.session_ttl_s, turn_s=shared.turn_s),
        chooser=fleet.chooser,
        engines=engines,
        generator=Generator(
            dispatcher=dispatcher,
            vocabulary=tokenizer.vocabulary,
            clock=shared.clock,
            metrics=metrics,
        ),
        metrics=metrics,
        predictions=predictions,
        expected=ExpectedAdapters(
            model=model,
            clock=shared.clock,
            changed=queue_metrics.expecting,
            wait_s=max(waits.worker_s, waits.start_s),
            seats=config.max_waiting,
        ),
        updates=AdapterUpdates(model=model, registered=registered, commands=WorkerCommands(keys=fleet.context.keys)),
        objectives=config.objectives,
        policies=str(config.policies),
        cluster=config.cluster,
        upkeep=fleet.upkeep,
    )


def _folder(fleet: Fleet) -> Path:
    folder = fleet.folder or fleet.config.path
    assert folder is not None, "a fleet that is open has a folder"
    return folder


def _engines(fleet: Fleet, shared: Shared, metrics: GatewayMetrics) -> EnginePool:
    def answers_again(incarnation: str) -> None:
        metrics.workers_answering_again.inc()
        pool.revived(incarnation)
        fleet.chooser.mark_alive(incarnation)

    pool = EnginePool(
        context=fleet.context,
        timing=shared.timing,
        on_dead=fleet.chooser.mark_dead,
        revival=Revival(context=fleet.context, clock=shared.clock, on_alive=answers_again),
        clock=shared.clock,
        pace=shared.pace,
    )
    fleet.chooser.rely_on(pool)
    return pool


def _admission(fleet: Fleet, shared: Shared, metrics: QueueMetrics) -> Admission:
    config, counters = fleet.config, VirtualCounters()
    starts = WorkerStarts(
        fleet=fleet.chooser,
        clock=shared.clock,
        model=config.name,
        limit_s=config.start_wait_s,
        needs_prefill=not config.prefill_fallback,
        replaced=config.replaced_workers,
    )
    binding = LateBinding(
        chooser=fleet.chooser,
        clock=shared.clock,
        queue=FairQueue(seats=config.max_waiting, counters=counters),
        counters=SharedCounters(counters=counters, board=fleet.fairness),
        observer=metrics,
        prefill_rate=lambda: fleet.chooser.prefill_rate(config.name),
        starts=starts,
        policy=AdmissionPolicy(
            room_s=config.room_s,
            worker_s=config.queue_s,
            start_s=config.start_wait_s,
            worker_wait_s=config.worker_wait_s,
        ),
    )
    metrics.watch(binding.figures)
    return Admission(binding=binding)


def _retry_policy(config: ModelConfig) -> RetryPolicy:
    return RetryPolicy(
        max_attempts=config.max_attempts,
        recovery_s=config.recovery_s,
        silence_s=config.silence_s,
        prefill_fallback=config.prefill_fallback,
    )
