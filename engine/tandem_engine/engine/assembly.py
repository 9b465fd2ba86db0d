"""Builds the parts of an engine from what was loaded and configured, except its peers (`peer_setup`).

    geometry ─▶ pool, as large as memory allows ─▶ host pool, memory, prefix cache
    pool ─▶ runner ─▶ executor ─▶ copies ─▶ memory, prefix cache ─▶ scheduler ─▶ inputs
              └─▶ target of drafts ─▶ speculation ────────────────────┘

`make_parts` builds them in this order, because each part uses earlier ones.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_engine.base.errors import ConfigError
from tandem_engine.config import (
    CacheConfig,
    EngineConfig,
    GrammarConfig,
    ModelConfig,
    SchedulerConfig,
    SpecConfig,
)
from tandem_engine.disaggregation.packed_pages import ring_bytes
from tandem_engine.engine.adapter_shelf import LoadingShelf, make_shelf
from tandem_engine.engine.host_parts import make_host_memory, make_host_pool
from tandem_engine.engine.loaded_model import LoadedModel, kv_geometry, scales_of_rank
from tandem_engine.engine.stateful_models import drafted_bytes, log_states, require_supported, state_shares
from tandem_engine.engine.stats import Generations
from tandem_engine.executor.cuda.graphs import graph_sizes
from tandem_engine.executor.cuda.prompt_graphs import prompt_sizes
from tandem_engine.executor.forward_thread import Forward
from tandem_engine.executor.interface import HiddenObserver, LosesResults, Runner
from tandem_engine.executor.memory_profile import Footprint, longest_chunk, plan_pool
from tandem_engine.executor.platform import Executor, ExecutorParts, Platform, RunnerParts, Settle, platform_of
from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.kernels.interface import FLOAT8
from tandem_engine.memory.allocator import PageAllocator, ReqToTokenPool
from tandem_engine.memory.anchored_cache import AnchoredCache
from tandem_engine.memory.cache_groups import ALL_TOKENS, CacheLayout
from tandem_engine.memory.group_pools import Demand, GroupPools, group_pages, page_ids_in
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyQueue
from tandem_engine.memory.pool import KvPool, kv_dtype
from tandem_engine.memory.prefix_cache import NoPrefixCache, PrefixCache
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.memory.sizing import MIN_POOL
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.memory.state_pool import StatePool
from tandem_engine.memory.window_pages import WindowPages, usable_blocks
from tandem_engine.messages.control import KvGeometry
from tandem_engine.model.adapters.table import AdapterTable
from tandem_engine.model.base import kv_specs
from tandem_engine.model.recurrent.blocks import state_spec
from tandem_engine.model.weights import heads_of_rank, kv_rows
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import JointWork, Parallel
from tandem_engine.sampling.grammar.compiler import GrammarCompiler, NoGrammars
from tandem_engine.sampling.grammar.guidance.backend import GuidanceBackend
from tandem_engine.scheduler.lockstep import AgreedClock, AgreedInputs, DirectInputs, Inputs
from tandem_engine.scheduler.output_stream import Sink
from tandem_engine.scheduler.scheduler import Scheduler
from tandem_engine.scheduler.speculation import Speculation, StepDrafts
from tandem_engine.scheduler.stop import DecodeText, ModelFacts
from tandem_engine.speculative.adaptive_length import DraftLengths, TurnTimer
from tandem_engine.speculative.assembly import (
    Draft,
    Target,
    draft_graph_bytes,
    keep_states,
    make_draft_runner,
    make_proposer,
    read_draft,
)
from tandem_engine.speculative.interface import Proposer
from tandem_engine.speculative.verify import ChainVerifier, VerifiedForward
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

DRAFT_ROWS = 2
"""Tokens of a request in most steps of a draft network: the last draft, if it was right, and the one behind it."""


def cache_layout(loaded: LoadedModel, geometry: KvGeometry, config: EngineConfig, *, has_peers: bool) -> CacheLayout:
    """Groups of layers by what they read, where all that handles pages distinguishes them; else one for all layers.

    Peers and host memory handle pages of all layers, and states lie beside those. A window that no sequence leaves is
    none.
    """
    longest, dtype = config.scheduler.context_length, config.cache.dtype
    if geometry.value_width and kv_dtype(dtype, loaded.dtype) in FLOAT8:
        raise ConfigError(f"--kv-cache-dtype {dtype} is for K and V, and this model stores latents: use auto")
    rows = kv_rows(loaded.model_config, loaded.parallel.size)
    if len(set(rows)) > 1 and kv_dtype(dtype, loaded.dtype) in FLOAT8:
        raise ConfigError(f"--kv-cache-dtype {dtype} is for layers with equal heads, and those of this model differ")
    specs = [
        replace(spec, reach=ALL_TOKENS) if (spec.reach.span or 0) >= longest else spec
        for spec in kv_specs(loaded.model, rows)
    ]
    alike = loaded.model_config.has_states or all(spec.reach == ALL_TOKENS for spec in specs)
    if has_peers or config.cache.host.enabled or alike:
        return CacheLayout.merged(specs)
    return CacheLayout.of(specs)


def sized_pools(
    geometry: KvGeometry,
    config: EngineConfig,
    loaded: LoadedModel,
    draft: Draft | None,
    platform: Platform,
    layout: CacheLayout,
    *,
    has_peers: bool,
) -> GroupPools:
    """As large as the memory allows, with the draft's share of every page, next to the ring that peers may need."""
    beside = draft_bytes = 0
    itemsize = kv_dtype(config.cache.dtype, loaded.dtype).itemsize
    spec = state_spec(loaded.model_config, loaded.dtype, loaded.parallel.size)
    if draft is not None:
        beside = draft.page_bytes(geometry.page_size, loaded.dtype)
        draft_bytes = draft.weight_bytes(
            loaded.dtype, target_path=loaded.config.model_path, target_is_whole=loaded.parallel.size == 1
        )

    def pools_of(pages: int) -> GroupPools:
        states = None if spec is None else StatePool(spec, rows=0, device=config.device)
        return _pools(geometry, config, loaded, layout, [pages] * len(layout.groups), page_ids=pages, states=states)

    def parts_over(pages: int, *, graphs: bool) -> RunnerParts:
        adapters = AdapterTable.of(loaded.adapters, limit=config.adapters.max_loaded)
        return make_runner_parts(loaded, pools_of(pages), config, None, adapters=adapters, graphs=graphs)

    def forward_over(pages: int) -> Forward:
        return platform.runner(parts_over(pages, graphs=False)).forward

    def graph_bytes() -> int:
        if not config.graphs.enabled:
            return 0
        own = platform.graph_bytes(lambda: parts_over(MIN_POOL, graphs=True))
        if draft is None:
            return own
        return own + draft_graph_bytes(draft, make_target(loaded, config, pools_of(MIN_POOL), platform))

    footprint = Footprint(
        weight_bytes=loaded.weight_bytes,
        page_bytes=sum(group.page_bytes(geometry.page_size, itemsize) for group in layout.groups) + beside,
        host_page_bytes=geometry.page_bytes,
        threads=loaded.threads,
        forward_over=forward_over,
        graph_bytes=graph_bytes,
        draft_bytes=draft_bytes,
        drafted_bytes=drafted_bytes(spec, config),
        ring_bytes=ring_bytes(geometry) if has_peers else 0,
    )
    plan = plan_pool(config, footprint, loaded.parallel)
    demand = Demand(
        page_size=geometry.page_size,
        context_length=config.scheduler.context_length,
        chunk=longest_chunk(config.scheduler),
    )
    if spec is not None:
        shares = state_shares(plan, spec, demand, config)
        states = StatePool(spec, rows=shares.rows, anchors=shares.anchors, device=config.device)
        if loaded.parallel.rank == 0:
            log_states(states, loaded.model_config, shares.pages)
        return _pools(geometry, config, loaded, layout, [shares.pages], page_ids=shares.pages, states=states)
    if layout.is_merged:
        return pools_of(plan.pages)
    page_ids = plan.pages
    if not config.cache.num_pages:
        page_ids = page_ids_in(layout, demand, plan.pages, itemsize=itemsize, draft_bytes=beside)
    pages = group_pages(layout, demand, page_ids)
    for group, count in zip(layout.groups, pages, strict=True):
        if group.spec.reach.span is not None:
            logger.info(
                "%d of %d layers see %d tokens: %d pages for %d blocks",
                len(group.layers),
                geometry.num_layers,
                group.spec.reach.span,
                count - 1,
                page_ids - 1,
            )
    return _pools(geometry, config, loaded, layout, pages, page_ids=page_ids)


