"""What the gateway costs per request and per streamed token, with a mock engine that costs nothing.

    python benchmarks/gateway_mock.py [--only whole,streamed] [--base DIR|COMMIT]... [--rounds 1] [--requests 2000]
                                      [--streams 64] [--tokens 256] [--step-ms 5] [--rate 200] [--many 2000]
                                      [--targets [--peers-venv DIR]] [--out r.json]

Gateway, engine and load run in processes of their own. Figures are per core of the gateway: work divided by
the CPU time that its process used, so that a busy machine does not blur them. Every token of every answer is checked
against the prompt that it is a function of.

`--base` measures the gateway of another checkout or commit too, in turn with this one, each case of each round. It may
be given several times. `ratios` has the medians of this one's CPU time and latencies over those of each base. Other
figures are of the round with the least CPU, on either side.

`--targets`: with one `--base`, a table in Markdown of all figures of the gateway's speed that have a target, and exit
status 1 if one is missed. It runs `gateway_peers.py` of both checkouts too, with router and Redis, in turn, and beside
sglang-router where `--peers-venv` or TANDEM_PEERS_VENV has it.

Cases:

    whole     chat, not streamed, one output token: cost of a request
    streamed  chat, streamed, one token per step: cost of a token
    latency   as `whole`, `--rate` requests a second: from request to last byte, engine and load generator included, so
              more than the gateway adds
    many      `--many` streams that start at once in one gateway: until the first token, the load generator's own delay
              included
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

CHECKOUT = "GATEWAY_MOCK_CHECKOUT"
"""Environment variable: the checkout whose gateway is run."""

ROOT = Path(os.environ.get(CHECKOUT) or Path(__file__).resolve().parent.parent)
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import uvloop  # noqa: E402
from chat_load import Question, closed_loop, open_loop  # noqa: E402
from mock_fleet import CONTEXT_LENGTH, behaviour, expected_answer, mock_tokenizer  # noqa: E402
from msgspec import to_builtins  # noqa: E402

from tandem_engine.config import Role  # noqa: E402
from tandem_engine.ipc.channels import IpcContext  # noqa: E402
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer  # noqa: E402
from tandem_services.common.health import Health  # noqa: E402
from tandem_services.gateway.app import create_app  # noqa: E402
from tandem_services.gateway.serve import http_server  # noqa: E402
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of  # noqa: E402
from tandem_testing.mock_engine import MockEngine  # noqa: E402


def of_first(name: str, modules: Sequence[str]) -> Any:
    """`name` of the first of `modules` that this checkout has: older ones have it elsewhere."""
    for module in modules:
        try:
            return getattr(import_module(f"tandem_services.{module}"), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"{ROOT} has no {name} in any of {', '.join(modules)}")


WorkerView = of_first("WorkerView", ("router.decision", "router.choice"))
listen = of_first("listen", ("common.sockets", "gateway.serve"))

if TYPE_CHECKING:
    # Another checkout, whose gateway is run, may have other ones.
    from peers.targets import Target

PEER = "sglang-cache_aware"
PEER_TOKEN = 0.6

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
    engine = MockEngine(context=IpcContext(), worker_id="mock", behavior=answers, context_length=CONTEXT_LENGTH).start()
    print(json.dumps(asdict(engine.view)), flush=True)
    sys.stdin.read()
    os._exit(0)


async def serve_gateway(view: str, listens: Callable[[int], object]) -> None:
    """Until it is ended. Called with the port once it listens: `listens`."""
    # The engine is of this checkout: another one may know fewer fields.
    known = {each.name for each in fields(WorkerView)}
    worker = {name: value for name, value in json.loads(view).items() if name in known}
    worker["role"] = Role(worker["role"])
    tokenizer = mock_tokenizer()
    config, health = config_of(), Health()
    fleet = fleet_of(config, FakeChooser([WorkerView(**worker)]), SessionShelf(), IpcContext(), tokenizer)
    app = create_app(config, [fleet], health=health)
    with listen("127.0.0.1", 0) as listener:
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_S)
        listens(listener.getsockname()[1])
        await http_server(app, config, health).serve(sockets=[listener])


def run_gateway(view: str) -> None:
    uvloop.run(serve_gateway(view, partial(print, flush=True)))


def start(*argv: str, checkout: Path | None = None) -> "subprocess.Popen[str]":
    environment = {**os.environ, CHECKOUT: str(checkout or ROOT)}
    command = [sys.executable, str(Path(__file__).resolve()), *argv]
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


Runs = dict[str, dict[str, list[Measured]]]
"""Of each side and case, one per round."""


def run_load(options: argparse.Namespace) -> tuple[dict[str, object], "list[Target]"]:
    """All figures, and those with a target."""
    tokenizer = mock_tokenizer()
    chosen = cases(options)
    routed: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        sides: dict[str, Path | None] = {"here": None}
        sides |= {base: stack.enter_context(checkout_of(base)) for base in options.base}
        runs: Runs = {side: {name: [] for name in chosen} for side in sides}
        for _ in range(options.rounds):
            for name, case in chosen.items():
                for side, checkout in sides.items():
                    runs[side][name].append(run_case(case, tokenizer, checkout))
            for side, checkout in sides.items() if options.targets else ():
                routed.setdefault(side, []).append(run_routed(checkout or ROOT, options))
    least = {
        side: {name: min(measured, key=lambda each: each.cpu_seconds) for name, measured in named.items()}
        for side, named in runs.items()
    }
    figures = {
        side: {name: {**asdict(each), **each.figures} for name, each in named.items()} for side, named in least.items()
    }
    machine: dict[str, object] = {"machine": platform.machine(), "cores": os.cpu_count(), "rounds": options.rounds}
    found = {**machine, **figures, "ratios": {base: ratios(runs["here"], runs[base]) for base in options.base}}
    return found, targets(runs, routed, options.base[0]) if options.targets else []


def run_routed(checkout: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`systems` and `absent` of `gateway_peers.py` of a checkout; sglang-router is measured beside this one alone."""
    only = f"tandem,{PEER}" if checkout == ROOT else "tandem"
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        out = Path(folder) / "found.json"
        parts = ("engine", "services", "lab", "tests/support", "benchmarks")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(checkout / part) for part in parts)}
        environment.pop(CHECKOUT, None)
        command = [sys.executable, str(checkout / "benchmarks" / "gateway_peers.py"), "--only", only, "--out", str(out)]
        if options.peers_venv is not None:
            command += ["--peers-venv", str(options.peers_venv)]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def gateway_us(round_: Mapping[str, Any], system: str, unit: str) -> float:
    """Of the gateway's own processes, for a request or a token."""
    case = round_["systems"][system]["whole" if unit == "request" else "streamed"]
    return float(case[f"us_per_{unit}"]) - float(case.get(f"us_per_{unit}_in_redis", 0.0))


