"""An engine in this process: model, KV memory, scheduler and, with a port, the transfer of KV to peers.

Life of an engine
    load    checkpoint → `LoadedModel`, shared by any number of engines of one process
    build   pool, prefix cache, executor, scheduler; with an `EnginePort` also NIXL and the handoff stage
    use     `add` / `abort` / `step` by whoever owns the loop (`process`), or `generate` offline
    close   executor first, so that nothing computes any more; then the transport, then sockets

All methods belong to one thread, the scheduler thread.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import torch

from tandem_engine.clock import Clock, MonotonicClock
from tandem_engine.config import (
    DEFAULT_CONTEXT,
    CacheConfig,
    EngineConfig,
    GrammarConfig,
    ModelConfig,
    SchedulerConfig,
    SpecConfig,
)
from tandem_engine.disaggregation.peers import PeerChannels, PeerInbound
from tandem_engine.disaggregation.ranks.peers import PeerInputs, RankedPeers
from tandem_engine.disaggregation.ranks.transport import RankedTransport, RankNews, RankPlace
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.errors import BusyError, CheckpointError, ConfigError, EngineError
from tandem_engine.executor.faults import LosesResults
from tandem_engine.executor.forward_thread import Forward
from tandem_engine.executor.graphs import graph_sizes
from tandem_engine.executor.interface import HiddenObserver, Runner
from tandem_engine.executor.lone_batch import logits_of, lone_batch
from tandem_engine.executor.memory_meter import meter_for
from tandem_engine.executor.platform import Executor, ExecutorParts, Platform, RunnerParts, Settle, platform_for
from tandem_engine.executor.profiler import StepProfiler
from tandem_engine.executor.self_test import SelfTestReport, self_test
from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult
from tandem_engine.freed import give_back
from tandem_engine.generation import Generation, Generations
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.kernels.float8 import FLOAT8
from tandem_engine.memory.allocator import PageAllocator
from tandem_engine.memory.conservation import ConservationReport
from tandem_engine.memory.copies import CopyQueue
from tandem_engine.memory.host.disk import DiskStorage
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.host.pool import HostPool
from tandem_engine.memory.kv_dtype import kv_dtype, require_kv_dtype
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.no_cache import NoPrefixCache
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.prefix_cache import PrefixCache
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.memory.rows import ReqToTokenPool
from tandem_engine.memory.sizing import SMALLEST_POOL
from tandem_engine.messages.control import EngineStats, KvGeometry, PauseMode
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest, Peer
from tandem_engine.messages.transfer import Hello, PeerMessage
from tandem_engine.model.base import CausalLM
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.kv_scales import scales_digest
from tandem_engine.model.loader import load_kv_scales, load_model, resolve_dtype
from tandem_engine.model.sharing import heads_of_rank, require_shareable
from tandem_engine.names import RequestId
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.devices import device_of_rank, require_device
from tandem_engine.parallel.failure import Departure
from tandem_engine.parallel.group import Parallel
from tandem_engine.parallel.inputs import (
    Abort,
    AbortAll,
    AbortClient,
    Add,
    CloseSession,
    DecodeElsewhere,
    Drain,
    FlushCache,
    LoadWeights,
    LosePeer,
    Meet,
    Pause,
    Resume,
)
from tandem_engine.parallel.joint import JointWork
from tandem_engine.parallel.split import OUTPUTS
from tandem_engine.pool_size import Footprint, plan_pool
from tandem_engine.reload import Reloaded, WeightsReload
from tandem_engine.sampling.grammar.compiler import GrammarCompiler, NoGrammars
from tandem_engine.sampling.grammar.guidance.backend import GuidanceBackend
from tandem_engine.sampling.grammar.guidance.vocabulary import GuidanceVocabulary
from tandem_engine.scheduler.lockstep import AgreedClock, AgreedInputs, DirectInputs, Inputs
from tandem_engine.scheduler.model_facts import ModelFacts
from tandem_engine.scheduler.scheduler import Scheduler
from tandem_engine.scheduler.speculation import Speculation, StepDrafts
from tandem_engine.scheduler.stop import DecodeText
from tandem_engine.scheduler.stream import Sink
from tandem_engine.speculative.assembly import Draft, Target, keep_states, make_proposer, read_draft
from tandem_engine.speculative.interface import Proposer
from tandem_engine.speculative.lengths import DraftLengths
from tandem_engine.speculative.turn_timer import TurnTimer
from tandem_engine.speculative.verify import ChainVerifier, VerifiedForward
from tandem_engine.stats import Throughput, engine_stats
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    import zmq

LAYOUT_VERSION = 2
"""Of `KvPool`, [page, layer, kv, kv_head, slot, head_dim], and of the digests of its pages."""

MODEL_REPLACED = Finish(
    reason=FinishReason.ERROR, error="the model's weights were replaced", code="model_replaced", retryable=True
)

DRAFT_ROWS = 2
"""Tokens of a request in most steps of a draft network: the last draft, if it was right, and the one behind it."""
SELF_TEST_TOKENS = 256
GRAMMAR_WAIT = 0.05
"""Seconds that `generate` sleeps when it has nothing to do until a grammar is compiled."""
MAX_STALLED_TURNS = 100_000
"""Turns without progress after which `generate` gives up instead of spinning for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """Weights and everything that follows from the checkpoint. Immutable and shared."""

    config: EngineConfig
    model: CausalLM
    dtype: torch.dtype
    threads: int
    """That a forward may use."""
    text: TextTokenizer | None
    vocabulary: GuidanceVocabulary | None = None
    """For grammars; None without a tokenizer or an EOS token."""
    kv_scales: torch.Tensor | None = None
    """For float8 KV, of all heads of the model: [layers, 2, KV heads]. None where the checkpoint has none."""
    parallel: Parallel = field(default_factory=Parallel)
    """This rank and those that hold the rest of the weights."""
    weight_bytes: int = 0
    """Memory that loading took for good, on this rank."""

    @property
    def model_config(self) -> ModelConfig:
        return self.model.config


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePort:
    """How an engine is reached by its peers."""

    worker_id: str
    incarnation: str
    context: IpcContext
    host: str = "127.0.0.1"
    peer_port: int = 0


