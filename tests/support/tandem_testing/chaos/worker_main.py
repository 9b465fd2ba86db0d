"""A worker process under test: the product's worker service, started from a settings file.

    python -m tandem_testing.chaos.worker_main SETTINGS.json

What differs from `tandem worker`: the engine is `chaos.engine_main`; with proxies, the registry gets the
proxies' addresses and a file tells the proxies the engine's.
"""

import sys
import time
from pathlib import Path

import msgspec

from tandem_engine.base.addresses import Address
from tandem_engine.base.logs import LogFormat, configure_logging
from tandem_engine.config import Role
from tandem_engine.messages.control import EngineReady
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.registry import WorkerRecord
from tandem_services.worker import registration, service
from tandem_services.worker.config import WorkerConfig
from tandem_services.worker.main import run_worker
from tandem_services.worker.registration import LoadMonitor
from tandem_testing import raised_in_processes
from tandem_testing.chaos.knobs import RAISED, WORKER


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a fleet. Paths are absolute."""

    worker_id: str
    role: str
    model: str
    model_name: str
    redis_url: str
    cluster: str
    curve_keys: str
    health_port: int
    request_port: int
    peer_port: int
    """Of the engine; the same after a restart, as a pod keeps its address."""
    engine_flags: tuple[str, ...]
    knobs: str
    host: str = "127.0.0.1"
    """Address of all its ports."""
    request_proxy: int = 0
    peer_proxy: int = 0
    """Ports that the registry gets instead; 0: the engine's own."""
    clock_file: str = ""
    """Seconds in this file are added to the wall clock of the worker service."""
    drain_timeout_s: float = 30.0


def config_of(settings: WorkerSettings) -> WorkerConfig:
    engine = (sys.executable, "-m", "tandem_testing.chaos.engine_main", settings.knobs)
    return WorkerConfig(
        model_path=settings.model,
        model_name=settings.model_name,
        role=Role(settings.role),
        worker_id=settings.worker_id,
        redis=RedisAddress(url=settings.redis_url),
        cluster=settings.cluster,
        curve_keys=Path(settings.curve_keys),
        host=settings.host,
        health_host=settings.host,
        health_port=settings.health_port,
        request_port=settings.request_port,
        peer_port=settings.peer_port,
        engine_command=engine,
        engine_flags=settings.engine_flags,
        drain_timeout_s=settings.drain_timeout_s,
    )


def advertise_proxies(settings: WorkerSettings) -> None:
    """The registry learns where the proxies listen."""
    describe = registration.describe

    def through_proxies(
        config: WorkerConfig, ready: EngineReady, monitor: LoadMonitor, *, health_endpoint: str
    ) -> WorkerRecord:
        reported = msgspec.structs.replace(
            ready,
            request_endpoint=Address(settings.host, settings.request_proxy).endpoint,
            peer_endpoint=Address(settings.host, settings.peer_proxy).endpoint,
        )
        return describe(config, reported, monitor, health_endpoint=health_endpoint)

    vars(service)["describe"] = through_proxies


def shift_wall_clock(clock_file: Path) -> None:
    """`time.time` follows the file; monotonic time does not."""
    real, real_ns = time.time, time.time_ns

    def shift() -> float:
        return float(clock_file.read_text("utf-8")) if clock_file.exists() else 0.0

    time.time = lambda: real() + shift()
    time.time_ns = lambda: real_ns() + int(shift() * 1e9)


def main(path: str) -> int:
    settings = msgspec.json.decode(Path(path).read_bytes(), type=WorkerSettings)
    if (raised := Path(settings.knobs).with_suffix(RAISED) / WORKER).is_dir():
        raised_in_processes.install(raised)
    configure_logging(LogFormat.PLAIN)
    if settings.request_proxy:
        advertise_proxies(settings)
    if settings.clock_file:
        shift_wall_clock(Path(settings.clock_file))
    return run_worker(config_of(settings))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
