"""What the gateway costs per request and per streamed token, with a mock engine that costs nothing.

    python benchmarks/gateway_mock.py [--only whole,streamed] [--base DIR] [--rounds 1] [--requests 2000] [--streams 64]
                                      [--tokens 256] [--step-ms 5] [--rate 200] [--many 2000] [--out r.json]

Gateway, engine and load run in processes of their own. Figures are per core of the gateway: work divided by
the CPU time that its process used, so that a busy machine does not blur them. Every token of every answer is checked
against the prompt that it is a function of.

`--base DIR` measures the gateway of another checkout too, in turn with this one, each case of each round: `ratios` has
the CPU of this one over the base's in the same round, of several rounds the median. Other figures are of the round with
the least CPU, on either side. Cases:

    whole     chat, not streamed, one output token: cost of a request
    streamed  chat, streamed, one token per step: cost of a token
    latency   as `whole`, `--rate` requests a second: from request to last byte, engine and load generator included, so
              more than the gateway adds
    many      `--many` streams at once in one gateway
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

CHECKOUT = "GATEWAY_MOCK_CHECKOUT"
"""Environment variable: the checkout whose gateway is run."""

ROOT = Path(os.environ.get(CHECKOUT) or Path(__file__).resolve().parent.parent)
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import uvloop  # noqa: E402
from chat_load import Question, closed_loop, open_loop  # noqa: E402
from mock_fleet import CONTEXT_LENGTH, behaviour, expected_answer, mock_tokenizer  # noqa: E402

from tandem_engine.config import Role  # noqa: E402
from tandem_engine.ipc.channels import IpcContext  # noqa: E402
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer  # noqa: E402
from tandem_services.common.health import Health  # noqa: E402
from tandem_services.common.sockets import listen  # noqa: E402
from tandem_services.gateway.app import create_app  # noqa: E402
from tandem_services.gateway.serve import http_server  # noqa: E402
from tandem_services.router.decision import WorkerView  # noqa: E402
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of  # noqa: E402
from tandem_testing.mock_engine import MockEngine  # noqa: E402

SWITCH_S = 0.0005
"""As `tandem gateway` sets it."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One case."""

    requests: int
    tokens: int
    seconds: float
    cpu_seconds: float
    """Of the gateway's process."""
    timings: dict[str, float]

    @property
    def figures(self) -> dict[str, float]:
        return {
            "cpu_us_per_request": round(self.cpu_seconds / self.requests * 1e6, 1),
            "cpu_us_per_token": round(self.cpu_seconds / self.tokens * 1e6, 2),
            "requests_per_core_s": round(self.requests / self.cpu_seconds),
            "tokens_per_core_s": round(self.tokens / self.cpu_seconds),
            "cores_used": round(self.cpu_seconds / self.seconds, 2),
        }


def run_engine(step_s: float) -> None:
    answers = behaviour(mock_tokenizer(), step_s=step_s)
    engine = MockEngine(
        context=IpcContext(), worker_id="mock", behaviour=answers, context_length=CONTEXT_LENGTH
    ).start()
    print(json.dumps(asdict(engine.view)), flush=True)
    sys.stdin.read()
    os._exit(0)


def run_gateway(view: str) -> None:
    # The engine is of this checkout: another one may know fewer fields.
    known = {each.name for each in fields(WorkerView)}
    worker = {name: value for name, value in json.loads(view).items() if name in known}
    worker["role"] = Role(worker["role"])
    tokenizer = mock_tokenizer()
    config = config_of()

    async def serve() -> None:
        health = Health()
        fleet = fleet_of(config, FakeChooser([WorkerView(**worker)]), SessionShelf(), IpcContext(), tokenizer)
        app = create_app(config, [fleet], health=health)
        with listen("127.0.0.1", 0) as listener:
            gc.collect()
            gc.freeze()
            sys.setswitchinterval(SWITCH_S)
            print(listener.getsockname()[1], flush=True)
            await http_server(app, config, health).serve(sockets=[listener])

    uvloop.run(serve())


