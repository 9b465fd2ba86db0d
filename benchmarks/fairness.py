"""What a tenant that floods a gateway does to another one, with mock workers that have room for few requests.

    python benchmarks/fairness.py [--rounds 5] [--seconds 8] [--rate 8] [--flood 200] [--room 16] [--tokens 20]
                                  [--step-ms 20] [--seats 1024] [--out r.json]

Gateway, engine and load run in processes of their own (those of gateway_mock.py). A steady tenant sends `--rate`
requests a second, whatever becomes of them; a flooding one keeps `--flood` connections busy, without a pause and deaf
to Retry-After. All ask for half to one and a half times `--tokens` tokens, at random with a fixed seed, at `--step-ms`
each, and `--room` of them run at once. Cases, `--seconds` each and one after the other in every round:

    alone    the steady tenant by itself
    fair     beside the flood, each with a key of its own
    fifo     beside the flood, without keys: one tenant, first come, first served

The figure is the steady tenant's 99th percentile from request to last byte, as a multiple of what it is alone in the
same round: the median over the rounds, and that of all rounds' requests together. What the machine does besides is in
it: a busy one stretches both, the crowded case more.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import gateway_mock  # noqa: E402
import uvloop  # noqa: E402
from mock_fleet import mock_tokenizer  # noqa: E402

from tandem_engine.config import Role  # noqa: E402
from tandem_engine.ipc.channels import IpcContext  # noqa: E402
from tandem_services.common.health import Health  # noqa: E402
from tandem_services.common.sockets import listen  # noqa: E402
from tandem_services.gateway.app import create_app  # noqa: E402
from tandem_services.gateway.serve import http_server  # noqa: E402
from tandem_services.router.decision import WorkerView  # noqa: E402
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of  # noqa: E402
from tandem_testing.key_files import key_of, write_keys  # noqa: E402

STEADY, FLOOD = "steady", "flood"
SETTLED_S = 1.5


def run_gateway(view: str, room: int, seats: int, *, keys: bool) -> None:
    worker = json.loads(view)
    worker["role"] = Role(worker["role"])
    folder = Path(tempfile.mkdtemp())
    tokenizer = mock_tokenizer()
    key_file = write_keys(folder, **{STEADY: {}, FLOOD: {}}) if keys else None
    config = config_of(api_keys=key_file, max_waiting=seats)

    async def serve() -> None:
        health = Health()
        chooser = FakeChooser([WorkerView(**worker)], room=room)
        fleet = fleet_of(config, chooser, SessionShelf(), IpcContext(), tokenizer)
        app = create_app(config, [fleet], health=health)
        with listen("127.0.0.1", 0) as listener:
            print(listener.getsockname()[1], flush=True)
            await http_server(app, config, health).serve(sockets=[listener])

    uvloop.run(serve())


@dataclass
class Tally:
    """What became of one tenant's requests."""

    seconds: list[float] = field(default_factory=list)
    """From request to last byte, of those that were served."""
    refused_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    elapsed_s: float = 0.0

    def note(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        (self.seconds if status == 200 else self.refused_s).append(seconds)

    def forget(self) -> None:
        self.seconds.clear()
        self.refused_s.clear()
        self.statuses.clear()

    def add(self, other: "Tally") -> None:
        self.seconds += other.seconds
        self.refused_s += other.refused_s
        self.statuses += other.statuses
        self.elapsed_s += other.elapsed_s

    @property
    def p99(self) -> float:
        ordered = sorted(self.seconds)
        return ordered[int(0.99 * (len(ordered) - 1))]

    def figures(self) -> dict[str, object]:
        return {
            "served_per_s": round(len(self.seconds) / self.elapsed_s, 1),
            "p50_ms": _percentile_ms(self.seconds, 0.50),
            "p99_ms": _percentile_ms(self.seconds, 0.99),
            "refused_p99_ms": _percentile_ms(self.refused_s, 0.99),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
        }


def _percentile_ms(seconds: list[float], share: float) -> float | None:
    return round(sorted(seconds)[int(share * (len(seconds) - 1))] * 1000, 1) if seconds else None


class Bodies:
    """Requests of one tenant, the same ones in every case."""

    def __init__(self, tenant: str, tokens: int) -> None:
        self._random = Random(tenant)
        self._tokens = tokens

    def next(self) -> bytes:
        message = {"role": "user", "content": "hello world, tell me about the quick brown fox"}
        tokens = round(self._tokens * self._random.uniform(0.5, 1.5))
        return json.dumps({"model": "mock", "messages": [message], "max_tokens": tokens}).encode()


class Connection:
    """One keep-alive connection of one tenant."""

    def __init__(self, port: int, tenant: str, bodies: "Bodies", tally: Tally) -> None:
        self._port = port
        self._head = f"Host: x\r\nAuthorization: Bearer {key_of(tenant)}\r\nContent-Type: application/json"
        self._bodies = bodies
        self._tally = tally
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        body = self._bodies.next()
        began = time.perf_counter()
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{self._head}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(answer.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        self._tally.note(int(answer.split(b" ", 2)[1]), time.perf_counter() - began)


async def steady(port: int, bodies: Bodies, rate: float, seconds: float, tally: Tally) -> None:
    """Open loop: requests come at their times, whether earlier ones have been answered or not."""
    idle: list[Connection] = []

    async def one() -> None:
        connection = idle.pop() if idle else Connection(port, STEADY, bodies, tally)
        await connection.ask()
        idle.append(connection)

    async with asyncio.TaskGroup() as group:
        for _ in range(round(rate * seconds)):
            group.create_task(one())
            await asyncio.sleep(1 / rate)


async def flood(port: int, bodies: Bodies, tally: Tally) -> None:
    connection = Connection(port, FLOOD, bodies, tally)
    while True:
        await connection.ask()


async def measure(port: int, options: argparse.Namespace, *, flooded: bool) -> dict[str, Tally]:
    bodies = {tenant: Bodies(tenant, options.tokens) for tenant in (STEADY, FLOOD)}
    tallies = {STEADY: Tally(), FLOOD: Tally()}
    floods = [asyncio.create_task(flood(port, bodies[FLOOD], tallies[FLOOD])) for _ in range(options.flood * flooded)]
    # The queue is as it will be before the first figure counts.
    await asyncio.sleep(SETTLED_S)
    tallies[FLOOD].forget()
    began = time.perf_counter()
    await steady(port, bodies[STEADY], options.rate, options.seconds, tallies[STEADY])
    for tally in tallies.values():
        tally.elapsed_s = time.perf_counter() - began
    for task in floods:
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    # What the flood has left with the engine is aborted, and over.
    await asyncio.sleep(SETTLED_S)
    return tallies


def start(*argv: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, __file__, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def gateway(options: argparse.Namespace, *, keys: bool) -> Iterator[int]:
    """A gateway and its engine; gives its port."""
    engine = gateway_mock.start("--engine", str(options.step_ms / 1000))
    assert engine.stdout is not None
    flags = ["--room", str(options.room), "--seats", str(options.seats), *(["--keys"] if keys else [])]
    started = start("--gateway", engine.stdout.readline().strip(), *flags)
    try:
        assert started.stdout is not None
        yield int(started.stdout.readline())
    finally:
        for process in (started, engine):
            process.kill()
            process.communicate()


async def run_rounds(fair_port: int, fifo_port: int, options: argparse.Namespace) -> list[dict[str, dict[str, Tally]]]:
    cases = {"alone": (fair_port, False), "fair": (fair_port, True), "fifo": (fifo_port, True)}
    rounds = []
    for number in range(options.rounds):
        measured = {name: await measure(port, options, flooded=flooded) for name, (port, flooded) in cases.items()}
        rounds.append(measured)
        figures = {name: each[STEADY].figures() for name, each in measured.items()}
        print(f"round {number + 1}", figures, file=sys.stderr)
    return rounds


def run_all(options: argparse.Namespace) -> dict[str, object]:
    with gateway(options, keys=True) as fair_port, gateway(options, keys=False) as fifo_port:
        rounds = uvloop.run(run_rounds(fair_port, fifo_port, options))
    together = {case: {tenant: Tally() for tenant in (STEADY, FLOOD)} for case in ("alone", "fair", "fifo")}
    for measured in rounds:
        for case, tallies in measured.items():
            for tenant, tally in tallies.items():
                together[case][tenant].add(tally)
    figures = {
        case: {tenant: tally.figures() for tenant, tally in tallies.items() if tally.statuses}
        for case, tallies in together.items()
    }
    ratios = {}
    for case in ("fair", "fifo"):
        each = [measured[case][STEADY].p99 / measured["alone"][STEADY].p99 for measured in rounds]
        ratios[f"{case}_p99_ratio"] = round(median(each), 2)
        ratios[f"{case}_p99_ratio_by_round"] = [round(ratio, 2) for ratio in each]
        ratios[f"{case}_p99_ratio_together"] = round(together[case][STEADY].p99 / together["alone"][STEADY].p99, 2)
    recorded_options = {name: value for name, value in vars(options).items() if isinstance(value, int | float)}
    return {"cores": os.cpu_count(), "options": recorded_options, **figures, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--flood", type=int, default=200)
    parser.add_argument("--room", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seats", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    parser.add_argument("--keys", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gateway is not None:
        run_gateway(options.gateway, options.room, options.seats, keys=options.keys)
        return
    results = json.dumps(run_all(options), indent=2)
    print(results)
    if options.out is not None:
        options.out.write_text(results + "\n")


if __name__ == "__main__":
    main()
