"""Reports in Redis what the engine does until it serves: people see it, and new requests wait for the worker."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.clock import Clock
from tandem_engine.base.progress import Phase, Progress, read_progress
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.starting import StartingBoard, StartingWorker
from tandem_services.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReports:
    """Of one worker. `run` once."""

    board: StartingBoard
    config: WorkerConfig
    incarnation: str
    progress_file: Path
    loaded: Callable[[], bool]
    """Whether the engine is ready."""
    clock: Clock

    async def run(self) -> None:
        """Until the engine is ready. One that ends before is forgotten when it reports no more."""
        began = self.clock.now()
        while not self.loaded():
            await self._send(self.board.report(self._worker(self.clock.now() - began)))
            await asyncio.sleep(HEARTBEAT_S)
        await self._send(self.board.forget(self.config.worker_id))

    async def _send(self, call: Coroutine[None, None, None]) -> None:
        try:
            await call
        except RedisUnavailableError:
            # The client has logged it, and a start does not depend on its readers.
            return

    def _worker(self, seconds: float) -> StartingWorker:
        progress = read_progress(self.progress_file) or Progress(phase=Phase.IMPORTS)
        return StartingWorker(
            worker_id=self.config.worker_id,
            incarnation=self.incarnation,
            role=self.config.role.value,
            model=self.config.model_name,
            phase=progress.phase,
            done=progress.done,
            total=progress.total,
            unit=progress.unit,
            seconds=round(seconds, 1),
        )
