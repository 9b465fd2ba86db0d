"""The control channel to the engine: its reports come up, orders go down.

Reports are handed to whoever they concern. Audits and operators' orders are questions with an answer, matched
by a nonce.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.errors import WireError
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
from tandem_engine.messages.ended_requests import EndedRequests
from tandem_engine.messages.engine_stats import EngineStats
from tandem_engine.messages.kv_events import KvEventBatch

logger = logging.getLogger(__name__)

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
    """Who gets which report. Called on the event loop, in order of arrival."""

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
        """Receive for ever. A message that is not of this version is logged and dropped."""
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
