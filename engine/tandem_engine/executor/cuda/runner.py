"""One step on a device with streams, from start to end: queued at once, finished on the host.

    on the host     what follows from lengths and flags (`forward.step_inputs`), then one copy of all inputs
    queued          resolve ─▶ model, by a graph if one fits ─▶ logits ─▶ sample ─▶ publish, record ─▶ copy to host
    later           `finish` reads the copies

The results equal those of `executor.runner`, which does the same on a thread. Nothing waits for the device before
`finish` [no-device-wait]. In a step with a grammar, sampling is queued when its masks are released. The scheduler does
that right after it has completed the step before [masks-after-settling], while the model already computes.

The inputs of a step are frozen dataclasses and tuples with tensors at the leaves. `tensors_of` lists these tensors, so
that all are copied in one piece of memory; `with_tensors` builds the same value around the copies.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem_engine.executor.cuda.graphs import Computed, DecodeGraph
from tandem_engine.executor.cuda.prompt_graphs import PromptGraph
from tandem_engine.executor.cuda.step_graphs import NO_GRAPHS, StepGraphs
from tandem_engine.executor.cuda.streams import (
    DeviceStreams,
    Download,
    Queued,
    StreamFuture,
    StreamName,
    TimedEvent,
    download,
    upload,
)
from tandem_engine.executor.interface import HiddenObserver
from tandem_engine.executor.runner import drafted_runs, hidden_states, keep_guesses, notifying, with_states
from tandem_engine.forward.batch import ForwardBatch, ForwardResult, Guesses, PromptScores, SampledLogprobs, TokenMasks
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.forward.results import Outcome, PooledSum, queue_pooled
from tandem_engine.forward.step_inputs import StepInputs, step_inputs
from tandem_engine.memory.listed_runs import ListedRuns, RunRoom, can_list_runs, inputs_before_a_token, list_runs
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.state_pool import DraftedRuns, StatePool
from tandem_engine.model.attention.backend import Attend, GraphBackend
from tandem_engine.model.base import StepModel
from tandem_engine.model.layers.delta import keep_accepted
from tandem_engine.parallel.group import SingleRank, TpGroup
from tandem_engine.sampling.device_sampler import QueuedSampler, queue_prompt_scores

T = TypeVar("T")

_FIELDS: dict[type, tuple[str, ...]] = {}
"""Of the types seen so far."""


def tensors_of(value: object) -> list[Tensor]:
    """Every tensor in dataclasses and tuples of `value`, in a fixed order. Any other object is a leaf without one."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def with_tensors(value: T, tensors: Sequence[Tensor]) -> T:
    """`value` with other tensors in the places that `tensors_of` finds, in its order."""
    rest = iter(tensors)
    rebuilt: T = _rebuild(value, rest)
    assert next(rest, None) is None, "more tensors than places"
    return rebuilt


def _collect(value: object, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found)
    else:
        for name in _names(type(value)):
            _collect(getattr(value, name), found)