def start(*argv: str, checkout: Path | None = None) -> "subprocess.Popen[str]":
    environment = {**os.environ, CHECKOUT: str(checkout or ROOT)}
    command = [sys.executable, __file__, *argv]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def cpu_seconds(pid: int) -> float:
    """Of its threads, which live as long as it does."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def measure(port: int, pid: int, case: "Case", tokenizer: TextTokenizer) -> Measured:
    questions = case.questions(expected_answer(tokenizer))
    await closed_loop(port, questions[:16], at_once=min(16, case.clients))
    cpu, began = cpu_seconds(pid), time.perf_counter()
    if case.rate:
        timings = await open_loop(port, questions, rate=case.rate)
    else:
        timings = await closed_loop(port, questions, at_once=case.clients)
    return Measured(
        requests=len(questions),
        tokens=len(questions) * case.tokens,
        seconds=round(time.perf_counter() - began, 2),
        cpu_seconds=round(cpu_seconds(pid) - cpu, 4),
        timings=timings.figures(),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    requests: int
    clients: int
    tokens: int
    stream: bool
    step_s: float = 0.0
    rate: float = 0.0
    """Requests a second, however many are open; 0: `clients` at once."""

    def questions(self, expected: Callable[[str, int], str]) -> list[Question]:
        return [
            Question.of(number, tokens=self.tokens, stream=self.stream, expected=expected)
            for number in range(self.requests)
        ]


CASES = ("whole", "streamed", "latency", "many")


def names_of(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no case {unknown[0]!r}: choose from {', '.join(CASES)}")
    return names


def cases(options: argparse.Namespace) -> dict[str, Case]:
    step_s = options.step_ms / 1000
    known = {
        "whole": Case(requests=options.requests, clients=16, tokens=1, stream=False),
        "streamed": Case(
            requests=2 * options.streams, clients=options.streams, tokens=options.tokens, stream=True, step_s=step_s
        ),
        "latency": Case(requests=options.requests, clients=16, tokens=1, stream=False, rate=options.rate),
        "many": Case(requests=options.many, clients=options.many, tokens=64, stream=True, step_s=0.05),
    }
    return {name: known[name] for name in options.only or known}


def run_case(case: Case, tokenizer: TextTokenizer, checkout: Path | None) -> Measured:
    """With the gateway of `checkout`, this one if None; engine and load are always of this one."""
    engine = start("--engine", str(case.step_s))
    gateway = start("--gateway", engine.stdout.readline().strip(), checkout=checkout)
    try:
        return uvloop.run(measure(int(gateway.stdout.readline()), gateway.pid, case, tokenizer))
    finally:
        for process in (gateway, engine):
            process.kill()
            process.communicate()


def run_load(options: argparse.Namespace) -> dict[str, object]:
    tokenizer = mock_tokenizer()
    sides: dict[str, Path | None] = {"here": None} | ({} if options.base is None else {"base": options.base.resolve()})
    chosen = cases(options)
    runs: dict[str, dict[str, list[Measured]]] = {side: {name: [] for name in chosen} for side in sides}
    for _ in range(options.rounds):
        for name, case in chosen.items():
            for side, checkout in sides.items():
                runs[side][name].append(run_case(case, tokenizer, checkout))
    least = {
        side: {name: min(measured, key=lambda each: each.cpu_seconds) for name, measured in named.items()}
        for side, named in runs.items()
    }
    figures = {
        side: {name: {**asdict(each), **each.figures} for name, each in named.items()} for side, named in least.items()
    }
    machine: dict[str, object] = {"machine": platform.machine(), "cores": os.cpu_count()}
    return {**machine, **figures.pop("here"), **figures, **({} if options.base is None else {"ratios": ratios(runs)})}


def ratios(runs: dict[str, dict[str, list[Measured]]]) -> dict[str, float]:
    pairs = {name: zip(here, runs["base"][name], strict=True) for name, here in runs["here"].items()}
    return {
        name: round(median(here.cpu_seconds / base.cpu_seconds for here, base in both), 3)
        for name, both in pairs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of, help="cases, separated by commas")
    parser.add_argument("--base", type=Path, help="another checkout, whose gateway is measured in turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--many", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        run_engine(options.engine)
    elif options.gateway is not None:
        run_gateway(options.gateway)
    else:
        results = json.dumps(run_load(options), indent=2)
        print(results)
        if options.out is not None:
            options.out.write_text(results + "\n")


if __name__ == "__main__":
    main()