def load(config: EngineConfig, *, progress: bool, parallel: Parallel | None = None) -> LoadedModel:
    """Read the checkpoint, or this rank's part of it. `parallel`: the ranks, if there are several (see `launch`).

    Raises `CheckpointError` and `ConfigError` before anything large is allocated.
    """
    parallel = parallel or Parallel()
    assert parallel.size == config.parallel.tp_size, f"{parallel.size} ranks for {config.parallel}"
    facts = require_loadable(config)
    config = replace(config, device=device_of_rank(config.device, config.parallel.local_rank(parallel.rank)))
    read_draft(config.speculative, target=facts, target_path=config.model_path)
    context_length = _context_length(config, facts)
    threads = max(1, (config.threads or torch.get_num_threads()) // config.parallel.local_size)
    # This thread only schedules; see `ForwardThread` for what a second compute team would cost.
    torch.set_num_threads(1)
    dtype = resolve_dtype(config.dtype, facts, device=config.device)
    meter = meter_for(config.device)
    before = meter.used()
    model = load_model(
        config.model_path,
        facts,
        dtype,
        config.device,
        context_length=context_length,
        progress=progress,
        group=parallel.forward,
        load_format=config.load_format,
        quantization=config.quantization,
    )
    give_back()
    scheduler = replace(config.scheduler, context_length=context_length)
    folder = Path(config.model_path)
    text = TextTokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return LoadedModel(
        config=replace(config, scheduler=scheduler),
        model=model,
        dtype=dtype,
        threads=threads,
        text=text,
        vocabulary=None if text is None else _vocabulary(folder, facts),
        kv_scales=load_kv_scales(config.model_path, model.config, load_format=config.load_format),
        parallel=parallel,
        weight_bytes=max(0, meter.used() - before),
    )


def _vocabulary(folder: Path, facts: ModelConfig) -> GuidanceVocabulary | None:
    if not facts.eos_token_ids:
        return None
    return GuidanceVocabulary(
        tokenizer_file=folder / "tokenizer.json", vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids
    )


def require_loadable(config: EngineConfig) -> ModelConfig:
    """What the checkpoint says of itself. Raises what `load` would, before any weights are read."""
    require_device(config.device, ranks=config.parallel.local_size)
    require_kv_dtype(config.cache.dtype, config.device)
    facts = read_model_config(
        config.model_path,
        impl=config.model_impl,
        load_format=config.load_format,
        quantization=config.quantization,
        device=config.device,
    )
    require_shareable(facts, config.parallel.tp_size)
    _context_length(config, facts)
    return facts


def _context_length(config: EngineConfig, facts: ModelConfig) -> int:
    if config.context_length > facts.max_position:
        raise ConfigError(
            f"--context-length {config.context_length} is over the model's {facts.max_position} positions"
        )
    return config.context_length or min(facts.max_position, DEFAULT_CONTEXT)


class Engine:
    """One scheduler with its memory and executor. Build with `Engine.build`."""

    def __init__(
        self,
        *,
        loaded: LoadedModel,
        config: EngineConfig,
        pool: KvPool,
        memory: KvMemory,
        runner: Runner,
        executor: Executor,
        joint: JointWork,
        agreement: Agreement,
        scheduler: Scheduler,
        inputs: Inputs,
        generations: Generations,
        grammars: GrammarCompiler | NoGrammars,
    ) -> None:
        self.model_config = loaded.model_config
        self.text = loaded.text
        self.threads = loaded.threads
        self.scheduler_config = config.scheduler
        self.memory = memory
        self.scheduler = scheduler
        self.geometry = _geometry(loaded, config)
        self._peer_group = config.disagg.peer_group
        self.compat_hash = compat_hash(self.geometry, loaded.model_config.num_kv_heads, self._peer_group)
        self._pool = pool
        self._runner = runner
        self._executor = executor
        self._joint = joint
        self._inputs = inputs
        self._loaded_with = loaded.config
        self._reload = WeightsReload(
            load=self._load_replacement,
            replace=self.replace_model,
            agreement=agreement,
            rank=loaded.parallel.rank,
            size=loaded.parallel.size,
        )
        inputs.weights = self._reload
        self._parallel = loaded.parallel
        self._stopped = False
        self._generations = generations
        self._grammars = grammars
        self._throughput = Throughput(clock=scheduler.clock)
        self._handoff: HandoffStage | None = None
        self._peers: PeerChannels | None = None
        self._ranked_peers: RankedPeers | None = None
        self._transport: RankedTransport | None = None

    @classmethod
    def build(
        cls,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        sink: Sink | None = None,
        port: EnginePort | None = None,
        platform: Platform | None = None,
    ) -> Self:
        """Assemble an engine around `loaded`; `config` may differ from the one it was loaded with.

        `sink` receives outputs; without one, `generate` gathers them. `port` gives it peers, and NIXL
        unless the transport is `none`. Of several ranks only the first has a port, and all transfer KV.
        `platform` computes its steps; None takes that of the device.

        Raises:
            ConfigError: the pool does not fit the memory or cannot hold two pages, or a port is taken.
            TransportUnavailableError: NIXL was asked for and cannot be loaded.
        """
        geometry = _geometry(loaded, config)
        draft = read_draft(config.speculative, target=loaded.model_config, target_path=loaded.config.model_path)
        platform = platform or platform_for(loaded.config.device)
        pool = _sized_pool(geometry, config, loaded, draft, platform)
        host_pool = _host_pool(pool, config.cache, platform)
        target = _target(loaded, config, pool, platform)
        states = keep_states(draft, target)
        agreement = Agreement(loaded.parallel.schedule)
        parts = _runner_parts(loaded, pool, config, states, graphs=True)
        runner = platform.runner(replace(parts, agree_time=lambda seconds: agreement.share(seconds, float)))
        joint = JointWork(group=loaded.parallel.forward, failure=loaded.parallel.failure)
        executor = platform.executor(
            ExecutorParts(
                runner=runner,
                settle=_settle(runner, config),
                joint=joint,
                overlap=config.scheduler.enable_overlap,
                threads=loaded.threads,
                host_pool=host_pool,
            )
        )
        copies = CopyQueue(submit=executor.copy, least=None if loaded.parallel.size == 1 else agreement.least)
        memory = _memory(pool, config, copies, _host_memory(host_pool, copies, config.cache, geometry))
        generations = Generations()
        grammars = _grammars(loaded, config.grammar)
        facts = ModelFacts(
            vocab_size=loaded.model_config.vocab_size,
            eos_token_ids=frozenset(loaded.model_config.eos_token_ids),
            context_length=loaded.model_config.max_position,
            hidden_size=loaded.model_config.hidden_size,
        )
        local_clock, agreed_clock = MonotonicClock(), AgreedClock()
        clock = local_clock if loaded.parallel.size == 1 else agreed_clock
        speculation = None
        if config.speculative.algorithm is not None:
            proposer = make_proposer(
                config.speculative, draft, target, states=states, run=lambda work: executor.run(lambda: joint.run(work))
            )
            speculation = _speculation(config.speculative, proposer, memory, clock, local_clock, agreement)
        scheduler = Scheduler(
            memory=memory,
            executor=executor,
            config=config.scheduler,
            model=facts,
            clock=clock,
            sink=sink or generations,
            decode_text=_decode_text(loaded.text),
            speculation=speculation,
            session_pages=config.cache.session_pages(geometry.page_bytes, num_pages=pool.num_pages),
            stopwatch=local_clock,
            grammars=grammars,
            least=agreement.least,
        )
        engine = cls(
            loaded=loaded,
            config=config,
            pool=pool,
            memory=memory,
            runner=runner,
            executor=executor,
            joint=joint,
            agreement=agreement,
            scheduler=scheduler,
            inputs=_inputs(scheduler, agreement, loaded.parallel, agreed_clock, local_clock),
            generations=generations,
            grammars=grammars,
        )
        engine.on_wait(lambda: None)
        if port is not None:
            engine._open_port(port)
        if config.disagg.transport != "none":
            engine._open_transport(config, agreement)
        return engine

    def _open_port(self, port: EnginePort) -> None:
        """Bind the peer socket."""
        inbound: PeerInbound = PeerInbound(
            port.context, port.host, port.peer_port, inbound=PeerMessage, outbound=PeerMessage
        )
        me = Peer(
            worker_id=port.worker_id,
            incarnation=port.incarnation,
            endpoint=inbound.endpoint,
            compat_hash=self.compat_hash,
        )
        self._peers = PeerChannels(context=port.context, inbound=inbound, me=me)

    def _open_transport(self, config: EngineConfig, agreement: Agreement) -> None:
        """Start the transport and attach the handoff stage, on all ranks if the first one has a port."""
        names = agreement.share(() if self._peers is None else (self._peers.me,), tuple[Peer, ...])
        if not names:
            return
        me, parallel = names[0], self._parallel
        # Only an engine that transfers needs nixl installed.
        from tandem_engine.disaggregation.nixl.transport import NixlTransport

        clock = MonotonicClock()
        place = RankPlace(rank=parallel.rank, size=parallel.size, kv_heads=self.model_config.num_kv_heads)
        self._transport = RankedTransport.build(
            local=NixlTransport(pool=self._pool, me=place.agent(me), clock=clock),
            me=me,
            place=place,
            gather_hellos=lambda hello: agreement.gather(hello, Hello),
            gather=lambda news: agreement.gather(news, RankNews),
            clock=clock,
        )
        if parallel.size > 1:
            self._ranked_peers = RankedPeers(me=me, least=agreement.least, socket=self._peers)
        peers = self._ranked_peers or self._peers
        assert peers is not None, "rank 0 has a port"
        self._handoff = HandoffStage.build(
            host=self.scheduler,
            transport=self._transport,
            peers=peers,
            config=config.disagg,
            page_bytes=self.geometry.page_bytes * parallel.size,
            layers=self._pool.layout.layers,
        )
        self._inputs.peers = PeerInputs(stage=self._handoff, peers=self._ranked_peers)
        self.scheduler.attach(self._handoff)

    # What the owner of the loop uses.

    def add(self, message: GenerateRequest, client: bytes = b"") -> None:
        """See `Scheduler.add`. With several ranks this and all that follows happens at the next `step`."""
        self._inputs.submit(Add(message=message, client=client))

    def check(self, message: GenerateRequest) -> None:
        """See `Scheduler.check`."""
        self.scheduler.check(message)

    @property
    def queue_room(self) -> int:
        """Requests that `add` would take now before it refuses more."""
        return self.scheduler_config.max_queued_requests - self.scheduler.queues.num_waiting

    def abort(self, rid: RequestId) -> None:
        """See `Scheduler.abort`."""
        self._inputs.submit(Abort(rid=rid))

    def abort_client(self, client: bytes) -> None:
        """See `Scheduler.abort_client`."""
        self._inputs.submit(AbortClient(client=client))

    def close_session(self, session_id: str, *, cache_salt: str = "") -> None:
        """Forget a conversation. Unknown ids are ignored."""
        self._inputs.submit(CloseSession(salt=cache_salt, session=session_id))

    def abort_all(self) -> None:
        """See `Scheduler.abort_all`."""
        self._inputs.submit(AbortAll())

    def drain(self) -> None:
        """See `Scheduler.drain`."""
        self._inputs.submit(Drain())

    def step(self) -> bool:
        """See `Scheduler.step`. Raises `RankLostError` when the engine's ranks cannot go on."""
        if self._ranked_peers is not None:
            for item in self._ranked_peers.inputs():
                self._inputs.submit(item)
        self._stopped = not self._inputs.begin_turn()
        if self._stopped:
            return False
        reloaded = self._reload.poll()
        return self.scheduler.step() or reloaded

    def follow(self) -> None:
        """Be a rank that is not the first: take every turn that rank 0 takes, until it closes the engine."""
        while not self._stopped:
            self.step()
            # Rank 0 reports what is in the cache.
            self.memory.cache.take_events()

    def on_wait(self, answer_others: Callable[[], None]) -> None:
        """See `Scheduler.on_wait`."""

        def waiting() -> None:
            self._inputs.check()
            answer_others()

        self.scheduler.on_wait(waiting)

    @property
    def idle(self) -> bool:
        """Nothing is left to do but wait for messages."""
        return self.scheduler.idle and not self._inputs.pending

    @property
    def dormant(self) -> bool:
        """`step` has nothing to do until somebody asks for something."""
        return self.idle and not self._reload.active

    def peer_gone(self, incarnation: str) -> None:
        """A peer is fenced: fail what waits for it."""
        self._inputs.submit(LosePeer(incarnation=incarnation))

    def peer_ended(self, incarnation: str) -> None:
        """The process of a fenced peer has ended: free what it might have been writing to."""
        self._inputs.submit(LosePeer(incarnation=incarnation, ended=True))

    def meet_peers(self, peers: Sequence[Peer]) -> None:
        """Get to know these peers, and no others, and measure the links to them."""
        self._inputs.submit(Meet(peers=tuple(peers)))

    @property
    def awaits_ranks(self) -> bool:
        """Another rank may be about to report what wakes nobody here: `step` again in a moment."""
        return self._transport is not None and self._transport.awaits_ranks

    @property
    def departure(self) -> Departure:
        """Why this engine should be drained, once a node of it is to leave."""
        return self._parallel.departure

    def audit(self) -> ConservationReport:
        """The five sets of pages, and what is wrong with them."""
        return self.scheduler.audit()

    def self_test(self) -> SelfTestReport:
        """Compute on random tokens, on pages that are free, with no step in flight. Raises `EngineError`.

        Its rates stand in for measured ones: a worker that reported no step time would look free to routers, whatever
        they give it.
        """
        tokens = min(SELF_TEST_TOKENS, self.scheduler.max_request_tokens - 1)
        pages = self.memory.reserve_pages(min(self.memory.pages_for(tokens + 1), self.memory.available_pages()))
        if not pages:
            raise BusyError("no KV page is free for a self-test: try again, or pause with mode retract before")
        try:
            report = self._executor.run(
                lambda: self._joint.run(
                    lambda: self_test(
                        self._runner,
                        pages=pages,
                        page_size=self.geometry.page_size,
                        vocab_size=self.model_config.vocab_size,
                        prompt_tokens=tokens,
                    )
                )
            )
        finally:
            self.memory.give_back(pages)
        self.scheduler.tally.expect(report.prefill_tokens_per_s, report.decode_step_s)
        return report

    def forced_logits(self, tokens: Sequence[int], *, chunk: int) -> Iterator[torch.Tensor]:
        """What the model says after each of `tokens`, given those before it: float32 [n, vocab], `chunk` at a time.

        On pages that are free, with no step in flight and nobody else's meanwhile. Of one rank.

        Raises:
            BusyError: too few pages are free.
        """
        assert self._parallel.size == 1, "logits of a rank are those of its part of the vocabulary"
        pages = self.memory.reserve_pages(self.memory.pages_for(len(tokens)))
        if pages is None:
            raise BusyError(f"{len(tokens)} tokens need more KV pages than are free")
        text, page_size = torch.tensor(tokens), self.geometry.page_size
        try:
            for begin in range(0, len(tokens), chunk):
                so_far = text[: begin + chunk]
                batch = lone_batch(so_far, pages, page_size, extend_len=len(so_far) - begin, every_token=True)
                yield self._executor.run(partial(logits_of, self._runner, batch))
        finally:
            self.memory.give_back(pages)

    @property
    def me(self) -> Peer:
        """This engine as its peers know it. Only with a port."""
        assert self._peers is not None, "an engine without a port has no peers"
        return self._peers.me

    @property
    def peer_endpoint(self) -> str:
        return self.me.endpoint

    @property
    def transport_name(self) -> str:
        return "none" if self._transport is None else "nixl"

    @property
    def total_pages(self) -> int:
        return self._pool.num_pages

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """Sockets whose messages `step` handles: what an idle loop sleeps on."""
        return [] if self._peers is None else [self._peers.inbound.socket]

    def descriptors(self) -> list[int]:
        """File descriptors that become readable when `step` has something to do."""
        transport = [] if self._transport is None else [self._transport.fileno()]
        host = [] if self.memory.host is None else self.memory.host.descriptors()
        grammars = self._grammars.fileno()
        return [*transport, *host, *([] if grammars is None else [grammars])]

    def stats(self) -> EngineStats:
        """Numbers for the worker service."""
        return engine_stats(self.scheduler, self._handoff, self._throughput, total_pages=self.total_pages)

    # For operators.

    def pause(self, mode: PauseMode, *, refuse_new: bool = False) -> None:
        """See `Scheduler.pause`."""
        self._inputs.submit(Pause(mode=mode, refuse_new=refuse_new))

    def resume(self) -> None:
        """See `Scheduler.resume`."""
        self._inputs.submit(Resume())

    def decode_elsewhere(self, *, wanted: bool, within_s: float = inf) -> None:
        """See `Scheduler.decode_elsewhere`."""
        self._inputs.submit(DecodeElsewhere(wanted=wanted, within_s=within_s))

    def flush_cache(self) -> int:
        """Empty the prefix cache; returns the pages it had. Raises `BusyError` while requests hold KV."""
        self.scheduler.require_flushable()
        pages = self.audit().tree
        self._inputs.submit(FlushCache())
        return pages

    def reload(self, path: str | None = None) -> Future[Reloaded]:
        """Load the weights in `path`, or the served folder again, beside those that serve; then `replace_model`.

        It goes on with `step`. The future raises `CheckpointError` or `ConfigError` when the new weights cannot
        serve on every rank; the old ones do then.

        Raises:
            BusyError: a reload is going on.
            ConfigError: there is a host cache or swap space.
        """
        self.require_replaceable()
        answer = self._reload.expect()
        self._inputs.submit(LoadWeights(path=path or self._loaded_with.model_path))
        return answer

    def _load_replacement(self, path: str) -> LoadedModel:
        # A configuration names the device of the node's first rank.
        device = device_of_rank(self._loaded_with.device, -self._loaded_with.parallel.local_rank(self._parallel.rank))
        config = replace(self._loaded_with, model_path=path, device=device)
        loaded = load(config, progress=False, parallel=self._parallel)
        self._require_same_architecture(loaded)
        return loaded

    def replace_model(self, loaded: LoadedModel) -> int:
        """Serve other weights of the same architecture from the next step on; on all ranks, in the same turn.

        Requests that have begun end with a retryable error; their number is returned. The prefix cache is
        empty afterwards, of what sessions have pinned too, and `compat_hash` is another one.

        Raises:
            ConfigError: the architecture, the dtype or the tokens that end an output differ, or there is a host
                cache or swap space.
            EngineError: the new weights compute nonsense, here or on another rank. Nothing has changed.
        """
        self.require_replaceable()
        self._require_same_architecture(loaded)
        self.scheduler.stand_still()
        old, old_scales = self._runner.model, self._pool.scales
        self._runner.model = loaded.model
        if old_scales is not None:
            old_scales = old_scales.clone()
            self._pool.set_scales(_scales_of_rank(loaded))
        try:
            self.self_test()
        except Exception as error:
            self._runner.model = old
            if old_scales is not None:
                self._pool.set_scales(old_scales)
            if isinstance(error, EngineError):
                raise
            where = loaded.config.model_path
            raise CheckpointError(f"the weights in {where} do not compute: {type(error).__name__}: {error}") from error
        ended = self.scheduler.end_started(MODEL_REPLACED)
        self.scheduler.forget_kv()
        self._loaded_with = loaded.config
        self.model_config = loaded.model_config
        self.geometry = msgspec.structs.replace(
            self.geometry,
            fingerprint=loaded.model_config.fingerprint,
            kv_scales=_kv_scales(loaded, self._pool.data.dtype),
        )
        self.compat_hash = compat_hash(self.geometry, loaded.model_config.num_kv_heads, self._peer_group)
        self._rename(self.compat_hash)
        return ended

    def require_replaceable(self) -> None:
        """Raise `ConfigError` when the weights cannot be replaced, whatever by."""
        if self.memory.host is not None:
            raise ConfigError(
                "weights are not reloaded while host memory or files hold KV of the old ones "
                "(--enable-hierarchical-cache, --swap-space): start a worker with the new ones"
            )

    def _require_same_architecture(self, loaded: LoadedModel) -> None:
        path, dtype = loaded.config.model_path, _name(loaded.dtype)
        served = self.geometry.model_dtype or self.geometry.dtype
        if dtype != served:
            raise ConfigError(f"{path} loads as {dtype}, served is {served}: set --dtype, start anew")
        old, new = asdict(self.model_config), asdict(loaded.model_config)
        # The dtype on disk says nothing about the one in memory, and the fingerprint is what changes.
        differing = [name for name in old if old[name] != new[name] and name not in ("fingerprint", "dtype")]
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{path} has {name} {new[name]}, served is {old[name]}: a reload keeps the architecture, "
                "start a worker for another one"
            )

    def _rename(self, kv_shape: str) -> None:
        """Tell the parts that speak to peers what KV they have now."""
        for peers in (self._peers, self._ranked_peers):
            if peers is not None:
                peers.me = msgspec.structs.replace(peers.me, compat_hash=kv_shape)
        if self._handoff is not None and self._transport is not None:
            self._transport.rename(self._handoff.peers.me)

    def profiler(self, folder: Path | None) -> StepProfiler:
        """A profiler of this engine's steps that writes to `folder`."""
        return StepProfiler(executor=self._executor, folder=folder, clock=MonotonicClock())

    # Offline use.

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        steps_between: int = 0,
        before_turn: Callable[[], None] = lambda: None,
    ) -> list[Generation]:
        """Run `requests` to their end and return their outputs in order.

        With `steps_between` the next request is added only after that many turns, so that prompts meet
        running requests. `before_turn` may operate the engine. Only for an engine that was built without a sink.
        """
        waiting = list(reversed(requests))
        stalled = 0
        while waiting or not self.idle:
            if waiting:
                self._expect(waiting.pop())
            for _ in range(steps_between if waiting else 1):
                before_turn()
                stalled = 0 if self.step() else stalled + 1
                if stalled:
                    self.scheduler.wait_for_grammar(GRAMMAR_WAIT)
            assert stalled < MAX_STALLED_TURNS, f"no progress for {stalled} turns: {self.scheduler.stats()}"
        return self._generations.take_all([request.rid for request in requests])

    def _expect(self, request: GenerateRequest) -> None:
        self._generations.expect(request.rid, resumed=len(request.resume_ids))
        self.add(request)

    def close(self) -> None:
        """Stop computing, on all ranks, then compiling, storing and transferring. Idempotent."""
        self._inputs.stop()
        self._reload.close()
        if self._parallel.failure.error is None:
            self._executor.shutdown()
        else:
            self._executor.abandon()
        self._grammars.close()
        if self.memory.host is not None:
            self.memory.host.close()
        if self._transport is not None:
            self._transport.close()
        if self._peers is not None:
            self._peers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def compat_hash(geometry: KvGeometry, kv_heads: int, peer_group: str = "") -> str:
    """Digest of everything two workers must share before one writes into the other's pages.

    Not of how many ranks share the model's `kv_heads`: each head goes to whoever holds it there.
    """
    whole = msgspec.structs.replace(geometry, num_kv_heads=kv_heads, tp_size=1)
    group = hashlib.blake2b(peer_group.encode(), digest_size=16).digest() if peer_group else b""
    return hashlib.blake2b(msgspec.msgpack.encode(whole), digest_size=16, key=group).hexdigest()