def _pools(
    geometry: KvGeometry,
    config: EngineConfig,
    loaded: LoadedModel,
    layout: CacheLayout,
    num_pages: Sequence[int],
    *,
    page_ids: int,
    states: StatePool | None = None,
) -> GroupPools:
    dtype = kv_dtype(config.cache.dtype, loaded.dtype)
    return GroupPools.of(
        layout,
        num_pages,
        page_ids=page_ids,
        page_size=geometry.page_size,
        dtype=dtype,
        device=config.device,
        scales=scales_of_rank(loaded) if dtype in FLOAT8 else None,
        states=states,
    )


def make_anchors(pools: GroupPools, config: CacheConfig, facts: ModelConfig) -> StateAnchors | None:
    """Where cached prefixes can be continued, if layers keep states and there is a cache."""
    if pools.states is None or not config.enable_prefix_cache:
        return None
    page_size = pools.first.page_size
    # By token, what follows the first copy within a prompt would be as slow as decoding.
    states, trials = pools.states, not facts.states_by_token
    return StateAnchors(states.anchor_slots, page_size=page_size, slot_bytes=states.page_bytes, trials=trials)


def make_memory(
    pools: GroupPools, config: EngineConfig, copies: CopyQueue, host: HostMemory | None, anchors: StateAnchors | None
) -> KvMemory:
    """Rows, pages and prefix cache over `pools`."""
    page_size, windows, limits = pools.first.page_size, pools.windows, config.scheduler
    return KvMemory(
        rows=ReqToTokenPool(_rows(limits, pools), _max_pages(limits, page_size)),
        allocator=PageAllocator(pools.page_ids, copies, windows if anchors is None else [*windows, anchors]),
        cache=_prefix_cache(config.cache, host, windows, anchors),
        page_size=page_size,
        copies=copies,
        host=host,
        windows=windows,
        stateful=pools.states is not None,
        anchors=anchors,
    )


