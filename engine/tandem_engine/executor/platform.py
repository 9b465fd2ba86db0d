"""What an engine's steps run on: everything that differs between a CPU and a GPU.

    OnHost       a thread next to the scheduler's, the CPU's attention, ordinary memory
    OnStreams    streams, graphs, pinned memory; CUDA, or in tests a CPU that behaves like it

An engine calls `platform_for` once when it is built. Code below it does not distinguish devices, except layers of a
model when they are built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch

from tandem_engine.base.linux import bind_thread
from tandem_engine.config import EngineConfig, ModelConfig
from tandem_engine.executor.cuda.graphs import CudaGraphCapturer, Decoding, GraphCapturer, can_capture
from tandem_engine.executor.cuda.prompt_graphs import can_capture_prompts, prompt_sizes
from tandem_engine.executor.cuda.runner import StreamRunner
from tandem_engine.executor.cuda.step_graphs import StepGraphs, capture_steps, measure_steps
from tandem_engine.executor.cuda.streams import (
    CudaStreams,
    DeviceStreams,
    PageStreams,
    Queued,
    StreamExecutor,
    StreamName,
)
from tandem_engine.executor.forward_thread import ForwardThread, InlineExecutor
from tandem_engine.executor.interface import HiddenObserver, Runner
from tandem_engine.executor.memory_profile import meter_for
from tandem_engine.executor.runner import ModelRunner
from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.kernels.compiles import kernel_folder, require_private_kernels
from tandem_engine.memory.group_pools import GroupPools
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.page_copies import PageCopier
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.state_pool import StatePool
from tandem_engine.model.adapters.weights import AdapterWeights
from tandem_engine.model.attention.backend import AttentionBackend, AttentionSpec, GraphBackend
from tandem_engine.model.attention.grouped import GroupedAttention, GroupedGraphAttention
from tandem_engine.model.attention.prompt_choice import LEAST_QUERIES, PromptChooser
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_engine.model.base import StepModel
from tandem_engine.parallel.group import JointWork, SingleRank, TpGroup, use_device
from tandem_engine.sampling.sampler import Sampler

T = TypeVar("T")

Settle = Callable[[ForwardBatch, ForwardResult], ForwardResult]
"""Post-processing of a step's results on the host, before they are returned."""

AttentionMaker = Callable[[KvPool, int, Sequence[AttentionSpec], torch.dtype], GraphBackend]
"""Of a pool, for so many query heads of a dtype, with one spec for each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerParts:
    """What a runner is made of, wherever it runs."""

    model: StepModel
    pool: KvPool
    num_heads: int
    """Query heads of this rank."""
    dtype: torch.dtype
    """That the model computes in."""
    rows: int
    """Largest `req_pool_idx`."""
    groups: GroupPools | None = None
    """Of groups of layers, of which `pool` is the first; None where it has all layers."""
    states: StatePool | None = None
    """Of layers that keep any."""
    observer: HiddenObserver | None = None
    group: TpGroup = field(default_factory=SingleRank)
    max_pages: int = 0
    """Of one sequence."""
    graph_sizes: tuple[int, ...] = ()
    """Rows of decodes that are captured, on a device with graphs."""
    prompt_sizes: tuple[int, ...] = ()
    """Tokens of steps with prompts that are captured there too."""
    adapters: Sequence[AdapterWeights] = ()
    """By slot."""
    agree_time: Callable[[float], float] = float
    """Makes the seconds of a step equal on all ranks; on a device whose steps are queued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorParts:
    """What an executor does with the steps of a runner."""

    runner: Runner
    settle: Settle
    joint: JointWork
    overlap: bool
    threads: int
    cpus: tuple[int, ...]
    """That they stay on; none: wherever the process may be."""
    host_pool: HostPool | None
    states: StatePool | None = None
    """Of layers that keep them: swapped requests take theirs along."""