def targets(runs: "Runs", routed: Mapping[str, list[dict[str, Any]]], base: str) -> "list[Target]":
    """Ratios are those of medians over the rounds."""
    from peers.targets import Target

    over = ratios(runs["here"], runs[base])
    ours, theirs = (
        {unit: median(gateway_us(each, "tandem", unit) for each in routed[side]) for unit in ("request", "token")}
        for side in ("here", base)
    )

    def ms(case: str, figure: str) -> float:
        return median(each.timings[figure] for each in runs["here"][case])

    rows = [
        Target(name="request, over the base", ratio=over["whole"]["cpu"], target=0.5, at_most=True),
        Target(
            name="request with router, Redis and log, over the base",
            ratio=ours["request"] / theirs["request"],
            target=0.55,
            at_most=True,
        ),
        Target(name="streamed token, over the base", ratio=over["streamed"]["cpu"], target=0.6, at_most=True),
    ]
    names = {unit: f"sglang-router's time for a {unit} over ours" for unit in ours}
    if absent := routed["here"][0]["absent"].get(PEER):
        rows += [Target(name=name, ratio=None, target=PEER_TOKEN, reason=absent) for name in names.values()]
    else:
        peer = {unit: median(gateway_us(each, PEER, unit) for each in routed["here"]) for unit in ours}
        least = {"request": 2 * peer["request"] / theirs["request"], "token": PEER_TOKEN}
        rows += [Target(name=names[unit], ratio=peer[unit] / ours[unit], target=least[unit]) for unit in ours]
    first = "2,000 streams that start at once: first token,"
    return [
        *rows,
        Target(name=f"{first} median, s", ratio=ms("many", "first_p50_ms") / 1e3, target=0.6, at_most=True),
        Target(name=f"{first} 99th percentile, s", ratio=ms("many", "first_p99_ms") / 1e3, target=1.0, at_most=True),
        Target(name="one token at 200/s, median, ms", ratio=ms("latency", "whole_p50_ms"), target=1.0, at_most=True),
    ]


@contextmanager
def checkout_of(base: str) -> Iterator[Path]:
    """The folder `base`, or a copy of that commit of this repository, which is deleted afterwards."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tandem-base-") as folder:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", base], check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
        project = tomllib.loads((Path(folder) / "pyproject.toml").read_text())["project"]
        # Its distribution may have another name than the one that is installed.
        metadata = Path(folder) / "services" / f"{project['name']}-0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
        yield Path(folder)


def ratios(here: dict[str, list[Measured]], base: dict[str, list[Measured]]) -> dict[str, dict[str, float]]:
    """Of medians over all rounds."""
    return {
        name: {
            figure: round(median(of(each) for each in measured) / median(of(each) for each in base[name]), 3)
            for figure, of in COMPARED.items()
        }
        for name, measured in here.items()
    }


COMPARED: dict[str, Callable[[Measured], float]] = {
    "cpu": lambda each: each.cpu_seconds,
    "first_p50": lambda each: each.timings["first_p50_ms"],
    "first_p99": lambda each: each.timings["first_p99_ms"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of, help="cases, separated by commas")
    parser.add_argument("--base", action="append", default=[], help="another checkout or commit, measured in turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--many", type=int, default=2000)
    parser.add_argument("--targets", action="store_true")
    parser.add_argument("--peers-venv", type=Path, default=os.environ.get("TANDEM_PEERS_VENV"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        run_engine(options.engine)
    elif options.gateway is not None:
        run_gateway(options.gateway)
    else:
        if options.targets and (len(options.base) != 1 or options.only):
            parser.error("--targets needs one --base, and all cases: leave out --only")
        found, rows = run_load(options)
        results = json.dumps({**found, **({"targets": [*map(to_builtins, rows)]} if rows else {})}, indent=2)
        if rows:
            from peers.report import targets_table

            print(targets_table(rows))
        else:
            print(results)
        if options.out is not None:
            options.out.write_text(results + "\n")
        sys.exit(any(row.ratio is not None and not row.met for row in rows))


if __name__ == "__main__":
    main()
