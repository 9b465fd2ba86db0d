"""The engine as a child process.

1. Started with the flags of the worker; it dies with this process, however this process dies.
2. Its exit is the worker's exit: `wait` returns the moment it happens [engine-ends-worker].
3. Stopped by message first (`Shutdown`), then by SIGTERM, then by SIGKILL.
"""

import asyncio
import contextlib
import logging
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_engine.ipc.parent import die_with_parent
from tandem_services.common.errors import StartupError
from tandem_services.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

TERMINATE_GRACE_S = 5.0
"""From SIGTERM to SIGKILL: time to abort requests and to close sockets."""


@dataclass(slots=True)
class EngineChild:
    """A running engine process."""

    process: Process

    @classmethod
    async def start(cls, argv: Sequence[str]) -> "EngineChild":
        """Raises `StartupError` when the command cannot be started at all."""
        try:
            # The child sets it again, after exec; this covers its imports, which take seconds.
            process = await asyncio.create_subprocess_exec(*argv, preexec_fn=die_with_parent)
        except OSError as error:
            raise StartupError(f"cannot start the engine with {argv[0]}: {error}") from error
        return cls(process)

    async def wait(self) -> int:
        """The exit status; negative is the signal that ended it."""
        return await self.process.wait()

    async def stop(self, *, grace_s: float) -> int:
        """Wait `grace_s` for an exit that was asked for by message, then insist. Returns the exit status."""
        for insist, patience in (
            (self.process.terminate, grace_s),
            (self.process.kill, TERMINATE_GRACE_S),
        ):
            try:
                return await asyncio.wait_for(self.process.wait(), patience)
            except TimeoutError:
                if patience > 0:
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
