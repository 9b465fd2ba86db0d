"""An engine in this process: model, KV memory, scheduler and, with a port, the transfer of KV to peers.

Life of an engine
    load    checkpoint → `LoadedModel` (`loaded_model`), shared by any number of engines of one process
    build   pool, prefix cache, executor, scheduler; with an `EnginePort` also NIXL and the handoff stage
    use     `add` / `abort` / `step` by whoever owns the loop (`process`), or `generate` offline
    close   executor first, so that nothing computes any more; then the transport, then sockets

All methods belong to one thread, the scheduler thread.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import torch

from tandem_engine.assembly import (
    make_grammars,
    make_host_memory,
    make_host_pool,
    make_inputs,
    make_memory,
    make_runner_parts,
    make_settle,
    make_speculation,
    make_target,
    sized_pool,
    text_decoder,
)
from tandem_engine.clock import MonotonicClock
from tandem_engine.config import EngineConfig
from tandem_engine.disaggregation.peers import PeerChannels, PeerInbound
from tandem_engine.disaggregation.ranks.peers import PeerInputs, RankedPeers
from tandem_engine.disaggregation.ranks.transport import RankedTransport, RankNews, RankPlace
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.errors import BusyError, CheckpointError, ConfigError, EngineError
from tandem_engine.executor.interface import Runner
from tandem_engine.executor.lone_batch import logits_of, lone_batch
from tandem_engine.executor.platform import Executor, ExecutorParts, Platform, platform_for
from tandem_engine.executor.profiler import StepProfiler
from tandem_engine.executor.self_test import SelfTestReport, self_test
from tandem_engine.generation import Generation, Generations
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.kv_shape import compat_hash, dtype_name, kv_geometry, kv_scales_name, scales_of_rank
from tandem_engine.loaded_model import LoadedModel, load
from tandem_engine.memory.conservation import ConservationReport
from tandem_engine.memory.copies import CopyQueue
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.pool import KvPool
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.engine_stats import EngineStats
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import GenerateRequest, Peer
from tandem_engine.messages.transfer import Hello, PeerMessage
from tandem_engine.names import RequestId
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.devices import device_of_rank
from tandem_engine.parallel.failure import Departure
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
from tandem_engine.reload import Reloaded, WeightsReload
from tandem_engine.sampling.grammar.compiler import GrammarCompiler, NoGrammars
from tandem_engine.scheduler.lockstep import AgreedClock, Inputs
from tandem_engine.scheduler.model_facts import ModelFacts
from tandem_engine.scheduler.scheduler import Scheduler
from tandem_engine.scheduler.stream import Sink
from tandem_engine.speculative.assembly import keep_states, make_proposer, read_draft
from tandem_engine.stats import Throughput, engine_stats

if TYPE_CHECKING:
    import zmq

MODEL_REPLACED = Finish(
    reason=FinishReason.ERROR, error="the model's weights were replaced", code="model_replaced", retryable=True
)

SELF_TEST_TOKENS = 256

GRAMMAR_WAIT = 0.05
"""Seconds that `generate` sleeps when it has nothing to do until a grammar is compiled."""

MAX_STALLED_TURNS = 100_000
"""Turns without progress after which `generate` gives up instead of spinning for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePort:
    """How an engine is reached by its peers."""

    worker_id: str
    incarnation: str
    context: IpcContext
    host: str = "127.0.0.1"
    peer_port: int = 0


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
        self.geometry = kv_geometry(loaded, config)
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
        geometry = kv_geometry(loaded, config)
        draft = read_draft(config.speculative, target=loaded.model_config, target_path=loaded.config.model_path)
        platform = platform or platform_for(loaded.config.device)
        pool = sized_pool(geometry, config, loaded, draft, platform)
        host_pool = make_host_pool(pool, config.cache, platform)
        target = make_target(loaded, config, pool, platform)
        states = keep_states(draft, target)
        agreement = Agreement(loaded.parallel.schedule)
        parts = make_runner_parts(loaded, pool, config, states, graphs=True)
        runner = platform.runner(replace(parts, agree_time=lambda seconds: agreement.share(seconds, float)))
        joint = JointWork(group=loaded.parallel.forward, failure=loaded.parallel.failure)
        executor = platform.executor(
            ExecutorParts(
                runner=runner,
                settle=make_settle(runner, config),
                joint=joint,
                overlap=config.scheduler.enable_overlap,
                threads=loaded.threads,
                cpus=config.cpus,
                host_pool=host_pool,
            )
        )
        copies = CopyQueue(submit=executor.copy, least=None if loaded.parallel.size == 1 else agreement.least)
        memory = make_memory(pool, config, copies, make_host_memory(host_pool, copies, config.cache, geometry))
        generations = Generations()
        grammars = make_grammars(loaded, config.grammar)
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
            speculation = make_speculation(config.speculative, proposer, memory, clock, local_clock, agreement)
        scheduler = Scheduler(
            memory=memory,
            executor=executor,
            config=config.scheduler,
            model=facts,
            clock=clock,
            sink=sink or generations,
            decode_text=text_decoder(loaded.text),
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
            inputs=make_inputs(scheduler, agreement, loaded.parallel, agreed_clock, local_clock),
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
            local=NixlTransport(pool=self._pool, me=place.agent(me), clock=clock, leave=parallel.departure.ask),
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
            self._pool.set_scales(scales_of_rank(loaded))
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
            kv_scales=kv_scales_name(loaded, self._pool.data.dtype),
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
        path, dtype = loaded.config.model_path, dtype_name(loaded.dtype)
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
