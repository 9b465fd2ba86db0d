"""Starts an engine with all of its ranks, on one node or several: the same call for any number.

Rank 0 (`launched_engine`)

    checks that need no other process ─▶ other nodes join ─▶ other ranks start ─▶ load ─▶ build ─▶ the caller's use
    ranks end ◀─ the engine closes, which notifies them ◀─────────────────────────┘

A node that is not the first (`follow`): a process whose ranks follow rank 0

    Start   checkpoint's description → ask node 0 to join → all nodes are there → ranks as child processes
    Run     `NodeReport` to the worker service about once a second, while node 0 replies
    Stop    node 0 reports that the engine is over; SIGTERM or `Shutdown` asks node 0 to drain and then end
    Lost    node 0 or a rank is gone: the ranks are killed, and the exit status is not 0, so that the node is restarted

Signals end nothing by themselves: an engine whose nodes all get SIGTERM at once still serves its requests.

A rank that is not the first (`run_rank`): the same engine as rank 0's, without sockets, doing what rank 0 does

    Start   rank spec from standard input → join the other ranks → load this rank's weights → build → self-test →
            warm up
    Loop    wait for rank 0's iteration → take the same inputs → plan, launch and settle the same step, without output
    Stop    rank 0 closes the engine; or the parent process is gone, which closes standard input

Only rank 0 handles signals: a terminal or service manager sends them to every process of a group, and a rank that left
at once would look like one that was lost.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import msgspec
import torch

from tandem_engine.base.errors import ConfigError, EngineError
from tandem_engine.base.linux import die_with_parent
from tandem_engine.base.progress import START, Phase, Progress
from tandem_engine.config import EngineConfig, device_defaults, with_device_defaults
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.engine.kernel_plan import kernels_built
from tandem_engine.engine.loaded_model import load, require_loadable
from tandem_engine.executor.memory_profile import meter_for
from tandem_engine.ipc.channels import IpcContext, PairChannel
from tandem_engine.ipc.private_tmpdir import remove
from tandem_engine.kernels.compiles import COMPILED
from tandem_engine.kernels.interface import by_triton
from tandem_engine.messages.control import EngineFailed, EngineToWorker, NodeReport, Shutdown, WorkerToEngine
from tandem_engine.parallel.group import device_of_rank, require_device
from tandem_engine.parallel.node_follower import Follower
from tandem_engine.parallel.node_leader import Gathered, NodeAccess, follows_key, gathered_nodes, settings_of
from tandem_engine.parallel.rank_processes import RankOrder, announce, other_ranks
from tandem_engine.parallel.torch_group import join_ranks
from tandem_engine.scheduler.output_stream import Sink, discard

logger = logging.getLogger(__name__)


ProgressOption = bool | Callable[[Progress], object]
"""True: a bar while weights are read. A function: called with each phase, and with what was read of the weights."""


@contextmanager
def launched_engine(
    config: EngineConfig,
    *,
    progress: ProgressOption,
    self_test: bool = False,
    sink: Sink | None = None,
    port: EnginePort | None = None,
    nodes: NodeAccess | None = None,
) -> Iterator[Engine]:
    """Load and build the engine that `config` describes, on as many ranks as it asks for.

    Args:
        progress: what shows how the engine loads.
        self_test: the caller calls `Engine.self_test` and `Engine.warm_up` before anything else; with several ranks all
            take part. Small steps may then wait for their kernel until after it serves (`kernels_built`).
        sink, port: see `Engine.build`.
        nodes: how other nodes reach this one, which leads them.

    Raises:
        ConfigError, CheckpointError: the configuration or the checkpoint cannot work; it asks for nodes and there is
            no `nodes`.
        RankLostError: a rank could not start, or ended while the engine was in use.
    """
    if not isinstance(progress, bool) and not callable(progress):
        raise ConfigError(f"progress must be True, False or a function, got {progress!r}")
    config = for_its_device(config)
    with ExitStack() as stack:
        gathered = _gathered(config, nodes, self_test=self_test, stack=stack) if config.parallel.tp_size > 1 else None
        parallel = stack.enter_context(other_ranks(config, self_test=self_test, gathered=gathered))
        watch_compiler(config)
        with _shown(progress) as bar:
            stack.enter_context(kernels_built(config, late_step=self_test))
            START.report(Phase.WEIGHTS)
            loaded = load(config, progress=bar, parallel=parallel)
            START.report(Phase.MEMORY)
            engine = stack.enter_context(Engine.build(loaded, loaded.config, sink=sink, port=port))
        yield engine


@contextmanager
def _shown(progress: ProgressOption) -> Iterator[bool]:
    """Yields whether to show a bar."""
    if not callable(progress):
        yield progress
        return
    with START.also_to(progress):
        yield False


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


log = logging.getLogger(__name__)
LOST = 3

UNEXPECTED_ERROR = 70
"""Exit status, EX_SOFTWARE of sysexits."""

LAST_WORDS_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """What a following node is started with."""

    engine: EngineConfig
    host: str
    control: str | None
    """Endpoint of the worker service; None runs without one."""
    curve_keys: Path | None


def follow(config: NodeConfig) -> int:
    """Follow node 0 until the engine is over; returns the exit status."""
    die_with_parent()
    context = IpcContext()
    control = _open_control(context, config)
    try:
        _follow_node(config, control)
    except EngineError as error:
        log.error("%s", error)
        if control is not None:
            control.send(EngineFailed(message=str(error), code=error.code))
            control.drain(LAST_WORDS_S)
        return LOST
    except Exception:
        log.exception("node %d stopped by an unexpected error", config.engine.parallel.node_rank)
        return UNEXPECTED_ERROR
    finally:
        if control is not None:
            control.close()
        context.close()
    return 0


def _follow_node(config: NodeConfig, control: "PairChannel[WorkerToEngine, EngineToWorker] | None") -> None:
    facts = require_loadable(config.engine)
    engine = for_its_device(config.engine)
    leaving = threading.Event()
    _on_signals(leaving)

    def report(serving: bool) -> None:
        if control is None:
            return
        control.send(NodeReport(node_rank=config.engine.parallel.node_rank, serving=serving))
        if any(isinstance(order, Shutdown) for order in control.receive()):
            leaving.set()

    Follower(
        config=engine,
        access=NodeAccess(host=config.host, curve_keys=config.curve_keys),
        settings=settings_of(engine, facts.fingerprint),
        report=report,
        leaving=leaving,
    ).follow()


def _on_signals(leaving: threading.Event) -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        leaving.set()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, leave)


def _open_control(context: IpcContext, config: NodeConfig) -> "PairChannel[WorkerToEngine, EngineToWorker] | None":
    if config.control is None:
        return None
    return PairChannel(context, config.control, inbound=WorkerToEngine, outbound=EngineToWorker)


REFUSED = 3

ORPHANED = 71
"""Exit status when rank 0 is gone."""

ORPHAN_S = 0.2
"""How long after an error it may take to notice that rank 0 is gone: its process closes all it has at once."""


def run_rank(standard_input: BinaryIO) -> int:
    """Be the rank that the order on `standard_input` describes; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = msgspec.json.decode(standard_input.readline(), type=RankOrder)
    parent_watch = threading.Thread(
        target=_leave_with_rank_0, args=(standard_input, Path(order.folder)), name="parent_watch", daemon=True
    )
    parent_watch.start()
    try:
        _follow_rank(order)
    except EngineError as error:
        # Where rank 0 is gone, which its closed connections show first, no process reads the error.
        parent_watch.join(ORPHAN_S)
        order.error_file.write_text(str(error), "utf-8")
        return REFUSED
    except Exception as error:
        log.exception("rank %d stopped by an unexpected error", order.rank)
        order.error_file.write_text(f"{type(error).__name__}: {error}", "utf-8")
        return UNEXPECTED_ERROR
    return 0


def _follow_rank(order: RankOrder) -> None:
    config = order.engine
    store = order.open_store()
    announce(store, order.rank)
    parallel = join_ranks(
        store,
        rank=order.rank,
        size=config.parallel.tp_size,
        device=torch.device(device_of_rank(config.device, config.parallel.local_rank(order.rank))),
        timeout_s=config.parallel.timeout,
        host=None if order.meeting is None else order.meeting.host,
    )
    watch_compiler(config)
    with ExitStack() as stack:
        stack.enter_context(kernels_built(config, late_step=order.self_test))
        loaded = load(config, progress=False, parallel=parallel)
        engine = stack.enter_context(Engine.build(loaded, loaded.config, sink=discard))
        if order.self_test:
            engine.self_test()
            engine.warm_up()
        store.set(follows_key(order.rank), "1")
        engine.follow()


def _leave_with_rank_0(standard_input: BinaryIO, folder: Path) -> None:
    """Rank 0 writes nothing after the order, so reading ends when its end of the pipe does.

    The process may be waiting in a collective for a rank that will never come, so it leaves from here.
    """
    standard_input.read()
    remove(folder)
    sys.stderr.flush()
    os._exit(ORPHANED)
