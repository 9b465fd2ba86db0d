"""Configuration of a worker."""

import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import LogFormat
from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisAddress
from tandem_services.common.tracing import TracingConfig
from tandem_services.router.keys import check_name

ENGINE_COMMAND = (sys.executable, "-m", "tandem_engine.cli", "serve")
NODE_COMMAND = (sys.executable, "-m", "tandem_engine.cli", "follow")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Raises `ConfigError` naming the flag that cannot work."""

    model_path: str
    model_name: str
    """Name that clients ask for."""
    role: Role
    worker_id: str
    """Stable name, unique in the deployment: the pod name."""
    redis: RedisAddress
    cluster: str = "default"
    host: str = LOOPBACK
    """Address that gateways and other workers reach the engine at."""
    request_port: int = 0
    peer_port: int = 0
    curve_keys: Path | None = None
    health_host: str = LOOPBACK
    health_port: int = 0
    """0 picks a free one."""
    remote_orders: bool = False
    """The health port accepts commands without a token, from any client."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in addition to the worker's own that commands may be sent to; see `common.allowed_hosts`."""
    tracing: TracingConfig | None = None
    engine_flags: tuple[str, ...] = ()
    """Passed to the engine verbatim."""
    progress_file: Path | None = None
    """Where the engine writes what it does until it serves; see `base.progress`."""
    log_format: LogFormat = LogFormat.PLAIN
    """Of the engine's log too."""
    node_rank: int = 0
    """Which machine of an engine with `--nnodes` this is; all but 0 only follow."""
    engine_command: tuple[str, ...] = ENGINE_COMMAND
    node_command: tuple[str, ...] = NODE_COMMAND
    start_timeout_s: float = 1800.0
    """Loading a large model from slow storage takes a while."""
    redis_start_timeout_s: float = 30.0
    standby: bool = False
    """Serve only requests that name this worker until its revision was tested (`worker.standby`)."""
    await_links_s: float = 0.0
    """/ready waits so long for the links to the first peers to be tested."""
    drain_timeout_s: float = 25.0
    """Running requests may take this long to move or to finish after SIGTERM; then they are aborted and computed again
    elsewhere. With the time that takes, less than the 30 s that Kubernetes grants a pod by default."""

    def __post_init__(self) -> None:
        check_name("--worker-id", self.worker_id)
        check_name("--cluster", self.cluster)
        if not self.model_name:
            raise ConfigError("--served-model-name must not be empty")
        for flag, port in (
            ("--request-port", self.request_port),
            ("--peer-port", self.peer_port),
            ("--health-port", self.health_port),
        ):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{flag} must be between 0 and 65535, got {port}")
        for flag, seconds in (
            ("--start-timeout", self.start_timeout_s),
            ("--drain-timeout", self.drain_timeout_s),
        ):
            if not seconds > 0:
                raise ConfigError(f"{flag} must be more than 0 seconds, got {seconds}")


def new_incarnation(worker_id: str) -> str:
    """`worker_id@number` for this process start.

    The number grows with the time of the start, because the newest incarnation of a name wins, and ends in
    random bits, because two processes may start in the same microsecond. It has 19 decimal digits.
    """
    microseconds = time.time_ns() // 1000
    return f"{worker_id}@{microseconds << 12 | secrets.randbits(12)}"
