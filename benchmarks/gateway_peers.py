"""Our gateway beside public ones: CPU per request and per streamed token, and latency, in the same run.

    python benchmarks/gateway_peers.py [--peers-venv DIR] [--only tandem,sglang-cache_aware] [--requests 800]
                                       [--streams 64] [--tokens 64] [--step-ms 10] [--rate 400] [--rounds 1]
                                       [--out r.json]

Peers live in a virtual environment of their own (`python -m venv DIR; DIR/bin/pip install sglang-router
'litellm[proxy]'`), named by `--peers-venv` or TANDEM_PEERS_VENV; nginx is taken from PATH. What is not there is named
in the report and left out.

Each gateway runs on one core in front of four mock workers that cost hardly anything and whose tokens are a function of
the prompt; workers, Redis and the load generator share the other cores. Every token of every answer is checked. Ours is
`tandem gateway` with its router and Redis, and its workers speak our engines' protocol; the others' speak OpenAI's over
HTTP. Figures are per core: work divided by the CPU time of the gateway's processes. What Redis used is added to ours.

    whole     chat, not streamed, one token, 16 at once
    streamed  chat, streamed, one token per event and step, `--streams` at once
    latency   as `whole`, at half of `--rate` requests a second: from request to last byte, workers and load generator
              included, so more than the gateway adds

They forward bytes. Ours renders and tokenizes the prompt, routes on what is cached where, reserves, detokenizes, and
can resume a stream on another worker.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import uvloop  # noqa: E402
from chat_load import Question, Timings, closed_loop, open_loop  # noqa: E402
from gateway_systems import SYSTEMS, WORKERS, Case, Running, System, absent  # noqa: E402
from pinned_processes import OTHER_CORES, START_S, cpu_seconds  # noqa: E402


async def warmed(running: Running, questions: Sequence[Question]) -> None:
    """Until it answers: a gateway may listen before it knows its workers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            await closed_loop(running.port, questions, at_once=len(questions))
            return
        except (ExceptionGroup, OSError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.3)


async def drive(running: Running, case: Case) -> tuple[Timings, list[float]]:
    """Timings, and CPU seconds of each of its processes."""
    questions = [
        Question.of(number, tokens=case.tokens, stream=case.stream, expected=running.expected)
        for number in range(case.requests)
    ]
    await warmed(running, questions[:8])
    before = [cpu_seconds(pid) for pid in running.pids]
    if case.rate:
        timings = await open_loop(running.port, questions, rate=case.rate)
    else:
        timings = await closed_loop(running.port, questions, at_once=case.clients)
    return timings, [cpu_seconds(pid) - cpu for pid, cpu in zip(running.pids, before, strict=True)]


def measure(start: System, case: Case, options: argparse.Namespace) -> dict[str, float]:
    with ExitStack() as stack:
        running = start(stack, case, options)
        began = time.perf_counter()
        timings, cpu = uvloop.run(drive(running, case))
        work = case.requests * (case.tokens if case.stream else 1)
        unit = "token" if case.stream else "request"
        figures = {
            f"us_per_{unit}": round(sum(cpu) / work * 1e6, 1),
            f"{unit}s_per_core_s": round(work / sum(cpu)),
            "seconds": round(time.perf_counter() - began, 1),
            **timings.figures(),
        }
        if len(cpu) > 1:
            figures[f"us_per_{unit}_in_redis"] = round(cpu[1] / work * 1e6, 1)
        return figures | running.own_figures()


def cases(options: argparse.Namespace, name: str) -> dict[str, Case]:
    # litellm takes a hundred times as long, and its figures are steady.
    less = 4 if name == "litellm" else 1
    step_s = options.step_ms / 1000
    return {
        "whole": Case(clients=16, requests=options.requests // less, tokens=1, stream=False),
        "streamed": Case(
            clients=max(1, options.streams // less),
            requests=max(1, 2 * options.streams // less),
            tokens=options.tokens,
            stream=True,
            step_s=step_s,
        ),
        "latency": Case(
            clients=16, requests=options.requests // less, tokens=1, stream=False, rate=options.rate / (2 * less)
        ),
    }


def run_all(options: argparse.Namespace) -> dict[str, object]:
    names = options.only.split(",") if options.only else list(SYSTEMS)
    missing = {name: why for name in names if (why := absent(name, options)) is not None}
    for name, why in missing.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(options.rounds):
        for name in names:
            if name not in missing:
                for kind, case in cases(options, name).items():
                    measured = measure(SYSTEMS[name], case, options)
                    rounds.setdefault(name, {}).setdefault(kind, []).append(measured)
                    print(name, kind, measured, file=sys.stderr)
    systems = {
        name: {
            kind: {key: median(each[key] for each in all_rounds) for key in all_rounds[0]}
            for kind, all_rounds in kinds.items()
        }
        for name, kinds in rounds.items()
    }
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "systems": systems,
        "absent": missing,
        "tandem_over": ratios(systems),
    }


def ratios(systems: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Requests and tokens per core second of ours, over those of each peer."""
    if "tandem" not in systems:
        return {}
    keys = {"whole": "requests_per_core_s", "streamed": "tokens_per_core_s"}
    return {
        name: {kind: round(systems["tandem"][kind][key] / each[kind][key], 2) for kind, key in keys.items()}
        for name, each in systems.items()
        if name != "tandem"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-venv", type=Path, default=os.environ.get("TANDEM_PEERS_VENV"))
    parser.add_argument("--only", help=", ".join(SYSTEMS))
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=400.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(workers=WORKERS)
    options = parser.parse_args()
    os.sched_setaffinity(0, OTHER_CORES)
    results = json.dumps(run_all(options), indent=2)
    print(results)
    if options.out is not None:
        options.out.write_text(results + "\n")


if __name__ == "__main__":
    main()