class Platform(Protocol):
    """One kind of device."""

    def attention(
        self, pool: KvPool, num_heads: int, specs: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> AttentionBackend:
        """Attention over `pool`, of queries of `dtype`."""
        ...

    def host_pool(self, *, num_pages: int, page_bytes: int) -> HostPool:
        """Host memory that pages are copied to."""
        ...

    def runner(self, parts: RunnerParts) -> Runner:
        """A runner, ready to run."""
        ...

    def graph_bytes(self, make: Callable[[], RunnerParts]) -> int:
        """Memory that a runner of what `make` makes will take for graphs; it is called only where there are any."""
        ...

    def executor(self, parts: ExecutorParts) -> "Executor":
        """What runs the steps of `parts.runner`."""
        ...


Executor = ForwardThread | InlineExecutor | StreamExecutor


class OnHost:
    """Implements `Platform` for a CPU."""

    def attention(
        self,
        pool: KvPool,
        num_heads: int,
        specs: Sequence[AttentionSpec],
        dtype: torch.dtype,  # noqa: ARG002 - its kernels take queries of float32
    ) -> AttentionBackend:
        if pool.value_width is not None:
            return TorchReferenceBackend(pool, specs=specs)
        # Only an engine on a CPU needs numba.
        from tandem_engine.model.attention.cpu import CpuAttention

        return CpuAttention(pool, num_heads=num_heads, specs=specs)

    def host_pool(self, *, num_pages: int, page_bytes: int) -> HostPool:
        return HostPool(num_pages=num_pages, page_bytes=page_bytes)

    def runner(self, parts: RunnerParts) -> Runner:
        return ModelRunner(
            model=parts.model,
            pool=parts.pool,
            backend=self._backend(parts),
            sampler=Sampler(),
            future_map=FutureMap(parts.rows),
            observer=parts.observer,
            group=parts.group,
            adapters=parts.adapters,
            states=parts.states,
        )

    def graph_bytes(self, make: Callable[[], RunnerParts]) -> int:  # noqa: ARG002 - no graphs
        return 0

    def _backend(self, parts: RunnerParts) -> AttentionBackend:
        specs, groups = parts.model.attention, parts.groups
        if groups is None:
            return self.attention(parts.pool, parts.num_heads, specs, parts.dtype)
        backends = [self.attention(pool, parts.num_heads, each, parts.dtype) for pool, each in groups.with_specs(specs)]
        return GroupedAttention(backends, windows=groups.layout.windows, places=groups.places)

    def executor(self, parts: ExecutorParts) -> Executor:
        """With one rank a step is called without a word between."""
        joint, settle, runner = parts.joint, parts.settle, parts.runner
        copier = PageCopier(runner.pool, parts.host_pool, parts.states)

        def compute(batch: ForwardBatch) -> ForwardResult:
            return settle(batch, runner.forward(batch))

        forward = compute if joint.group.size == 1 else lambda batch: joint.run(lambda: compute(batch))
        if parts.overlap:
            return ForwardThread(forward, copier=copier, threads=parts.threads, cpus=parts.cpus)
        bind_thread(parts.cpus)
        torch.set_num_threads(parts.threads)
        return InlineExecutor(forward, copier=copier)


class OnStreams:
    """Implements `Platform` for a device with streams."""

    def __init__(
        self,
        *,
        streams: DeviceStreams,
        capturer: GraphCapturer,
        attention: AttentionMaker,
        chooser: PromptChooser | None = None,
    ) -> None:
        """`chooser`: of `attention`, to be asked whether a library that a flag names is used."""
        self.streams = streams
        self._capturer = capturer
        self._attention = attention
        self._chooser = chooser

    def attention(
        self, pool: KvPool, num_heads: int, specs: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> AttentionBackend:
        return self._attention(pool, num_heads, specs, dtype)

    def host_pool(self, *, num_pages: int, page_bytes: int) -> HostPool:
        return HostPool(num_pages=num_pages, page_bytes=page_bytes, pinned=self.streams.device.type == "cuda")

    def runner(self, parts: RunnerParts) -> StreamRunner:
        """Graphs are captured here: it takes seconds."""
        assert not parts.adapters, "adapters are refused where a model is loaded for a device with streams"
        with self.streams.on(StreamName.FORWARD):
            decoding = self._decoding(parts)
        runner = StreamRunner(
            model=parts.model,
            pool=parts.pool,
            backend=decoding.backend,
            future_map=decoding.future_map,
            streams=self.streams,
            observer=parts.observer,
            group=parts.group,
            states=parts.states,
        )
        runner.agree_time = parts.agree_time
        self.streams.synchronize()
        decodes, prompts = self._sizes(parts, decoding.backend)
        if decodes or prompts:
            runner.capture(lambda model: self._capture(decoding.of(model), decodes, prompts))
        return runner

    def graph_bytes(self, make: Callable[[], RunnerParts]) -> int:
        parts = make()
        with self.streams.on(StreamName.FORWARD):
            decoding = self._decoding(parts)
            decodes, prompts = self._sizes(parts, decoding.backend)
            if not decodes and not prompts:
                return 0
            return measure_steps(
                self._capturer, decoding, decodes=decodes, prompts=prompts, meter=meter_for(self.streams.device)
            )

    def executor(self, parts: ExecutorParts) -> Executor:
        """Both modes queue; without overlap the loop settles a step before it launches the next."""
        joint, settle, runner = parts.joint, parts.settle, parts.runner
        assert isinstance(runner, StreamRunner), f"{type(runner).__name__} does not queue its steps"
        pages = PageStreams(self.streams, runner.pool, parts.host_pool, parts.states)
        runner.before = pages.before

        def enqueue(batch: ForwardBatch) -> Queued[ForwardResult]:
            return joint.run(lambda: runner.enqueue(batch)).then(lambda result: settle(batch, result))

        return StreamExecutor(enqueue, copier=pages.enqueue, streams=self.streams)

    def _decoding(self, parts: RunnerParts) -> Decoding:
        device = self.streams.device
        return Decoding(
            model=parts.model,
            backend=self._backend(parts),
            future_map=FutureMap(parts.rows, device=device, queued=True),
            observer=parts.observer,
            device=device,
            max_pages=parts.max_pages,
            states=parts.states,
        )

    def _backend(self, parts: RunnerParts) -> GraphBackend:
        specs, groups = parts.model.attention, parts.groups
        pools = [(parts.pool, specs)] if groups is None else groups.with_specs(specs)
        backends = [self._attention(pool, parts.num_heads, each, parts.dtype) for pool, each in pools]
        if self._chooser is not None:
            self._chooser.require_use()
        if groups is None:
            return backends[0]
        return GroupedGraphAttention(backends, windows=groups.layout.windows, places=groups.places)

    def _capture(self, decoding: Decoding, decodes: Sequence[int], prompts: Sequence[int]) -> StepGraphs:
        with self.streams.on(StreamName.FORWARD):
            return capture_steps(
                self._capturer, decoding, decodes=decodes, prompts=prompts, meter=meter_for(self.streams.device)
            )

    def _sizes(self, parts: RunnerParts, backend: GraphBackend) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows of decodes and tokens of steps with prompts to capture: none where the model cannot be captured."""
        config, device = parts.model.config, self.streams.device
        prompts = can_capture_prompts(config, backend, device, states=parts.states)
        return (
            parts.graph_sizes if can_capture(config, device) else (),
            parts.prompt_sizes if prompts else (),
        )


def platform_for(device: str, chooser: PromptChooser | None = None) -> Platform:
    """Of a device that `require_device` has accepted. The calling thread is to run its steps. `chooser`: of libraries
    for long prompts, on a GPU.
    """
    if device == "cpu":
        return OnHost()
    require_private_kernels()
    use_device(device)
    streams = CudaStreams(torch.device(device))
    attention = partial(gpu_attention, chooser=chooser)
    return OnStreams(streams=streams, capturer=CudaGraphCapturer(streams), attention=attention, chooser=chooser)


def platform_of(config: EngineConfig, model: ModelConfig) -> Platform:
    """Of an engine's device. Libraries compute prompts of more tokens than a graph has."""
    graphs = prompt_sizes(config.graphs, model, most=config.most_tokens)
    least = max(LEAST_QUERIES, 1 + max(graphs, default=0))
    return platform_for(
        config.device,
        PromptChooser(
            wanted=config.attention, least_queries=least, folder=lambda: kernel_folder() / "prompt-attention"
        ),
    )


def gpu_attention(
    pool: KvPool,
    num_heads: int,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    *,
    chooser: PromptChooser | None = None,
) -> GraphBackend:
    """Kernels, and what `chooser` finds for long prompts; torch for latents that are too large for kernels."""
    # Only an engine on a device needs Triton.
    from tandem_engine.kernels.triton.latent_attention import MAX_RANK
    from tandem_engine.model.attention.triton import TritonBackend

    if pool.value_width is not None and pool.value_width > MAX_RANK:
        if chooser is not None:
            chooser.leave("the model stores latents")
        return TorchReferenceBackend(pool, specs=specs)
    return TritonBackend(pool, num_heads=num_heads, specs=specs, dtype=dtype, chooser=chooser)
