"""CUDA graphs of steps with prompts, of prompts alone or next to decodes (`graphs` has those of decodes alone).

A prompt of few tokens takes a device less time than the host needs to queue its operations one by one. A graph is one
launch, whatever the step computes: attention lists its work on the device, and its grids are upper bounds. So one graph
runs every step that is not larger than its shape (`forward.prompt_shape`).

    captured   resolve ─▶ list of work ─▶ all layers, attention included ─▶ hidden states of all tokens
    queued     inputs ─▶ graph ─▶ hidden states of the tokens wanted ─▶ logits, as without a graph

What a graph computes of a token does not depend on padding, but the sizes of its products do, and with them how a
library sums up: as for decodes, bits of a token follow from the size of the graph that ran it.

Layers that keep states take the sequences of a step from lists, which the host fills before it queues the step
(`memory.listed_runs`); such graphs have room for few prompts, because each may have a chunk that is not full.

Not captured are steps of models with states where no kernel moves them on; latent attention that torch computes, from
all pages that a sequence could have (`GraphBackend.captures_prompts`); and models for which no decode is captured
(`graphs.can_capture`).
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from tandem_engine.config import GraphConfig, ModelConfig
from tandem_engine.executor.cuda.graphs import (
    GIB,
    Captured,
    Decoding,
    GraphCapturer,
    can_capture,
    no_garbage_collection,
)
from tandem_engine.executor.memory_profile import MemoryMeter
from tandem_engine.executor.runner import every_hidden_state, with_states
from tandem_engine.forward.batch import ForwardBatch, ForwardMode
from tandem_engine.forward.prompt_shape import PromptShape, can_be_prompt
from tandem_engine.forward.step_inputs import NO_SAMPLING, StepInputs
from tandem_engine.memory.cache_groups import STATE_CHUNK
from tandem_engine.memory.listed_runs import ListedRuns, RunRoom, can_list_runs, inputs_before_a_token, no_runs
from tandem_engine.memory.state_pool import StatePool
from tandem_engine.model.attention.backend import GraphBackend, PromptGraphPlan

logger = logging.getLogger(__name__)

WIDE = 4096
"""Hidden size of models whose graphs have up to `MIN_LIMIT` tokens, when no flag says more."""

MIN_LIMIT, MAX_LIMIT = 1024, 4096

MAX_ROWS = 128
"""Sequences of a graph, without padding. Each costs some programs of attention that find nothing to do."""

MAX_EXTENDS = 32
"""Sequences of a graph with more than one token, without padding."""

MAX_RUNS = 4
"""Prompts of a graph whose layers keep states."""

CUTS = 2
"""Chunks of a prompt in such a graph that are not full: its last one, and one before a copy of its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGraph:
    """A step of one shape."""

    shape: PromptShape
    input_ids: Tensor
    """[tokens] int64, as are the next two: where the graph reads them."""
    positions: Tensor
    token_rows: Tensor
    captured: ForwardBatch
    """The step that was captured: see `DecodeGraph.captured`."""
    plan: PromptGraphPlan
    graph: Captured
    hidden: Tensor
    """[tokens, hidden_size], where the graph writes it."""
    room: RunRoom | None
    """Of `runs`; None where no layer keeps states."""
    runs: ListedRuns | None
    """Where the graph reads the sequences of a step whose states move on."""

    @property
    def pad_to(self) -> PromptShape:
        """What a step is padded to."""
        return self.shape

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether `batch`, on the host, is not larger."""
        if not self.shape.fits(batch):
            return False
        return self.room is None or (can_list_runs(batch) and self.room.holds(RunRoom.of(batch)))

    def replay(self, inputs: StepInputs, runs: ListedRuns | None) -> Tensor:
        """Queue the layers of the step `inputs`, which was padded, with its `runs` where layers keep states. The
        hidden states of all tokens, for what is queued next: a later replay overwrites them.
        """
        batch = inputs.batch
        if self.runs is not None:
            assert runs is not None, "a step of a model with states has its runs listed"
            self.runs.load(runs)
        self.input_ids.copy_(batch.input_ids)
        self.positions.copy_(batch.positions)
        self.token_rows.copy_(inputs.token_rows)
        self.plan.load(batch)
        self.graph.replay()
        return self.hidden


class PromptGraphs:
    """Graphs of several shapes."""

    def __init__(self, graphs: Iterable[PromptGraph], *, most_reported: int) -> None:
        """`most_reported`: tokens of a step whose pages are sent while it runs. By a graph all its layers are reported
        at its end: the overlap of computing and sending is worth less than the queueing only where a step is short.
        """
        self._graphs = sorted(graphs, key=lambda graph: graph.shape.tokens)
        self._tokens = [graph.shape.tokens for graph in self._graphs]
        self._most_reported = most_reported

    def fitting(self, batch: ForwardBatch) -> PromptGraph | None:
        """The smallest that has room for `batch`, on the host, if there is one."""
        if not self._graphs or not can_be_prompt(batch):
            return None
        if batch.kv_progress is not None and batch.num_tokens > self._most_reported:
            return None
        place = bisect_left(self._tokens, batch.num_tokens)
        if place == len(self._graphs) or not self._graphs[place].holds(batch):
            return None
        return self._graphs[place]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each."""
        return tuple(self._tokens)


