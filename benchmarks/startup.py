"""How long a person waits: `tandem up` with the bundled model until it is ready, and `tandem --help`.

    python benchmarks/startup.py [--rounds 3] [--json]

Before the rounds one start, with an empty folder for kernels, is measured by itself: it compiles them, and reads files
that no one has read since the machine was started. `--help` and `import torch` run once before they count. Ratios are
to `import torch` in the same run, which shows how fast the machine was. What each process took is printed as well.
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
    first_s: float
    """Of the start that compiles kernels; one measurement."""
    help_s: float
    torch_s: float
    """Of `import torch`."""
    parts: dict[str, float]
    """Seconds until each process of the last start was ready."""


def measure(rounds: int) -> Startup:
    helped = [_seconds_of(*COMMAND, "--help") for _ in range(rounds + 1)][1:]
    imported = [_seconds_of(sys.executable, "-c", "import torch") for _ in range(rounds + 1)][1:]
    with tempfile.TemporaryDirectory(prefix="tandem-kernels-") as cache:
        first, _ = _ready_seconds(cache)
        # The kernel of small steps comes after a start; the starts that count have it.
        subprocess.run([*COMMAND, "kernels", "build"], env=_environment(cache), stdout=subprocess.DEVNULL, check=True)
        started = [_ready_seconds(cache) for _ in range(rounds)]
    return Startup(
        ready_s=statistics.median(seconds for seconds, _ in started),
        first_s=first,
        help_s=statistics.median(helped),
        torch_s=statistics.median(imported),
        parts=started[-1][1],
    )


def _environment(cache: str | None = None) -> dict[str, str]:
    """`cache`: folder for kernels."""
    path = os.pathsep.join(str(ROOT / part) for part in ("engine", "services"))
    kept = {} if cache is None else {"TANDEM_CACHE_DIR": cache}
    return {**os.environ, "PYTHONPATH": path, **kept}


def _seconds_of(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=_environment(), stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def _ready_seconds(cache: str) -> tuple[float, dict[str, float]]:
    """From the command to its greeting, and what it said of its processes on the way."""
    with tempfile.TemporaryDirectory(prefix="tandem-startup-") as folder, Path(folder, "err").open("w+") as err:
        argv = [*COMMAND, "up", "--port", str(free_port()), "--run-dir", f"{folder}/run"]
        began = time.perf_counter()
        with subprocess.Popen(argv, env=_environment(cache), stdout=subprocess.PIPE, stderr=err, text=True) as process:
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
    for name, seconds in (
        ("tandem up, ready", startup.ready_s),
        ("the first time", startup.first_s),
        ("tandem --help", startup.help_s),
        ("import torch", startup.torch_s),
    ):
        print(f"{name:<18} {seconds:6.2f} s   {seconds / startup.torch_s:5.2f} of import torch")
    for name, seconds in startup.parts.items():
        print(f"  {name:<20} {seconds:.1f} s")


if __name__ == "__main__":
    main()