def _rebuild(value: Any, rest: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(rest)
    if isinstance(value, tuple):
        items = [_rebuild(item, rest) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    names = _names(type(value))
    return type(value)(**{name: _rebuild(getattr(value, name), rest) for name in names}) if names else value


def _names(kind: type) -> tuple[str, ...]:
    """Fields of a frozen dataclass; () for any other type, whose values must not be copied."""
    known = _FIELDS.get(kind)
    if known is None:
        frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        known = _FIELDS[kind] = tuple(each.name for each in fields(kind) if each.init) if frozen else ()
    return known


MILLISECOND = 1e-3
Capture = Callable[[StepModel], StepGraphs]
Graph = DecodeGraph | PromptGraph
AgreeTime = Callable[[float], float]
Before = Callable[[ForwardBatch], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What the host will know of a step."""

    logprobs: Outcome[tuple[SampledLogprobs | None, ...]]
    scores: Outcome[tuple[PromptScores, ...]]
    pooled: Outcome[tuple[PooledSum, ...]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.logprobs.tensors, *self.scores.tensors, *self.pooled.tensors)


class StreamRunner:
    """Queues batches in the order they come. Scheduler thread only, under `torch.inference_mode`."""

    def __init__(
        self,
        *,
        model: StepModel,
        pool: KvPool,
        backend: GraphBackend,
        future_map: FutureMap,
        streams: DeviceStreams,
        observer: HiddenObserver | None = None,
        group: TpGroup | None = None,
        states: StatePool | None = None,
    ) -> None:
        """`observer`, `group`, `states`: see `ModelRunner`."""
        self.pool = pool
        self.backend = backend
        self.streams = streams
        self.sampler = QueuedSampler()
        self.future_map = future_map
        self.agree_time: AgreeTime = float
        """Makes the seconds of a step equal on all ranks. Called once for each, when it is finished."""
        self.before: Before = lambda _: None
        """Called with each batch before any of it is queued."""
        self._model = model
        self._observer = observer
        self._group = group or SingleRank()
        self._states = states
        self._history = inputs_before_a_token(states)
        """None where no step has its runs listed."""
        self._drafted: DraftedRuns | None = None
        """Of the newest step with drafts, until it is known which are accepted."""
        self._capture: Capture | None = None
        self._graphs = NO_GRAPHS

    @property
    def model(self) -> StepModel:
        return self._model

    @model.setter
    def model(self, model: StepModel) -> None:
        """Other weights lie elsewhere: their graphs are captured again. Another stream may have written them."""
        self.streams.synchronize()
        self._model = model
        if self._capture is not None:
            self.capture(self._capture)

    def capture(self, capture: Capture) -> None:
        """Run steps that fit by the graphs that `capture` makes, now and for other weights."""
        self._capture = capture
        # Their memory first: two sets at a time may be too much.
        self._graphs = NO_GRAPHS
        self._graphs = capture(self._model)

    def enqueue(self, batch: ForwardBatch) -> Queued[ForwardResult]:
        """Queue `batch`, on the host: KV is written, sampled tokens are published to their rows and copied back."""
        if batch.num_tokens == 0:
            return Queued(lambda: True, lambda: ForwardResult(step=batch.step, next_token_ids=()))
        step = self._queue(batch)
        return Queued(step.arrived, step.finish)

    def _queue(self, batch: ForwardBatch) -> "QueuedStep":
        self.before(batch)
        graph, inputs, runs = self._prepare(batch)
        began = self.streams.record(StreamName.FORWARD, timed=True)
        with self.streams.on(StreamName.FORWARD):
            computed = self._compute(inputs, graph, runs)
        step = QueuedStep(runner=self, inputs=inputs, computed=computed, began=began)
        if batch.sampling.masks is None:
            step.sample(None)
        else:
            batch.sampling.masks.when_released(partial(step.sample_when_filled, batch.sampling.masks))
        return step

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Queue `batch` and wait for it. Not for steps that are served."""
        return StreamFuture(self.enqueue(batch)).result()

    def guess(self, batches: Sequence[ForwardBatch]) -> Guesses:
        """See `Runner.guess`."""
        steps = [self._queue(batch) for batch in batches]
        with self.streams.on(StreamName.FORWARD):
            # As `finish` has them: a token that means nothing is 0.
            on_device = torch.cat([step.token_ids for step in steps]).clamp_(min=0)
        futures = [StreamFuture(Queued(step.arrived, step.finish)) for step in steps]
        return Guesses(lambda: [future.result() for future in futures], on_device=on_device)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """See `Runner.logits`."""
        graph, inputs, runs = self._prepare(batch)
        with self.streams.on(StreamName.FORWARD):
            logits = self._compute(inputs, graph, runs).logits
        copies = download(self.streams, (logits,))
        return StreamFuture(Queued(copies.arrived, lambda: copies.tensors[0])).result()

    def record(self, batch: ForwardBatch, token_ids: Tensor) -> None:
        """See `ModelRunner.record`; all of it on the host."""
        edits = batch.sampling.edits
        if edits is None:
            return
        arguments = (replace(edits, histories=()), token_ids)
        # Called by the reader of a result, while it reads.
        with torch.inference_mode():
            edits, token_ids = with_tensors(arguments, upload(self.streams, tensors_of(arguments)))
            with self.streams.on(StreamName.FORWARD):
                self.sampler.editor.record(edits, token_ids)

    def accept(self, accept_lens: Sequence[int]) -> None:
        """See `Runner.accept`: queued behind the steps so far, of which no other has these sequences."""
        drafted, self._drafted = self._drafted, None
        if drafted is None:
            return
        assert self._states is not None, "runs of drafts change states where there are none"
        lens = accept_lens[-len(drafted.rows) :]
        with torch.inference_mode():
            (on_device,) = upload(self.streams, (torch.tensor(lens),))
            with self.streams.on(StreamName.FORWARD):
                keep_accepted(self._states, drafted, on_device, longest=max(lens))

    def queue_results(
        self, inputs: StepInputs, computed: Computed, masks: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Answers]:
        """Queue all that follows the model: the tokens [R] of the step, and the other results that it requires."""
        hidden = computed.hidden
        scored = len(hidden) - sum(len(pooled.tokens) for pooled in inputs.batch.pooled)
        sampled = self.sampler.sample(computed.logits, inputs, masks)
        answers = Answers(
            logprobs=sampled.logprobs,
            scores=queue_prompt_scores(
                hidden[inputs.sampled : scored], inputs.batch.prompt_positions, self._model.logits
            ),
            pooled=queue_pooled(hidden[scored:], inputs.batch.pooled),
        )
        # Rank 0's count, should ranks ever differ [rank-zero-tokens].
        token_ids = self._group.broadcast(sampled.token_ids)
        if inputs.publish_rows is not None:
            sound = token_ids.clamp(min=0)
            self.future_map.publish(inputs.publish_rows, sound)
            self.sampler.record(inputs, sound[:, None])
        # Last: a step that raises, for want of memory perhaps, leaves nothing of this size behind.
        self._drafted = computed.drafted or self._drafted
        return token_ids, answers

    def _prepare(self, batch: ForwardBatch) -> tuple[Graph | None, StepInputs, ListedRuns | None]:
        """The graph for `batch`, if one fits, and what is to be computed, on the device."""
        graph = self._graphs.fitting(batch)
        on_host = step_inputs(batch, pad_to=None if graph is None else graph.pad_to)
        given = on_host, self._listed(batch, graph)
        inputs, runs = with_tensors(given, upload(self.streams, tensors_of(given)))
        return graph, replace(inputs, batch=replace(inputs.batch, on_host=on_host.batch)), runs

    def _listed(self, batch: ForwardBatch, graph: Graph | None) -> ListedRuns | None:
        """The runs of `batch`, on the host, if its layers take them from lists."""
        if self._history is None or isinstance(graph, DecodeGraph) or not can_list_runs(batch):
            return None
        room = RunRoom.of(batch) if graph is None or graph.room is None else graph.room
        return list_runs(batch, self._history, room)

    def _compute(self, inputs: StepInputs, graph: Graph | None, runs: ListedRuns | None) -> Computed:
        if inputs.page_copies is not None:
            self.pool.copy_pages_of(*inputs.page_copies)
        if self._states is not None:
            self._states.copy(inputs.batch.state_copies)
        if inputs.batch.guessed is not None:
            inputs.batch.guessed.fill(inputs.batch.input_ids)
        if graph is None:
            computed = self._compute_queued(inputs, runs)
        elif isinstance(graph, DecodeGraph):
            computed = graph.replay(inputs)
        else:
            computed = self._compute_prompt(inputs, graph, runs)
        keep_guesses(self._model, inputs.batch, computed.hidden, inputs.wanted)
        return computed

    def _compute_queued(self, inputs: StepInputs, runs: ListedRuns | None) -> Computed:
        """Operation by operation."""
        batch = inputs.batch
        input_ids = self.future_map.resolve(batch.input_ids, inputs.token_rows)
        attend: Attend = self.backend.plan(batch)
        if batch.kv_progress is not None:
            attend = notifying(attend, partial(self._wrote, batch.kv_progress))
        stateful = with_states(attend, self._states, batch, runs)
        hidden = hidden_states(
            self._model, self._observer, batch, input_ids=input_ids, attend=stateful, wanted=inputs.wanted
        )
        logits = self._model.logits(hidden[: inputs.sampled])
        return Computed(hidden, logits, drafted_runs(stateful))

    def _compute_prompt(self, inputs: StepInputs, graph: PromptGraph, runs: ListedRuns | None) -> Computed:
        """By a graph that ends at hidden states. All layers have been written when it ends."""
        every, progress = graph.replay(inputs, runs), inputs.batch.kv_progress
        if progress is not None:
            self._wrote(progress, len(self._model.attention) - 1)
        hidden = every.index_select(0, inputs.wanted)
        return Computed(hidden, self._model.logits(hidden[: inputs.sampled]))

    def _wrote(self, progress: KvProgress, layer: int) -> None:
        """Records an event after the layer's KV: once it is reached, the KV is written."""
        progress.wrote(layer, self.streams.record(StreamName.FORWARD))


@dataclass(kw_only=True, slots=True)
class QueuedStep:
    """A step on its way."""

    runner: StreamRunner
    inputs: StepInputs
    computed: Computed | None
    """Until sampling is queued: after that the host does not use it."""
    began: TimedEvent
    ended: TimedEvent | None = None
    answers: Answers | None = None
    results: Download | None = None
    """None until sampling is queued."""
    sampled: Tensor | None = None
    """[R] int64 on the device, −1 for what means nothing; None until sampling is queued."""
    error: Exception | None = None
    """That queueing it raised, when it was queued after the launch."""

    def sample(self, masks: tuple[Tensor, Tensor] | None) -> None:
        """Queue what follows the model, up to the copies for the host."""
        streams, computed = self.runner.streams, self.computed
        assert computed is not None, "a step is sampled once"
        self.computed = None
        with streams.on(StreamName.FORWARD):
            token_ids, self.answers = self.runner.queue_results(self.inputs, computed, masks)
        self.ended = streams.record(StreamName.FORWARD, timed=True)
        self.sampled = token_ids
        self.results = download(streams, (token_ids, *self.answers.tensors))

    @property
    def token_ids(self) -> Tensor:
        """See `sampled`; of a step without a grammar."""
        assert self.sampled is not None, "its masks are yet to come"
        return self.sampled

    def sample_when_filled(self, masks: TokenMasks) -> None:
        """`sample`, with `masks`, which are final. The reader of the result receives an error."""
        try:
            with torch.inference_mode():
                on_host = (torch.tensor(masks.rows), masks.wait())
                rows, bitmask = upload(self.runner.streams, on_host)
                self.sample((rows, bitmask))
        except Exception as error:  # noqa: BLE001 - a callback of the thread that fills masks
            self.error = error

    def arrived(self) -> bool:
        """See `Queued.arrived`."""
        if self.error is not None:
            raise self.error
        return self.results is not None and self.results.arrived()

    def finish(self) -> ForwardResult:
        """See `Queued.finish`."""
        assert self.results is not None, "a step is finished once it has arrived"
        assert self.answers is not None, "a step is finished once it has arrived"
        assert self.ended is not None, "a step is finished once it has arrived"
        answers, (token_ids, *rest) = self.answers, self.results.tensors
        first, second = len(answers.logprobs.tensors), len(answers.logprobs.tensors) + len(answers.scores.tensors)
        tokens = token_ids.tolist()
        corrupted = tuple(row for row, token in enumerate(tokens) if token < 0)
        return ForwardResult(
            step=self.inputs.batch.step,
            next_token_ids=tuple(max(0, token) for token in tokens) if corrupted else tuple(tokens),
            logprobs=answers.logprobs.read(rest[:first]),
            prompt_scores=answers.scores.read(rest[first:second]),
            pooled=answers.pooled.read(rest[second:]),
            corrupted=corrupted,
            compute_s=self.runner.agree_time(self.began.elapsed_time(self.ended) * MILLISECOND),
        )
