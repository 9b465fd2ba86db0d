"""The control channel to the engine: its reports come up, orders go down.

Reports are handed to whoever they concern; an audit is a question with an answer, matched by a nonce.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.errors import WireError
from tandem_engine.ipc.channels import AsyncPairServer, IpcContext
from tandem_engine.messages.control import (
    Audit,
    AuditReport,
    EngineFailed,
    EngineReady,
    EngineStats,
    EngineToWorker,
    WorkerToEngine,
)
from tandem_engine.messages.kv_events import KvEventBatch

logger = logging.getLogger(__name__)

AUDIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscribers:
    """Who gets which report. Called on the event loop, in order of arrival."""

    ready: Callable[[EngineReady], None]
    failed: Callable[[EngineFailed], None]
    stats: Callable[[EngineStats], None]
    kv_events: Callable[[KvEventBatch], None]


@dataclass(kw_only=True, slots=True)
class EngineLink:
    """Owns the socket. `run` until the process ends."""

    context: IpcContext
    folder: Path
    """Private to this process; the socket lies in it."""
    _channel: AsyncPairServer[EngineToWorker, WorkerToEngine] = field(init=False)
    _nonces: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _audits: dict[int, asyncio.Future[AuditReport]] = field(default_factory=dict)

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
                logger.warning("the engine sent something else than a report: %s", error)
                continue
            self._deliver(message, subscribers)

    async def order(self, message: WorkerToEngine) -> None:
        """Send one order. Waits only while the engine has never connected."""
        await self._channel.send(message)

    async def audit(self) -> AuditReport:
        """Ask the engine to count its pages. Raises `TimeoutError` when it does not answer in time."""
        nonce = next(self._nonces)
        answer: asyncio.Future[AuditReport] = asyncio.get_running_loop().create_future()
        self._audits[nonce] = answer
        try:
            async with asyncio.timeout(AUDIT_TIMEOUT_S):
                await self.order(Audit(nonce=nonce))
                return await answer
        finally:
            del self._audits[nonce]

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
            case AuditReport():
                answer = self._audits.get(message.nonce)
                if answer is not None and not answer.done():
                    answer.set_result(message)
