"""Tandem: its library, one worker that does both behind a gateway, and one prefill with one decode worker."""

import sys

from peers.engines.base import CONTEXT, LineEngine, ServerEngine, Setting, python_path
from tandem_services.common.sockets import free_port


def tandem(setting: Setting) -> LineEngine:
    return LineEngine("tandem", "in_tandem", setting)


class TandemFleet(ServerEngine):
    """`tandem up`. It is never paused: its processes watch each other's clocks."""

    pausable = False

    def __init__(self, name: str, setting: Setting, workers: tuple[str, ...], threads: int) -> None:
        super().__init__(name, setting, model="random", port=free_port())
        flags = {
            "--model": setting.checkpoint,
            "--served-model-name": self.model,
            "--port": self.port,
            "--run-dir": setting.logs / name,
            "--dtype": setting.dtype,
            "--threads": threads,
            "--kv-cache-gib": setting.kv_gib,
            "--context-length": CONTEXT,
            "--max-running-requests": setting.streams,
        }
        argv = [sys.executable, "-m", "tandem_services.cli.main", "up", *workers]
        self.begin([*argv, *(str(word) for flag in flags.items() for word in flag)], python_path())
        try:
            self.wait_until_ready("/ready")
        except BaseException:
            self.close()
            raise


def tandem_mixed(setting: Setting) -> TandemFleet:
    """One worker with all threads."""
    return TandemFleet("tandem mixed", setting, ("--prefill", "0", "--decode", "0", "--both", "1"), setting.threads)


def tandem_disaggregated(setting: Setting) -> TandemFleet:
    """The same threads, divided between two workers."""
    threads = max(1, setting.threads // 2)
    return TandemFleet("tandem 1P+1D", setting, ("--prefill", "1", "--decode", "1"), threads)
