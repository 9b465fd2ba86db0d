"""How long a person waits: `tandem up` with the bundled model until it is ready and has answered, and `tandem --help`.

    python benchmarks/start_time.py [--rounds 3] [--command serve] [--json]
    python benchmarks/start_time.py --peer 'llama-server -m mini.gguf --port {port}'

Before the rounds one start, with an empty folder for kernels, is measured by itself: it compiles them, and reads files
that no one has read since the machine was started. `--help` and `import torch` run once before they count. Ratios are
to `import torch` in the same run, which shows how fast the machine was. CPU seconds are those of all processes of a
start; they depend less on what else the machine does. What each process took is printed as well.

vLLM and llama-server start on the same weights, where `make bench-peers` has installed them or PATH has them. All
are compared by the seconds until a completion of one token has come; a peer's first start counts by itself, too.
--peer adds a command with {port} and, where it takes one, {model} for the folder of the bundled model. It gets its
request when `/health` answers 200.
"""

import argparse
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from start_peers import Peer, known_peers

from tandem_services.common.sockets import free_port

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "tandem-mini"
COMMAND = [sys.executable, "-m", "tandem_services.cli.main"]
STOP_S = 120.0
PEER_S = 600.0
POLL_S = 0.02
OK = 200
_READY = re.compile(r"ready\S* (.+?) after ([0-9.]+) s")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """By one command."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Medians, in seconds."""

    command: str
    ready_s: float
    ready_cpu_s: float
    token_s: float
    """Until a completion of one token has come."""
    first_s: float
    """Of the start that compiles kernels; one measurement."""
    first_cpu_s: float
    help_s: float
    torch_s: float
    """Of `import torch`."""
    parts: dict[str, float]
    """Seconds until each process of the last start was ready."""
    peers: dict[str, float] = field(default_factory=dict)
    """Name → seconds until a completion of one token has come."""
    peers_first: dict[str, float] = field(default_factory=dict)
    peers_missing: dict[str, str] = field(default_factory=dict)
    """Name → why it was not started."""
    load: float
    """Processes that ran at the end; more than cores: the seconds are those of a busy machine."""


def measure(rounds: int, command: str, peers: Sequence[Peer]) -> Startup:
    helped = [_taken_by(*COMMAND, "--help").seconds for _ in range(rounds + 1)][1:]
    imported = [_taken_by(sys.executable, "-c", "import torch").seconds for _ in range(rounds + 1)][1:]
    with tempfile.TemporaryDirectory(prefix="tandem-kernels-") as cache:
        first, _, _ = _start(command, cache)
        # The kernel of small steps comes after a start; the starts that count have it.
        subprocess.run([*COMMAND, "kernels", "build"], env=_environment(cache), stdout=subprocess.DEVNULL, check=True)
        started = [_start(command, cache) for _ in range(rounds)]
    others, missing = _peers_seconds(rounds, peers)
    return Startup(
        command=command,
        ready_s=statistics.median(taken.seconds for taken, _, _ in started),
        ready_cpu_s=statistics.median(taken.cpu_s for taken, _, _ in started),
        token_s=statistics.median(seconds for _, seconds, _ in started),
        first_s=first.seconds,
        first_cpu_s=first.cpu_s,
        help_s=statistics.median(helped),
        torch_s=statistics.median(imported),
        parts=started[-1][2],
        peers={name: statistics.median(seconds[1:]) for name, seconds in others.items()},
        peers_first={name: seconds[0] for name, seconds in others.items()},
        peers_missing=missing,
        load=os.getloadavg()[0],
    )


def _environment(cache: str | None = None) -> dict[str, str]:
    """`cache`: folder for kernels."""
    path = os.pathsep.join(str(ROOT / part) for part in ("engine", "services"))
    kept = {} if cache is None else {"TANDEM_CACHE_DIR": cache}
    return {**os.environ, "PYTHONPATH": path, **kept}


def _cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _taken_by(*command: str) -> Taken:
    began, cpu = time.perf_counter(), _cpu_seconds()
    subprocess.run(command, env=_environment(), stdout=subprocess.DEVNULL, check=True)
    return Taken(seconds=time.perf_counter() - began, cpu_s=_cpu_seconds() - cpu)