def _geometry(loaded: LoadedModel, config: EngineConfig) -> KvGeometry:
    facts, dtype = loaded.model_config, kv_dtype(config.cache.dtype, loaded.dtype)
    return KvGeometry(
        fingerprint=facts.fingerprint,
        num_layers=facts.num_layers,
        num_kv_heads=heads_of_rank(facts, loaded.parallel.size).kv,
        head_dim=facts.head_dim,
        page_size=config.cache.page_size,
        dtype=_name(dtype),
        layout_version=LAYOUT_VERSION,
        tp_size=loaded.parallel.size,
        model_dtype="" if dtype is loaded.dtype else _name(loaded.dtype),
        kv_scales=_kv_scales(loaded, dtype),
    )


def _kv_scales(loaded: LoadedModel, dtype: torch.dtype) -> str:
    """See `KvGeometry.kv_scales`."""
    return scales_digest(loaded.kv_scales) if dtype in FLOAT8 else ""


def _scales_of_rank(loaded: LoadedModel) -> torch.Tensor:
    """Those of the KV heads that this rank holds."""
    facts, parallel = loaded.model_config, loaded.parallel
    part = OUTPUTS.part(facts.num_kv_heads, rank=parallel.rank, size=parallel.size)
    whole = torch.ones(facts.num_layers, 2, facts.num_kv_heads) if loaded.kv_scales is None else loaded.kv_scales
    return whole[:, :, part.start : part.stop]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sized_pool(
    geometry: KvGeometry, config: EngineConfig, loaded: LoadedModel, draft: Draft | None, platform: Platform
) -> KvPool:
    """As large as the memory allows, with the draft's share of every page."""
    beside = draft_bytes = 0
    if draft is not None:
        beside = draft.page_bytes(geometry.page_size, loaded.dtype)
        draft_bytes = draft.weight_bytes(
            loaded.dtype, target_path=loaded.config.model_path, target_is_whole=loaded.parallel.size == 1
        )

    def parts_over(pages: int, *, graphs: bool) -> RunnerParts:
        return _runner_parts(loaded, _pool(geometry, config, loaded, pages=pages), config, None, graphs=graphs)

    def forward_over(pages: int) -> Forward:
        return platform.runner(parts_over(pages, graphs=False)).forward

    footprint = Footprint(
        weight_bytes=loaded.weight_bytes,
        page_bytes=geometry.page_bytes + beside,
        host_page_bytes=geometry.page_bytes,
        threads=loaded.threads,
        forward_over=forward_over,
        graph_bytes=lambda: platform.graph_bytes(parts_over(SMALLEST_POOL, graphs=True)),
        draft_bytes=draft_bytes,
    )
    plan = plan_pool(config, footprint, loaded.parallel)
    return _pool(geometry, config, loaded, pages=plan.pages)


