"""How long a person waits: `tandem up` with the bundled model until it is ready, and `tandem --help`.

    python benchmarks/startup.py [--rounds 3] [--json]

The first start of each is not counted: it reads files that no one has read since the machine was started and, after an
update, compiles kernels. What each process took is told as well.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem_services.common.sockets import free_port

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "tandem_services.cli.main"]
START_S = 120.0
_READY = re.compile(r"ready\S* (.+?) after ([0-9.]+) s")


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Medians, in seconds."""

    ready_s: float
    help_s: float
    parts: dict[str, float]
    """Seconds until each process of the last start was ready."""


def measure(rounds: int) -> Startup:
    helped = [_help_seconds() for _ in range(rounds + 1)][1:]
    started = [_ready_seconds() for _ in range(rounds + 1)][1:]
    return Startup(
        ready_s=statistics.median(seconds for seconds, _ in started),
        help_s=statistics.median(helped),
        parts=started[-1][1],
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("engine", "services"))}


def _help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], env=_environment(), stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def _ready_seconds() -> tuple[float, dict[str, float]]:
    """From the command to its greeting, and what it said of its processes on the way."""
    with tempfile.TemporaryDirectory(prefix="tandem-startup-") as folder, Path(folder, "err").open("w+") as err:
        argv = [*COMMAND, "up", "--port", str(free_port()), "--run-dir", f"{folder}/run"]
        began = time.perf_counter()
        with subprocess.Popen(argv, env=_environment(), stdout=subprocess.PIPE, stderr=err, text=True) as process:
            try:
                assert process.stdout is not None, "opened with a pipe"
                greeted = any("Tandem serves" in line for line in process.stdout)
                seconds = time.perf_counter() - began
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=START_S)
        err.seek(0)
        said = err.read()
        assert greeted, f"tandem up ended:\n{said}"
        return seconds, {name: float(after) for name, after in _READY.findall(said)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians of so many (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    startup = measure(args.rounds)
    if args.json:
        print(json.dumps(asdict(startup)))
        return
    print(f"tandem up, ready   {startup.ready_s:.2f} s")
    print(f"tandem --help      {startup.help_s:.2f} s")
    for name, seconds in startup.parts.items():
        print(f"  {name:<20} {seconds:.1f} s")


if __name__ == "__main__":
    main()
