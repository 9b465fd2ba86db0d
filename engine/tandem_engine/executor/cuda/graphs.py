"""CUDA graphs of decode steps: a device replays a captured step, so the host does not queue each operation.

    capture   once per number of rows, the largest first. All graphs share one pool of memory: the intermediate tensors
              of one lie where those of another do, and only one runs at a time
    replay    the smallest graph that fits; its unused rows use the dummy page [finite-padding] [dummy-page]

A graph replays the captured operations with the captured addresses. Each size therefore has its own input tensors,
which are filled before each replay and keep nothing of an earlier step: the host pads a step to the whole size, and
metadata is that of the padded step [pad-then-metadata]. Python numbers keep their values from the capture.

A run of drafts is as many rows as it has tokens (`forward.step_inputs.as_decodes`), so verification uses the same
graphs. So does a draft network that computes the last one or two tokens of a sequence: it samples after some rows only.
Prompts have graphs of their own (`prompt_graphs`). Steps that fit no graph are queued operation by operation.
"""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from tandem_engine.config import GraphConfig, ModelConfig, ModelImpl
from tandem_engine.executor.cuda.streams import CudaStreams, StreamName
from tandem_engine.executor.interface import HiddenObserver
from tandem_engine.executor.memory_profile import MemoryMeter
from tandem_engine.executor.runner import every_hidden_state, with_states
from tandem_engine.forward.batch import ForwardBatch, ForwardMode
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.forward.step_inputs import NO_SAMPLING, StepInputs
from tandem_engine.kernels.interface import by_triton
from tandem_engine.memory.state_pool import DraftedRuns, StatePool
from tandem_engine.model.attention.backend import GraphBackend, GraphPlan
from tandem_engine.model.base import StepModel

logger = logging.getLogger(__name__)
T = TypeVar("T")

WARM_UPS = 2
"""Runs before a capture: libraries allocate workspaces and kernels are compiled at first use, which a graph may not."""

MAX_ROWS = 256
"""Of a graph, when no flag says more. A larger step keeps a device busy for longer than it takes to queue."""

GIB = 1 << 30


class Captured(Protocol):
    """`torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Queue what was captured on the stream that is on."""
        ...


class GraphCapturer(Protocol):
    """Makes graphs whose intermediate memory is shared. None of them may be replayed while another runs."""

    def new_pool(self) -> None:
        """What is captured from now on shares memory among itself, and with nothing captured before."""
        ...

    def capture(self, run: Callable[[], T]) -> tuple[Captured, T]:
        """The graph of what `run` queues, and what it returns: tensors that each replay overwrites."""
        ...


