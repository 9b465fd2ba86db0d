"""One scheduler with its memory, executor and peers: the interface of the owner of the loop."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import torch

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.names import RequestId
from tandem_engine.config import AdapterConfig, EngineConfig, ModelConfig
from tandem_engine.engine.adapter_orders import AdapterOrders, ChangedAdapter
from tandem_engine.engine.assembly import EngineParts, make_parts
from tandem_engine.engine.loaded_model import LoadedModel, Served, load
from tandem_engine.engine.peer_setup import EnginePort, PeerSide
from tandem_engine.engine.reload import Reloaded, WeightsReload, replace_weights, require_replaceable
from tandem_engine.engine.standalone_runs import forced_logits, run_self_test, run_warm_up
from tandem_engine.engine.stats import Generation, Throughput, engine_stats
from tandem_engine.executor.platform import Platform
from tandem_engine.executor.profiler import StepProfiler
from tandem_engine.executor.self_test import SelfTestReport
from tandem_engine.kernels.compiles import COMPILED
from tandem_engine.memory.audit import ConservationReport
from tandem_engine.messages.control import (
    AbortRequests,
    AdapterMemory,
    DecodeElsewhere,
    Drain,
    FlushCache,
    KvGeometry,
    LoadAdapter,
    PauseGeneration,
    PauseMode,
    ResumeGeneration,
    ServedAdapter,
    UnloadAdapter,
)
from tandem_engine.messages.requests import CloseSession, GenerateRequest, Peer
from tandem_engine.messages.stats import EngineStats
from tandem_engine.parallel.group import Departure, device_of_rank
from tandem_engine.parallel.inputs import Add, LoadWeights, LosePeer, Meet
from tandem_engine.scheduler.output_stream import Sink

if TYPE_CHECKING:
    import zmq


GRAMMAR_WAIT = 0.05
"""Seconds that `generate` sleeps when it has nothing to do until a grammar is compiled."""

MAX_STALLED_TURNS = 100_000
"""Turns without progress after which `generate` gives up instead of spinning forever."""


class Engine:
    """Build with `Engine.build`. With several ranks each has one, and rank 0's is used."""

    def __init__(self, *, loaded: LoadedModel, config: EngineConfig, parts: EngineParts) -> None:
        self.text = loaded.text
        self.adapters = loaded.adapters
        self.threads = loaded.threads
        self.scheduler_config = config.scheduler
        self.memory = parts.memory
        self.scheduler = parts.scheduler
        self._parts = parts
        self._inputs = parts.inputs
        self._parallel = loaded.parallel
        self._drafts = 0 if config.speculative.algorithm is None else config.speculative.num_draft_tokens
        self._served = Served.of(loaded, config)
        self._peers = PeerSide()
        self._throughput = Throughput(clock=parts.scheduler.clock)
        self._stopped = False
        self._reload = WeightsReload(
            load=self._load_replacement,
            replace=self.replace_model,
            agreement=parts.agreement,
            rank=loaded.parallel.rank,
            size=loaded.parallel.size,
        )
        parts.inputs.weights = self._reload
        self._adapter_loads = parts.shelf.loads
        self._adapter_orders = AdapterOrders(shelf=parts.shelf, scheduler=parts.scheduler)
        parts.inputs.adapters = self._adapter_orders

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
        has_peers = port is not None and config.disagg.transport != "none"
        parts = make_parts(loaded, config, sink=sink, platform=platform, has_peers=has_peers)
        engine = cls(loaded=loaded, config=config, parts=parts)
        engine.on_wait(lambda: None)
        if port is not None:
            engine._peers.open_port(port, engine._served)
        if config.disagg.transport != "none":
            engine._peers.open_transport(parts, engine._served, config.disagg, loaded.parallel)
        return engine

    # What it serves.

    @property
    def model_config(self) -> ModelConfig:
        return self._served.model_config

    @property
    def geometry(self) -> KvGeometry:
        """Of the pages of this rank."""
        return self._served.geometry

    @property
    def compat_hash(self) -> str:
        """Engines with different ones exchange no KV. Another one after a reload."""
        return self._served.compat_hash

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
        self._inputs.submit(AbortRequests(rid=rid))

    def abort_client(self, client: bytes) -> None:
        """See `Scheduler.abort_client`."""
        self._inputs.submit(AbortRequests(rid=None, client=client))

    def close_session(self, session_id: str, *, cache_salt: str = "") -> None:
        """Forget a conversation. Unknown ids are ignored."""
        self._inputs.submit(CloseSession(cache_salt=cache_salt, session=session_id))

    def abort_all(self) -> None:
        """See `Scheduler.abort_all`."""
        self._inputs.submit(AbortRequests(rid=None))

    def drain(self) -> None:
        """See `Scheduler.drain`."""
        self._inputs.submit(Drain())

    def step(self) -> bool:
        """See `Scheduler.step`. Raises `RankLostError` when the engine's ranks cannot continue."""
        for item in self._peers.inputs():
            self._inputs.submit(item)
        self._stopped = not self._inputs.begin_turn()
        if self._stopped:
            return False
        reloaded = self._reload.poll()
        self._adapter_loads.poll()
        self._adapter_orders.poll()
        self._sweep_adapters()
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
        """`step` has nothing to do until the next request or command."""
        return self.idle and not (self._reload.active or self._adapter_orders.active)

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
        """Another rank may be about to report, which wakes no thread here: `step` again in a moment."""
        return self._peers.awaits_ranks or self._adapter_loads.awaits_ranks

    @property
    def departure(self) -> Departure:
        """Why this engine should be drained, once a node of it is to leave."""
        return self._parallel.departure

    def audit(self) -> ConservationReport:
        """The five sets of pages, and what is wrong with them."""
        return self.scheduler.audit()

    def self_test(self) -> SelfTestReport:
        """Compute on random tokens, on pages that are free, with no step in flight. Raises `EngineError`."""
        return run_self_test(self._parts, vocab_size=self.model_config.vocab_size)

    def warm_up(self) -> None:
        """Have every kernel compiled that a request can launch, with no step in flight; see `run_warm_up`. What is
        compiled from now on counts as compiled while serving.
        """
        run_warm_up(
            self._parts,
            vocab_size=self.model_config.vocab_size,
            max_rows=self.scheduler_config.max_running_requests,
            drafts=self._drafts,
        )
        COMPILED.serve()

    def forced_logits(self, tokens: Sequence[int], *, chunk: int) -> Iterator[torch.Tensor]:
        """See the function of this name. Of one rank."""
        assert self._parallel.size == 1, "logits of a rank are those of its part of the vocabulary"
        return forced_logits(self._parts, tokens, chunk=chunk)

    @property
    def me(self) -> Peer:
        """This engine as its peers know it. Only with a port."""
        return self._peers.me

    @property
    def peer_endpoint(self) -> str:
        return self.me.endpoint

    @property
    def transport_name(self) -> str:
        return "none" if self._peers.transport is None else "nixl"

    @property
    def total_pages(self) -> int:
        return self._parts.memory.allocator.num_pages

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """Sockets whose messages `step` handles: what an idle loop sleeps on."""
        return self._peers.sockets()

    def descriptors(self) -> list[int]:
        """File descriptors that become readable when `step` has something to do."""
        host = [] if self.memory.host is None else self.memory.host.descriptors()
        grammars = self._parts.grammars.fileno()
        gates = [self._adapter_loads.fileno(), *([] if grammars is None else [grammars])]
        return [*self._peers.descriptors(), *host, *gates]

    def stats(self) -> EngineStats:
        """Numbers for the worker service."""
        stats = engine_stats(self.scheduler, self._peers.handoff, self._throughput, total_pages=self.total_pages)
        return self._with_adapters(stats) if self._parts.shelf.in_use else stats

    # For operators.

    def pause(self, mode: PauseMode, *, refuse_new: bool = False) -> None:
        """See `Scheduler.pause`."""
        self._inputs.submit(PauseGeneration(mode=mode, refuse_new=refuse_new))

    def resume(self) -> None:
        """See `Scheduler.resume`."""
        self._inputs.submit(ResumeGeneration())

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

        It continues with `step`. The future raises `CheckpointError` or `ConfigError` when the new weights cannot
        serve on every rank; the old ones do then.

        Raises:
            BusyError: a reload is in progress.
            ConfigError: there is a host cache or swap space.
        """
        self.require_replaceable()
        answer = self._reload.expect()
        self._inputs.submit(LoadWeights(path=path or self._served.loaded_with.model_path))
        return answer

    @property
    def served_adapters(self) -> tuple[ServedAdapter, ...]:
        """Those that new requests may have, now."""
        return self._parts.shelf.table.served

    @property
    def adapter_memory(self) -> AdapterMemory:
        """Where adapters are."""
        return self._parts.shelf.memory()

    @property
    def adapter_changes(self) -> tuple[int, int, int]:
        """Another one when `served_adapters` or `adapter_memory` has changed."""
        return self._parts.shelf.changes

    def change_adapters(self, order: LoadAdapter | UnloadAdapter) -> "Future[ChangedAdapter]":
        """Carry out an operator's order, on every rank in the same turn.

        A load reads the folder next to the steps, see `AdapterTable.add`: requests that run with a former adapter of
        its name end with that one, and one that no request has makes way for it. For an unload see
        `AdapterTable.remove`: requests that have begun continue with it. The future raises `EngineError`.
        """
        answer = self._adapter_orders.expect()
        self._inputs.submit(order)
        return answer

    def _with_adapters(self, stats: EngineStats) -> EngineStats:
        queues, table = self.scheduler.queues, self._parts.shelf.table
        running = {req.space.adapter for req in queues.running}
        if queues.chunked is not None:
            running.add(queues.chunked.space.adapter)
        others = {req.space.adapter for req in queues.live()} - running
        shelf = self._parts.shelf
        return msgspec.structs.replace(
            stats,
            running_adapters=table.names(running),
            waiting_adapters=table.names(others),
            adapter_loads_total=shelf.loads_total,
            adapter_load_failures_total=shelf.failures_total,
            adapter_evictions_total=shelf.evictions_total,
            adapter_load_s_total=shelf.load_s_total,
            waiting_for_adapter=self.scheduler.waiting_for_adapter,
        )

    def _sweep_adapters(self) -> None:
        table = self._parts.shelf.table
        self._adapter_loads.acknowledge()
        if table.closed or table.leaving:
            steps = self.scheduler.steps
            used = (req.space.adapter for req in self.scheduler.queues.live())
            usage = self.scheduler.adapter_usage()
            # One that computed may be back in the queue, put back for want of pages: it does not wait for its adapter.
            having = usage.computing.keys() | usage.waiting.keys()
            table.sweep(used, launched=steps.launched, settled=steps.settled, having=having)

    def require_replaceable(self) -> None:
        """Raise `ConfigError` when the weights cannot be replaced, whatever by."""
        require_replaceable(self.memory)

    def _load_replacement(self, path: str) -> LoadedModel:
        # A configuration names the device of the node's first rank.
        before = self._served.loaded_with
        device = device_of_rank(before.device, -before.parallel.local_rank(self._parallel.rank))
        # Adapters stay: the architecture is the same, so they fit. None is read again.
        adapters = AdapterConfig(allow_updates=before.adapters.may_exist)
        config = replace(before, model_path=path, device=device, adapters=adapters)
        loaded = load(config, progress=False, parallel=self._parallel)
        self._served.require_same_architecture(loaded)
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
        self._served.require_same_architecture(loaded)
        ended = replace_weights(self._parts, loaded, self_test=self.self_test)
        self._served = self._served.with_weights(loaded, self._parts.pool.data.dtype)
        self._peers.rename(self.compat_hash)
        return ended

    def profiler(self, folder: Path | None) -> StepProfiler:
        """A profiler of this engine's steps that writes to `folder`."""
        return StepProfiler(executor=self._parts.executor, folder=folder, clock=MonotonicClock())

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
        return self._parts.generations.take_all([request.rid for request in requests])

    def _expect(self, request: GenerateRequest) -> None:
        self._parts.generations.expect(request.rid, resumed=len(request.resume_ids))
        self.add(request)

    def close(self) -> None:
        """Stop computing, on all ranks, then compiling, storing and transferring. Idempotent."""
        self._inputs.stop()
        self._reload.close()
        self._adapter_loads.close()
        if self._parallel.failure.error is None:
            self._parts.executor.shutdown()
        else:
            self._parts.executor.abandon()
        self._parts.grammars.close()
        if self.memory.host is not None:
            self.memory.host.close()
        self._peers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