def _start(command: str, cache: str) -> tuple[Taken, float, dict[str, float]]:
    """From the command to its greeting, seconds to its first token, and its reports of its processes on the way.

    CPU seconds include the end.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tandem-startup-") as folder, Path(folder, "err").open("w+") as err:
        argv = [*COMMAND, command, "--port", str(port), "--run-dir", f"{folder}/run"]
        began, cpu = time.perf_counter(), _cpu_seconds()
        with subprocess.Popen(argv, env=_environment(cache), stdout=subprocess.PIPE, stderr=err, text=True) as process:
            try:
                assert process.stdout is not None, "opened with a pipe"
                greeted = any("Tandem serves" in line for line in process.stdout)
                seconds = time.perf_counter() - began
                if greeted:
                    _answer_of(port)
                answered_s = time.perf_counter() - began
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=STOP_S)
        err.seek(0)
        errors = err.read()
        assert greeted, f"tandem {command} ended:\n{errors}"
        taken = Taken(seconds=seconds, cpu_s=_cpu_seconds() - cpu)
        return taken, answered_s, {name: float(after) for name, after in _READY.findall(errors)}


def _answer_of(port: int) -> None:
    """Return when a completion of one token has come."""
    url = f"http://127.0.0.1:{port}/v1"
    with urllib.request.urlopen(f"{url}/models", timeout=PEER_S) as listed:
        model = json.load(listed)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PEER_S) as answer:
        assert json.load(answer)["choices"], "a completion has a choice"


def _peers_seconds(rounds: int, peers: Sequence[Peer]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Of each peer the seconds of `rounds` starts and one before them, or why it has none."""
    others: dict[str, list[float]] = {}
    missing = {each.name: each.missing for each in peers if each.missing}
    for each in peers:
        if not each.missing:
            try:
                others[each.name] = [_peer_seconds(each) for _ in range(rounds + 1)]
            except RuntimeError as error:
                missing[each.name] = str(error)
    return others, missing


def _peer_seconds(peer: Peer) -> float:
    """Until it has answered. Raises `RuntimeError` when it ends before, or is not ready in time."""
    port = free_port()
    began = time.perf_counter()
    argv = peer.argv(port=port, model=MODEL)
    with tempfile.TemporaryFile() as output, _running(argv, peer.environment, output) as process:
        while time.perf_counter() - began < PEER_S:
            if process.poll() is not None:
                output.seek(0)
                last = output.read().decode("utf-8", "replace").strip().splitlines()[-1:]
                raise RuntimeError(f"{peer.name}: ended with status {process.returncode} before it was ready: {last}")
            if _is_healthy(port):
                _answer_of(port)
                return time.perf_counter() - began
            time.sleep(POLL_S)
    raise RuntimeError(f"{peer.name}: not ready after {PEER_S:g} s")


@contextmanager
def _running(
    argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """With the processes that it starts, which end with it. They write to `output`."""
    variables = {**os.environ, **environment}
    with subprocess.Popen(
        argv, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return answer.status == OK
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians of so many (default 3)")
    parser.add_argument("--command", choices=("up", "serve"), default="up", help="what is started (default: up)")
    parser.add_argument("--peer", action="append", default=[], metavar="COMMAND", help="start this as well; repeatable")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    startup = measure(args.rounds, args.command, [*map(Peer.given, args.peer), *known_peers(MODEL)])
    if args.json:
        print(json.dumps(asdict(startup)))
        return
    rows = [
        (f"tandem {args.command}, ready", startup.ready_s, f", {startup.ready_cpu_s:.1f} s of CPU"),
        ("ready the first time", startup.first_s, f", {startup.first_cpu_s:.1f} s of CPU"),
        ("its first token", startup.token_s, ""),
        ("tandem --help", startup.help_s, ""),
        ("import torch", startup.torch_s, ""),
    ]
    for name, seconds in startup.peers.items():
        more = f", the first time {startup.peers_first[name]:.1f} s; {seconds / startup.token_s:.1f} times Tandem's"
        rows.append((f"{name}, first token", seconds, more))
    for name, seconds, more in rows:
        print(f"{name:<26} {seconds:6.2f} s   {seconds / startup.torch_s:5.2f} of import torch{more}")
    for name, why in startup.peers_missing.items():
        print(f"{name:<26} not installed: {why}")
    for name, seconds in startup.parts.items():
        print(f"  {name:<20} {seconds:.1f} s")
    print(f"load {startup.load:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
