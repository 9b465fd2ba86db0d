"""The engine as a child process, and the control channel to it.

`EngineChild` is the process:

1. It starts with the flags of the worker, and exits with this process, however this process exits.
2. Its exit is the exit of the worker: `wait` returns at once [engine-ends-worker].
3. It is stopped by message first (`Shutdown`), then by SIGTERM, then by SIGKILL.

`EngineLink` is the channel: reports come from the engine, commands go to it. Reports are dispatched to their
`Subscribers`. Audits and operator commands get a reply, matched by a nonce.
"""

import asyncio
import contextlib
import itertools
import logging
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.base.cgroups import memory_kills, memory_shortage
from tandem_engine.base.errors import WireError
from tandem_engine.base.linux import die_with_parent
from tandem_engine.ipc.async_channels import AsyncPairServer
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.control import (
    Audit,
    AuditReport,
    DrainWanted,
    EngineFailed,
    EngineReady,
    EngineToWorker,
    NodeReport,
    OperatorOrder,
    OrderDone,
    OrderRefused,
    WorkerToEngine,
)
from tandem_engine.messages.kv_events import KvEventBatch
from tandem_engine.messages.stats import EndedRequests, EngineStats
from tandem_services.common.errors import StartupError
from tandem_services.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

SIZES = "--kv-cache-gib or --max-running-requests"

TERMINATE_GRACE_S = 5.0
"""From SIGTERM to SIGKILL: time to abort requests and to close sockets."""