class CudaGraphCapturer:
    """Implements `GraphCapturer` on the forward stream of a GPU."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._pool = torch.cuda.graph_pool_handle()

    def new_pool(self) -> None:
        # One whose graphs have all gone may not be used again.
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], T]) -> tuple[Captured, T]:
        with self._streams.on(StreamName.FORWARD):
            for _ in range(WARM_UPS):
                run()
        self._streams.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, NIXL's for one, may use the device during a capture.
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._streams.stream(StreamName.FORWARD),
            capture_error_mode="thread_local",
        ):
            outputs = run()
        return graph, outputs


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Garbage is collected once before the block, and not within it.

    Graphs of an engine that is gone are garbage in cycles. A capture fails when one of them is freed while it runs:
    CUDA permits no release of a graph then. A collection walks all objects of the process: one serves all captures.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """What a decode step computes with, all of it for as long as its graphs live."""

    model: StepModel
    backend: GraphBackend
    future_map: FutureMap
    observer: HiddenObserver | None
    device: torch.device
    max_pages: int
    """Of one sequence."""
    states: StatePool | None = None
    """Of layers that keep any."""

    def of(self, model: StepModel) -> "Decoding":
        """The same by other weights."""
        return replace(self, model=model)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step has computed of its model."""

    hidden: Tensor
    """[W, hidden_size] of the tokens wanted"""
    logits: Tensor
    """float32 [R, vocab], of the first of them"""
    drafted: DraftedRuns | None = None
    """Runs of drafts whose states are yet to follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGraph:
    """A decode of so many rows."""

    rows: int
    input_ids: Tensor
    """[rows] int64, as are the next two: where the graph reads them."""
    positions: Tensor
    token_rows: Tensor
    captured: ForwardBatch
    """The step that was captured. The graph reads its tensors, so they live as long as it does: memory that is freed
    is given to other tensors."""
    plan: GraphPlan
    graph: Captured
    computed: Computed
    """Where the graph writes it."""

    @property
    def pad_to(self) -> int:
        """What a step is padded to."""
        return self.rows

    def replay(self, inputs: StepInputs) -> Computed:
        """Queue the step `inputs`, which was padded to `rows`. The answer is good until the next replay."""
        batch = inputs.batch
        assert batch.num_tokens == self.rows, f"a step of {batch.num_tokens} rows for a graph of {self.rows}"
        self.input_ids.copy_(batch.input_ids)
        self.positions.copy_(batch.positions)
        self.token_rows.copy_(inputs.token_rows)
        self.plan.load(batch)
        self.graph.replay()
        hidden, logits = self.computed.hidden, self.computed.logits
        if inputs.sampled == batch.num_tokens - inputs.padding:
            return Computed(hidden[: inputs.sampled], logits[: inputs.sampled])
        return Computed(hidden.index_select(0, inputs.wanted), logits.index_select(0, inputs.wanted))


class DecodeGraphs:
    """Graphs of several sizes."""

    def __init__(self, graphs: Iterable[DecodeGraph]) -> None:
        self._graphs = sorted(graphs, key=lambda graph: graph.rows)
        self._rows = [graph.rows for graph in self._graphs]

    def fitting(self, rows: int) -> DecodeGraph | None:
        """The smallest with room for `rows`, if there is one."""
        place = bisect_left(self._rows, rows)
        return self._graphs[place] if place < len(self._graphs) else None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._rows)


@torch.inference_mode()
def capture_decodes(
    capturer: GraphCapturer, decoding: Decoding, sizes: Sequence[int], *, meter: MemoryMeter
) -> DecodeGraphs:
    """Capture every size, which takes seconds, with a bar on a terminal; one line says how long and how much."""
    if not sizes:
        return DecodeGraphs(())
    began, before = time.perf_counter(), meter.used()
    bar = tqdm(sorted(sizes, reverse=True), desc="capturing graphs", unit="graph", disable=None)
    with no_garbage_collection():
        graphs = DecodeGraphs([capture_decode(capturer, decoding, rows) for rows in bar])
    taken = max(0, meter.used() - before)
    logger.info(
        "graphs of decodes for %s rows: captured in %.1f s, %.2f GiB",
        ", ".join(map(str, graphs.sizes)),
        time.perf_counter() - began,
        taken / GIB,
    )
    return graphs


@torch.inference_mode()
def capture_decode(capturer: GraphCapturer, decoding: Decoding, rows: int) -> DecodeGraph:
    """The graph of a decode of so many rows. Runs some, of padding alone."""
    input_ids, positions, token_rows = torch.zeros(3, rows, dtype=torch.int64, device=decoding.device).unbind(0)
    every = torch.arange(rows, device=decoding.device)
    plan = decoding.backend.graph_plan(rows, decoding.max_pages)
    decodes = ForwardBatch(
        step=0,
        mode=ForwardMode.DECODE,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=plan.slots,
        rows=token_rows,
        seq_lens=plan.seq_lens,
        extend_lens=torch.ones_like(plan.seq_lens),
        page_table=plan.page_table,
        num_extend=0,
        sample_index=every,
        sampling=NO_SAMPLING,
    )

    def run() -> Computed:
        ids = decoding.future_map.resolve(input_ids, token_rows)
        plan.prepare()
        attend = with_states(plan, decoding.states, decodes)
        hidden = every_hidden_state(
            decoding.model, decoding.observer, decodes, input_ids=ids, attend=attend, every=every
        )
        return Computed(hidden, decoding.model.logits(hidden))

    graph, computed = capturer.capture(run)
    return DecodeGraph(
        rows=rows,
        input_ids=input_ids,
        positions=positions,
        token_rows=token_rows,
        captured=decodes,
        plan=plan,
        graph=graph,
        computed=computed,
    )


def graph_sizes(config: GraphConfig, *, most: int) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending, where steps have `most` rows of decodes at the most."""
    if not config.enabled:
        return ()
    largest = min(config.max_rows or MAX_ROWS, most)
    if config.sizes:
        return tuple(sorted({rows for rows in config.sizes if rows <= (config.max_rows or rows)}))
    steps = (*(1, 2, 4), *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32))
    return (*(rows for rows in steps if rows < largest), largest)


def can_capture(config: ModelConfig, device: torch.device) -> bool:
    """Whether a step of the model can be queued from start to end. Without Triton kernels, sorting tokens by expert
    reads the selection on the host; for models of transformers it is not known.
    """
    return (config.moe is None or by_triton(device)) and config.impl is not ModelImpl.TRANSFORMERS
