"""An engine's parts but for its peers: made in one order, for each is made of those before it.

pool ─▶ runner ─▶ executor ─▶ copies ─▶ memory, prefix cache ─▶ scheduler ─▶ inputs
          └─▶ what a draft is made for ─▶ speculation ────────────┘
"""

from dataclasses import dataclass, replace

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
from tandem_engine.config import EngineConfig, ModelConfig
from tandem_engine.executor.interface import Runner
from tandem_engine.executor.platform import Executor, ExecutorParts, Platform, platform_for
from tandem_engine.generation import Generations
from tandem_engine.kv_shape import kv_geometry
from tandem_engine.loaded_model import LoadedModel
from tandem_engine.memory.copies import CopyQueue
from tandem_engine.memory.host.pool import HostPool
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.pool import KvPool
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.joint import JointWork
from tandem_engine.sampling.grammar.compiler import GrammarCompiler, NoGrammars
from tandem_engine.scheduler.lockstep import AgreedClock, Inputs
from tandem_engine.scheduler.model_facts import ModelFacts
from tandem_engine.scheduler.scheduler import Scheduler
from tandem_engine.scheduler.stream import Sink
from tandem_engine.speculative.assembly import keep_states, make_draft_runner, make_proposer, read_draft


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What an engine owns for as long as it lives."""

    pool: KvPool
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


def make_parts(
    loaded: LoadedModel, config: EngineConfig, *, sink: Sink | None, platform: Platform | None
) -> EngineParts:
    """See `Engine.build`."""
    geometry = kv_geometry(loaded, config)
    draft = read_draft(config.speculative, target=loaded.model_config, target_path=loaded.config.model_path)
    platform = platform or platform_for(loaded.config.device)
    pool = sized_pool(geometry, config, loaded, draft, platform)
    host_pool = make_host_pool(pool, config.cache, platform)
    target = make_target(loaded, config, pool, platform)
    states = keep_states(draft, target)
    agreement = Agreement(loaded.parallel.schedule)
    runner_parts = make_runner_parts(loaded, pool, config, states, graphs=True)
    runner = platform.runner(replace(runner_parts, agree_time=lambda seconds: agreement.share(seconds, float)))
    joint = JointWork(group=loaded.parallel.forward, failure=loaded.parallel.failure)
    executor = platform.executor(_executor_parts(loaded, config, runner, joint, host_pool))
    copies = CopyQueue(submit=executor.copy, least=None if loaded.parallel.size == 1 else agreement.least)
    memory = make_memory(pool, config, copies, make_host_memory(host_pool, copies, config.cache, geometry))
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
    scheduler = Scheduler(
        memory=memory,
        executor=executor,
        config=config.scheduler,
        model=_facts(loaded.model_config),
        clock=clock,
        sink=sink or generations,
        decode_text=text_decoder(loaded.text),
        speculation=speculation,
        session_pages=config.cache.session_pages(geometry.page_bytes, num_pages=pool.num_pages),
        stopwatch=local_clock,
        grammars=grammars,
        least=agreement.least,
    )
    return EngineParts(
        pool=pool,
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
    )


def _executor_parts(
    loaded: LoadedModel, config: EngineConfig, runner: Runner, joint: JointWork, host_pool: HostPool | None
) -> ExecutorParts:
    return ExecutorParts(
        runner=runner,
        settle=make_settle(runner, config),
        joint=joint,
        overlap=config.scheduler.enable_overlap,
        threads=loaded.threads,
        cpus=config.cpus,
        host_pool=host_pool,
    )


def _facts(model: ModelConfig) -> ModelFacts:
    return ModelFacts(
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        context_length=model.max_position,
        hidden_size=model.hidden_size,
    )