def _rows(limits: SchedulerConfig, pools: GroupPools) -> int:
    """Requests that a stage keeps hold rows too, beside those that run. Where layers keep states, one for each."""
    return 2 * limits.max_running_requests if pools.states is None else pools.states.rows


def _max_pages(limits: SchedulerConfig, page_size: int) -> int:
    """Of one request, the token that may be computed too many included."""
    return -(-limits.context_length // page_size) + 1


def _prefix_cache(
    config: CacheConfig, host: HostMemory | None, windows: Sequence[WindowPages], anchors: StateAnchors | None
) -> PrefixCache:
    if host is not None and host.cache is not None:
        return host.cache
    if not config.enable_prefix_cache:
        return NoPrefixCache()
    if anchors is not None:
        return AnchoredCache(config.page_size, anchors)
    return RadixCache(config.page_size, usable=partial(usable_blocks, windows) if windows else None)


def make_runner_parts(
    loaded: LoadedModel,
    pools: GroupPools,
    config: EngineConfig,
    observer: HiddenObserver | None,
    *,
    adapters: AdapterTable,
    graphs: bool,
) -> RunnerParts:
    """What the platform makes a runner of; `graphs`: with the sizes of steps to capture."""
    limits = config.scheduler
    return RunnerParts(
        model=loaded.model,
        pool=pools.first,
        groups=None if pools.is_plain else pools,
        num_heads=heads_of_rank(loaded.model_config, loaded.parallel.size).query,
        dtype=loaded.dtype,
        rows=_rows(limits, pools),
        states=pools.states,
        observer=observer,
        group=loaded.parallel.forward,
        max_pages=_max_pages(limits, pools.first.page_size),
        graph_sizes=graph_sizes(config.graphs, most=config.most_rows) if graphs else (),
        prompt_sizes=prompt_sizes(config.graphs, loaded.model_config, most=config.most_tokens) if graphs else (),
        adapters=adapters.weights,
    )


def make_settle(runner: Runner, config: EngineConfig) -> Settle:
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


def make_inputs(
    scheduler: Scheduler, agreement: Agreement, parallel: Parallel, agreed: AgreedClock, local: Clock
) -> Inputs:
    """How inputs reach the scheduler: at once, or agreed on by all ranks."""
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


def make_target(loaded: LoadedModel, config: EngineConfig, pools: GroupPools, platform: Platform) -> Target:
    """What a draft is made for."""
    return Target(
        model=loaded.model,
        is_whole=loaded.parallel.size == 1,
        path=loaded.config.model_path,
        dtype=loaded.dtype,
        device=config.device,
        num_pages=pools.page_ids,
        page_size=pools.first.page_size,
        rows=_rows(config.scheduler, pools),
        context_length=config.scheduler.context_length,
        max_text=config.scheduler.chunked_prefill_size,
        group=loaded.parallel.forward,
        platform=platform,
        graph_sizes=graph_sizes(config.graphs, most=DRAFT_ROWS * config.scheduler.max_running_requests),
    )


def make_speculation(
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
        lockstep=not agreement.alone,
    )


def make_grammars(loaded: LoadedModel, config: GrammarConfig) -> GrammarCompiler | NoGrammars:
    """The compiler of grammars, or the reason why there is none."""
    if config.backend == "none":
        return NoGrammars("this engine runs with --grammar-backend none")
    if loaded.vocabulary is None:
        return NoGrammars("it needs a tokenizer and an EOS token, and this model's checkpoint lacks one of them")
    backend = GuidanceBackend(vocabulary=loaded.vocabulary, config=config)
    return GrammarCompiler(backend, cache_size=config.cache_size)


def text_decoder(text: TextTokenizer | None) -> DecodeText | None:
    """Ids to text, for stop strings; None without a tokenizer."""
    return None if text is None else partial(text.decode, skip_special_tokens=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What an engine owns for as long as it lives."""

    pools: GroupPools
    memory: KvMemory
    runner: Runner
    draft_runner: Runner | None
    """Of a draft model or head; None without."""
    executor: Executor
    joint: JointWork
    agreement: Agreement
    scheduler: Scheduler
    inputs: Inputs
    generations: Generations
    """Outputs of an engine without a sink."""
    grammars: GrammarCompiler | NoGrammars
    shelf: LoadingShelf

    @property
    def pool(self) -> KvPool:
        """Of the first group: of all layers, wherever pages leave the engine."""
        return self.pools.first


def make_parts(
    loaded: LoadedModel, config: EngineConfig, *, sink: Sink | None, platform: Platform | None, has_peers: bool
) -> EngineParts:
    """See `Engine.build`."""
    require_supported(loaded.model_config, config)
    geometry = kv_geometry(loaded, config)
    draft = read_draft(config.speculative, target=loaded.model_config, target_path=loaded.config.model_path)
    platform = platform or platform_of(config, loaded.model_config)
    agreement = Agreement(loaded.parallel.schedule)
    has_peers = agreement.share(has_peers, bool)
    layout = cache_layout(loaded, geometry, config, has_peers=has_peers)
    pools = sized_pools(geometry, config, loaded, draft, platform, layout, has_peers=has_peers)
    host_pool = make_host_pool(pools, config.cache, platform)
    target = make_target(loaded, config, pools, platform)
    states = keep_states(draft, target)
    adapters = AdapterTable.of(loaded.adapters, limit=config.adapters.max_loaded)
    runner_parts = make_runner_parts(loaded, pools, config, states, adapters=adapters, graphs=True)
    runner = platform.runner(replace(runner_parts, agree_time=lambda seconds: agreement.share(seconds, float)))
    joint = JointWork(group=loaded.parallel.forward, failure=loaded.parallel.failure)
    executor = platform.executor(_executor_parts(loaded, config, runner, joint, host_pool, pools.states))
    copies = CopyQueue(submit=executor.copy, least=None if loaded.parallel.size == 1 else agreement.least)
    anchors = make_anchors(pools, config.cache, loaded.model_config)
    host = make_host_memory(host_pool, pools, copies, config.cache, geometry, anchors)
    memory = make_memory(pools, config, copies, host, anchors)
    generations = Generations()
    grammars = make_grammars(loaded, config.grammar)
    local_clock, agreed_clock = MonotonicClock(), AgreedClock()
    clock = local_clock if loaded.parallel.size == 1 else agreed_clock
    speculation, draft_runner = None, None
    if config.speculative.algorithm is not None:
        draft_runner = make_draft_runner(draft, target, states=states)
        proposer = make_proposer(
            config.speculative,
            draft,
            target,
            runner=draft_runner,
            run=lambda work: executor.run(lambda: joint.run(work)),
        )
        speculation = make_speculation(config.speculative, proposer, memory, clock, local_clock, agreement)
    shelf = make_shelf(loaded, config.adapters, adapters, clock, agreement)
    scheduler = Scheduler(
        memory=memory,
        executor=executor,
        config=config.scheduler,
        model=_facts(loaded.model_config, adapters),
        clock=clock,
        sink=sink or generations,
        decode_text=text_decoder(loaded.text),
        speculation=speculation,
        session_pages=config.cache.session_pages(geometry.page_bytes, num_pages=pools.page_ids),
        stopwatch=local_clock,
        grammars=grammars,
        shelf=shelf,
        least=agreement.least,
    )
    return EngineParts(
        pools=pools,
        memory=memory,
        runner=runner,
        draft_runner=draft_runner,
        executor=executor,
        joint=joint,
        agreement=agreement,
        scheduler=scheduler,
        inputs=make_inputs(scheduler, agreement, loaded.parallel, agreed_clock, local_clock),
        generations=generations,
        grammars=grammars,
        shelf=shelf,
    )


def _executor_parts(
    loaded: LoadedModel,
    config: EngineConfig,
    runner: Runner,
    joint: JointWork,
    host_pool: HostPool | None,
    states: StatePool | None,
) -> ExecutorParts:
    return ExecutorParts(
        runner=runner,
        settle=make_settle(runner, config),
        joint=joint,
        overlap=config.scheduler.enable_overlap,
        threads=loaded.threads,
        cpus=config.cpus,
        host_pool=host_pool,
        states=states,
    )


def _facts(model: ModelConfig, adapters: AdapterTable) -> ModelFacts:
    return ModelFacts(
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        context_length=model.max_position,
        hidden_size=model.hidden_size,
        adapter_slots=adapters.slots,
    )
