"""An engine with all of its ranks: what a caller needs who does not want to know how many there are.

checks that need no other process ─▶ other nodes come ─▶ other ranks start ─▶ load ─▶ build ─▶ the caller's use
ranks end ◀─ the engine closes, which tells them ◀────────────────────────────┘
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from tandem_engine.config import EngineConfig, device_defaults, with_device_defaults
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.errors import ConfigError
from tandem_engine.executor.memory_meter import meter_for
from tandem_engine.kernels.compiles import COMPILED
from tandem_engine.kernels.dispatch import by_triton
from tandem_engine.loaded_model import load, require_loadable
from tandem_engine.parallel.devices import require_device
from tandem_engine.parallel.nodes.access import NodeAccess
from tandem_engine.parallel.nodes.gathering import Gathered, gathered_nodes
from tandem_engine.parallel.rank_processes import other_ranks
from tandem_engine.scheduler.stream import Sink

logger = logging.getLogger(__name__)


@contextmanager
def launched_engine(
    config: EngineConfig,
    *,
    progress: bool,
    self_test: bool = False,
    sink: Sink | None = None,
    port: EnginePort | None = None,
    nodes: NodeAccess | None = None,
) -> Iterator[Engine]:
    """Load and build the engine that `config` describes, on as many ranks as it asks for.

    Args:
        progress: show a bar while weights are read.
        self_test: the caller calls `Engine.self_test` and `Engine.warm_up` before anything else; with several ranks all
            take part.
        sink, port: see `Engine.build`.
        nodes: how other nodes reach this one, which leads them.

    Raises:
        ConfigError, CheckpointError: the configuration or the checkpoint cannot work; it asks for nodes and there is
            no `nodes`.
        RankLostError: a rank could not start, or ended while the engine was in use.
    """
    config = for_its_device(config)
    with ExitStack() as stack:
        gathered = _gathered(config, nodes, self_test=self_test, stack=stack) if config.parallel.tp_size > 1 else None
        parallel = stack.enter_context(other_ranks(config, self_test=self_test, gathered=gathered))
        watch_compiler(config)
        loaded = load(config, progress=progress, parallel=parallel)
        yield stack.enter_context(Engine.build(loaded, loaded.config, sink=sink, port=port))


def for_its_device(config: EngineConfig) -> EngineConfig:
    """`config` with the defaults of its GPU, which one line of the log lists. Raises `ConfigError` without that GPU."""
    if config.device == "cpu" or not config.left_open:
        return config
    require_device(config.device, ranks=config.parallel.local_size)
    meter = meter_for(config.device)
    logger.info(
        "defaults for %s of %.0f GiB: %s", config.device, meter.total() / (1 << 30), device_defaults(meter.total())
    )
    return with_device_defaults(config, meter.total())


def watch_compiler(config: EngineConfig) -> None:
    """Count what is compiled for the device of `config`; a CPU's steps need no Triton."""
    if by_triton(torch.device(config.device)):
        COMPILED.watch()


def _gathered(config: EngineConfig, nodes: NodeAccess | None, *, self_test: bool, stack: ExitStack) -> Gathered | None:
    facts = require_loadable(config)
    if config.parallel.nnodes == 1:
        return None
    if nodes is None:
        raise ConfigError(
            f"--nnodes {config.parallel.nnodes} is for `tandem worker`; here all ranks are on one machine"
        )
    return stack.enter_context(gathered_nodes(config, facts.fingerprint, nodes, self_test=self_test))
