"""Processes of a benchmark, each on the cores that it is given, and the CPU time that they took. Not a command."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

START_S = 90.0
GATEWAY_CORES = {min(os.sched_getaffinity(0))}
OTHER_CORES = os.sched_getaffinity(0) - GATEWAY_CORES or GATEWAY_CORES


@contextmanager
def process(
    command: list[str], *, cores: set[int] = OTHER_CORES, piped: bool = False, **environment: str
) -> "Iterator[subprocess.Popen[str]]":
    """Killed at the end, with whatever it started. `piped`: its output is read from `stdout`, else it is a log."""
    path = {"PYTHONPATH": os.pathsep.join(SOURCES)} if command[0] == sys.executable else {}
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if piped else log,
            stderr=log,
            text=True,
            env={**os.environ, **path, **environment},
            start_new_session=True,
        )
        # Before it has begun to start threads.
        os.sched_setaffinity(started.pid, cores)
        try:
            yield started
        except Exception:
            log.seek(0)
            print(log.read()[-2000:].decode("utf-8", "replace"), file=sys.stderr)
            raise
        finally:
            with suppress(ProcessLookupError):  # it has ended, and the exception has the reason
                os.killpg(started.pid, 9)
            started.communicate()


def wait_until_up(gateway: "subprocess.Popen[str]", port: int) -> None:
    """Raises `TimeoutError`, and `AssertionError` where it has ended."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert gateway.poll() is None, f"{gateway.args} ended with {gateway.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"{gateway.args} does not listen on {port} after {START_S} s")


def cpu_seconds(pid: int) -> float:
    """Of a process's threads and its children. The usual clock, of 10 ms, is too coarse for the fastest."""
    tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    own = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    return own + sum(cpu_seconds(int(child)) for child in children)