@dataclass(slots=True)
class EngineChild:
    """A running engine process."""

    process: Process
    memory_kills: int = 0
    """`cgroups.memory_kills` when it was started."""
    killed_for_memory: bool = False
    """By the kernel, as `wait` found."""

    @classmethod
    async def start(cls, argv: Sequence[str]) -> "EngineChild":
        """Raises `StartupError` when the command cannot be started at all."""
        kills = memory_kills()
        try:
            # The child sets it again, after exec; this covers its imports, which take seconds.
            process = await asyncio.create_subprocess_exec(*argv, preexec_fn=die_with_parent)
        except OSError as error:
            raise StartupError(f"cannot start the engine with {argv[0]}: {error}") from error
        return cls(process, kills)

    async def wait(self) -> int:
        """The exit status; negative is the signal that ended it."""
        status = await self.process.wait()
        self.killed_for_memory = status == -signal.SIGKILL and memory_kills() > self.memory_kills
        return status

    def how_ended(self, status: int) -> str:
        """A sentence about an exit that nothing has requested. After `wait`."""
        if self.killed_for_memory:
            return f"the kernel killed the engine because {memory_shortage()}: provide more memory, or lower {SIZES}"
        return f"the engine process exited with status {status}"

    async def stop(self, *, grace_s: float) -> int:
        """Wait `grace_s` for an exit that was requested by message, then force it. Returns the exit status."""
        for insist, timeout in (
            (self.process.terminate, grace_s),
            (self.process.kill, TERMINATE_GRACE_S),
        ):
            try:
                return await asyncio.wait_for(self.process.wait(), timeout)
            except TimeoutError:
                if timeout > 0:
                    logger.warning("engine process %d does not exit; sending the next signal", self.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    insist()
        return await self.process.wait()


def engine_argv(config: WorkerConfig, *, incarnation: str, control: str) -> list[str]:
    """Command line of the engine: the worker's own settings, then the engine flags verbatim."""
    argv = [
        *config.engine_command,
        *_common_argv(config, control),
        *("--worker-id", config.worker_id),
        *("--incarnation", incarnation),
        *("--request-port", str(config.request_port)),
        *("--peer-port", str(config.peer_port)),
    ]
    if config.tracing is not None:
        argv.append("--report-ended")
    if config.progress_file is not None:
        argv += ["--progress-file", str(config.progress_file)]
    return [*argv, *config.engine_flags]


def node_argv(config: WorkerConfig, *, control: str) -> list[str]:
    """Command line of the process that has the ranks of a node that is not the first."""
    return [*config.node_command, *_common_argv(config, control), *config.engine_flags]


def _common_argv(config: WorkerConfig, control: str) -> list[str]:
    argv = [
        *("--model", config.model_path),
        *("--role", config.role.value),
        *("--host", config.host),
        *("--control", control),
        *("--log-format", config.log_format.value),
    ]
    return argv if config.curve_keys is None else [*argv, "--curve-keys", str(config.curve_keys)]


AUDIT_TIMEOUT_S = 5.0
Answer = AuditReport | OrderDone | OrderRefused
Question = Audit | OperatorOrder


class OrderRefusedError(Exception):
    """The engine did not carry out an operator's order."""

    def __init__(self, refused: OrderRefused) -> None:
        super().__init__(refused.message)
        self.code = refused.code


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscribers:
    """Receivers of each report. Called on the event loop, in order of arrival."""

    ready: Callable[[EngineReady], None]
    failed: Callable[[EngineFailed], None]
    stats: Callable[[EngineStats], None]
    kv_events: Callable[[KvEventBatch], None]
    ended: Callable[[EndedRequests], None]
    drain_wanted: Callable[[DrainWanted], None]


@dataclass(kw_only=True, slots=True)
class EngineLink:
    """Owns the socket. `run` until the process ends."""

    context: IpcContext
    folder: Path
    """Private to this process; the socket lies in it."""
    _channel: AsyncPairServer[EngineToWorker, WorkerToEngine] = field(init=False)
    _nonces: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _questions: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._channel = AsyncPairServer(self.context, self.endpoint, inbound=EngineToWorker, outbound=WorkerToEngine)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.folder}/control"

    async def run(self, subscribers: Subscribers) -> None:
        """Receive until canceled. A message of another version is logged and dropped."""
        while True:
            try:
                message = await self._channel.receive()
            except WireError as error:
                logger.warning("ignored a malformed message of the engine: %s", error)
                continue
            self._deliver(message, subscribers)

    async def order(self, message: WorkerToEngine) -> None:
        """Send one order. Waits only while the engine has never connected."""
        await self._channel.send(message)

    async def audit(self) -> AuditReport:
        """Ask the engine to count its pages. Raises `TimeoutError` when it does not answer in time."""
        answer = await self._ask(lambda nonce: Audit(nonce=nonce), AUDIT_TIMEOUT_S)
        assert isinstance(answer, AuditReport), f"an audit was answered by {answer}"
        return answer

    async def operate(self, order: Callable[[int], OperatorOrder], *, timeout_s: float) -> OrderDone:
        """Have an operator's order carried out; `order` makes it from a nonce.

        Raises `OrderRefusedError` when the engine cannot, `TimeoutError` when it does not answer in time.
        """
        answer = await self._ask(order, timeout_s)
        if isinstance(answer, OrderRefused):
            raise OrderRefusedError(answer)
        assert isinstance(answer, OrderDone), f"an order was answered by {answer}"
        return answer

    async def _ask(self, question: Callable[[int], Question], timeout_s: float) -> Answer:
        nonce = next(self._nonces)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[nonce] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self.order(question(nonce))
                return await answer
        finally:
            del self._questions[nonce]

    def close(self) -> None:
        self._channel.close()

    def _deliver(self, message: EngineToWorker, subscribers: Subscribers) -> None:
        match message:
            case EngineReady():
                subscribers.ready(message)
            case EngineFailed():
                subscribers.failed(message)
            case EngineStats():
                subscribers.stats(message)
            case KvEventBatch():
                subscribers.kv_events(message)
            case EndedRequests():
                subscribers.ended(message)
            case DrainWanted():
                subscribers.drain_wanted(message)
            case NodeReport():
                logger.warning("ignored a node report of an engine that is not a follower")
            case AuditReport() | OrderDone() | OrderRefused():
                answer = self._questions.get(message.nonce)
                if answer is not None and not answer.done():
                    answer.set_result(message)