NO_PROMPT_GRAPHS = PromptGraphs((), most_reported=0)


@torch.inference_mode()
def capture_prompts(
    capturer: GraphCapturer, decoding: Decoding, sizes: Sequence[int], *, meter: MemoryMeter
) -> PromptGraphs:
    """As `graphs.capture_decodes`, of steps with prompts."""
    if not sizes:
        return NO_PROMPT_GRAPHS
    began, before = time.perf_counter(), meter.used()
    bar = tqdm(sorted(sizes, reverse=True), desc="capturing graphs of prompts", unit="graph", disable=None)
    with no_garbage_collection():
        graphs = PromptGraphs(
            [capture_prompt(capturer, decoding, tokens) for tokens in bar],
            most_reported=host_bound_tokens(decoding.model.config) // 2,
        )
    taken = max(0, meter.used() - before)
    logger.info(
        "graphs of prompts for %s tokens: captured in %.1f s, %.2f GiB",
        ", ".join(map(str, graphs.sizes)),
        time.perf_counter() - began,
        taken / GIB,
    )
    return graphs


@torch.inference_mode()
def capture_prompt(capturer: GraphCapturer, decoding: Decoding, tokens: int) -> PromptGraph:
    """The graph of steps of up to so many tokens. Runs some, of padding alone."""
    shape = shape_of(tokens)
    history = inputs_before_a_token(decoding.states)
    room = None if history is None else run_room(shape)
    runs = None if room is None or history is None else no_runs(room, history, decoding.device)
    input_ids, positions, token_rows = torch.zeros(3, tokens, dtype=torch.int64, device=decoding.device).unbind(0)
    every = torch.arange(tokens, device=decoding.device)
    plan = decoding.backend.prompt_graph_plan(shape, decoding.max_pages)
    step = ForwardBatch(
        step=0,
        mode=ForwardMode.MIXED,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=plan.slots,
        rows=torch.zeros_like(plan.seq_lens),
        seq_lens=plan.seq_lens,
        extend_lens=plan.extend_lens,
        page_table=plan.page_table,
        num_extend=shape.rows,
        sample_index=every[:0],
        sampling=NO_SAMPLING,
    )

    def run() -> Tensor:
        ids = decoding.future_map.resolve(input_ids, token_rows)
        plan.prepare()
        attend = with_states(plan, decoding.states, step, runs)
        return every_hidden_state(decoding.model, decoding.observer, step, input_ids=ids, attend=attend, every=every)

    graph, hidden = capturer.capture(run)
    return PromptGraph(
        shape=shape,
        input_ids=input_ids,
        positions=positions,
        token_rows=token_rows,
        captured=step,
        plan=plan,
        graph=graph,
        hidden=hidden,
        room=room,
        runs=runs,
    )


def shape_of(tokens: int) -> PromptShape:
    """Of the graph for so many tokens."""
    return PromptShape(
        tokens=tokens,
        rows=min(tokens, MAX_ROWS) + 1,
        extends=min(tokens // 2, MAX_EXTENDS) + 1,
    )


def run_room(shape: PromptShape) -> RunRoom:
    """Of the graph of this shape."""
    sequences = max(1, min(MAX_RUNS, shape.extends - 1))
    return RunRoom(
        tokens=shape.tokens,
        sequences=sequences,
        chunks=shape.tokens // STATE_CHUNK + CUTS * sequences,
        decodes=shape.rows - 1,
    )


def host_bound_tokens(config: ModelConfig) -> int:
    """Up to about so many tokens the host needs longer to queue a step's layers than a device to compute them.

    It queues a layer in some 0.6 ms, whatever its width, in which an H200 computes 800 tokens of a layer of 8B.
    """
    limit = MIN_LIMIT
    while limit < MAX_LIMIT and 2 * limit * config.hidden_size <= MIN_LIMIT * WIDE:
        limit *= 2
    return limit


def prompt_sizes(config: GraphConfig, model: ModelConfig, *, most: int) -> tuple[int, ...]:
    """Numbers of tokens to capture, ascending, where steps have `most` tokens at the most.

    Powers of two at first, where a device reads weights and padding costs nothing; later steps of at most a quarter.
    """
    if not (config.enabled and config.prompts):
        return ()
    if config.prompt_sizes:
        return tuple(sorted({size for size in config.prompt_sizes if size <= (config.max_prompt_tokens or size)}))
    largest = min(config.max_prompt_tokens or host_bound_tokens(model), most)
    steps = (*(16, 32, 64, 128, 192), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, largest + 1, 256))
    return (*(size for size in steps if size < largest), largest)


def can_capture_prompts(
    config: ModelConfig, backend: GraphBackend, device: torch.device, *, states: StatePool | None
) -> bool:
    """Whether steps with prompts of the model can be queued without a look at their lengths (see the module)."""
    if not can_capture(config, device) or not backend.captures_prompts:
        return False
    return states is None or inputs_before_a_token(states) is not None