def _pool(geometry: KvGeometry, config: EngineConfig, loaded: LoadedModel, *, pages: int) -> KvPool:
    dtype = kv_dtype(config.cache.dtype, loaded.dtype)
    return KvPool(
        num_pages=pages,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        page_size=geometry.page_size,
        dtype=dtype,
        device=config.device,
        scales=_scales_of_rank(loaded) if dtype in FLOAT8 else None,
    )


def _host_pool(pool: KvPool, config: CacheConfig, platform: Platform) -> HostPool | None:
    if not config.host.enabled:
        return None
    cached = config.host.cache_pages(device_pages=pool.num_pages, page_bytes=pool.page_bytes)
    swapped = config.host.swap_pages(pool.page_bytes)
    return platform.host_pool(num_pages=cached + swapped, page_bytes=pool.page_bytes)


def _host_memory(
    pool: HostPool | None, copies: CopyQueue, config: CacheConfig, geometry: KvGeometry
) -> HostMemory | None:
    if pool is None:
        return None
    storage = None
    if config.host.storage_dir:
        storage = DiskStorage(
            Path(config.host.storage_dir),
            fingerprint=bytes.fromhex(compat_hash(geometry, geometry.num_kv_heads)),
            page_bytes=pool.page_bytes,
            max_bytes=config.host.storage_bytes,
        )
    return HostMemory.build(pool, copies, config.host, page_size=config.page_size, storage=storage)


