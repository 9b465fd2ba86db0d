"""Entry point of a worker: signals, exit status, and the order of opening and closing."""

import asyncio
import logging
from collections.abc import Callable

from tandem_engine.clock import MonotonicClock
from tandem_engine.errors import ConfigError
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.ipc.own_folder import own_folder
from tandem_services.common.errors import StartupError
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.signals import ending_signals
from tandem_services.common.tracing import require_opentelemetry
from tandem_services.worker.config import WorkerConfig
from tandem_services.worker.ending import EXIT_FAILED
from tandem_services.worker.follower import FollowerService
from tandem_services.worker.service import WorkerService

logger = logging.getLogger(__name__)

EXIT_USAGE = 2


def run_worker(config: WorkerConfig) -> int:
    """Run one worker, or a machine that computes for one, until it is drained or cannot go on; returns the exit status.

    0 drained · 1 failed, restart it · 2 a flag cannot work · 3 the engine refused model or flags
    """
    try:
        if config.tracing is not None:
            require_opentelemetry()
        keys = KeyPair.load(config.curve_keys) if config.curve_keys is not None else None
        return asyncio.run(_run(config, keys))
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except (RedisUnavailableError, StartupError) as error:
        logger.error("%s", error)
        return EXIT_FAILED


async def _run(config: WorkerConfig, keys: KeyPair | None) -> int:
    context = IpcContext(keys)
    try:
        # Nobody else may speak on the control channel.
        with own_folder("tandem-worker-") as folder:
            if config.node_rank > 0:
                follower = FollowerService(config, context, folder, MonotonicClock())
                _on_signals(follower.leave)
                return await follower.run()
            service = WorkerService(config, context, folder, MonotonicClock())
            _on_signals(service.drain)
            return await service.run()
    finally:
        context.close()


def _on_signals(end: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, end)
