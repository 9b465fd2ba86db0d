"""A node that is not the first, as a process: it checks the checkpoint, joins node 0, and has ranks that follow rank 0.

Start   checkpoint's description → ask node 0 to be let in → all nodes are there → ranks as processes of this one
Run     `NodeReport` to the worker service about once a second, while node 0 answers
Stop    node 0 says that the engine is over; SIGTERM or `Shutdown` asks node 0 to drain, and to end then
Lost    node 0 or a rank is gone: the ranks are killed, and the status is not 0, so that the node is started again

Signals end nothing by themselves: an engine whose nodes are told to leave at once still serves what it has.
"""

import logging
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tandem_engine.config import EngineConfig
from tandem_engine.errors import EngineError
from tandem_engine.ipc.channels import IpcContext, PairChannel
from tandem_engine.ipc.parent import die_with_parent
from tandem_engine.launch import for_its_device
from tandem_engine.loaded_model import require_loadable
from tandem_engine.messages.control import EngineFailed, EngineToWorker, NodeReport, Shutdown, WorkerToEngine
from tandem_engine.parallel.nodes.access import NodeAccess
from tandem_engine.parallel.nodes.follower import Follower
from tandem_engine.parallel.nodes.settings import settings_of

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
        _follow(config, control)
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


def _follow(config: NodeConfig, control: "PairChannel[WorkerToEngine, EngineToWorker] | None") -> None:
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