def _memory(pool: KvPool, config: EngineConfig, copies: CopyQueue, host: HostMemory | None) -> KvMemory:
    page_size = pool.page_size
    limits = config.scheduler
    return KvMemory(
        rows=ReqToTokenPool(_rows(limits), _max_pages(limits, page_size)),
        allocator=PageAllocator(pool.num_pages, copies),
        cache=_prefix_cache(config.cache, host),
        page_size=page_size,
        copies=copies,
        host=host,
    )


def _rows(limits: SchedulerConfig) -> int:
    """Requests that a stage keeps hold rows too, beside those that run."""
    return 2 * limits.max_running_requests


def _max_pages(limits: SchedulerConfig, page_size: int) -> int:
    """Of one request, the token that may be computed too many included."""
    return -(-limits.context_length // page_size) + 1


def _prefix_cache(config: CacheConfig, host: HostMemory | None) -> PrefixCache:
    if host is not None and host.cache is not None:
        return host.cache
    return RadixCache(config.page_size) if config.enable_prefix_cache else NoPrefixCache()


def _runner_parts(
    loaded: LoadedModel, pool: KvPool, config: EngineConfig, observer: HiddenObserver | None, *, graphs: bool
) -> RunnerParts:
    limits, spec = config.scheduler, config.speculative
    most = limits.max_running_requests * (1 if spec.algorithm is None else 1 + spec.num_draft_tokens)
    return RunnerParts(
        model=loaded.model,
        pool=pool,
        num_heads=heads_of_rank(loaded.model_config, loaded.parallel.size).query,
        dtype=loaded.dtype,
        rows=_rows(limits),
        observer=observer,
        group=loaded.parallel.forward,
        max_pages=_max_pages(limits, pool.page_size),
        graph_sizes=graph_sizes(config.graphs, most=most) if graphs else (),
    )


def _settle(runner: Runner, config: EngineConfig) -> Settle:
    """What the host makes of each step's results."""
    changes: list[Settle] = []
    if config.speculative.algorithm is not None:
        changes.append(VerifiedForward(model=runner, verifier=ChainVerifier()).accepted)
    if config.scheduler.force_fault_every:
        changes.append(LosesResults(every=config.scheduler.force_fault_every))

    def settle(batch: ForwardBatch, result: ForwardResult) -> ForwardResult:
        for change in changes:
            result = change(batch, result)
        return result

    return settle


def _inputs(
    scheduler: Scheduler, agreement: Agreement, parallel: Parallel, agreed: AgreedClock, local: Clock
) -> Inputs:
    if parallel.size == 1:
        return DirectInputs(scheduler=scheduler)
    return AgreedInputs(
        scheduler=scheduler,
        agreement=agreement,
        clock=agreed,
        local_clock=local,
        rank=parallel.rank,
        failure=parallel.failure,
    )


def _target(loaded: LoadedModel, config: EngineConfig, pool: KvPool, platform: Platform) -> Target:
    """What a draft is made for."""
    return Target(
        model=loaded.model,
        is_whole=loaded.parallel.size == 1,
        path=loaded.config.model_path,
        dtype=loaded.dtype,
        device=config.device,
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        rows=_rows(config.scheduler),
        context_length=config.scheduler.context_length,
        max_text=config.scheduler.chunked_prefill_size,
        group=loaded.parallel.forward,
        platform=platform,
        graph_sizes=graph_sizes(config.graphs, most=DRAFT_ROWS * config.scheduler.max_running_requests),
    )


def _speculation(
    config: SpecConfig, proposer: Proposer, memory: KvMemory, clock: Clock, stopwatch: Clock, agreement: Agreement
) -> Speculation:
    """`clock` is what ranks agree on, for what decides; `stopwatch` is this rank's own."""
    return Speculation(
        proposer=proposer,
        lengths=DraftLengths(longest=config.num_draft_tokens, adaptive=config.adaptive),
        max_batch=config.disable_by_batch_size,
        memory=memory,
        stopwatch=stopwatch,
        timer=TurnTimer(clock=clock, catches_up=proposer.writes_kv),
        agree=lambda drafts: agreement.share(drafts, StepDrafts),
    )


def _grammars(loaded: LoadedModel, config: GrammarConfig) -> GrammarCompiler | NoGrammars:
    if config.backend == "none":
        return NoGrammars("this engine runs with --grammar-backend none")
    if loaded.vocabulary is None:
        return NoGrammars("it needs a tokenizer and an EOS token, and this model's checkpoint lacks one of them")
    backend = GuidanceBackend(vocabulary=loaded.vocabulary, config=config)
    return GrammarCompiler(backend, cache_size=config.cache_size)


def _decode_text(text: TextTokenizer | None) -> DecodeText | None:
    if text is None:
        return None
    tokenizer = text

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=True)

    return decode
