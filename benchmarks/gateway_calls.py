"""Calls of Python and C functions that a request and a streamed token cost the gateway, counted by cProfile.

    python benchmarks/gateway_calls.py [--base DIR|COMMIT]... [--top 0] [--tree 0] [--out r.json]

The cases are those of gateway_mock.py, with fewer requests. Calls are those of the event loop's thread between the
first and the last of them; their number does not depend on the machine's speed, but for tokens that come together: they
are one event, so that `per_token` differs by a few between runs. `--base` counts another checkout or commit too. `--top
N` adds the functions that are called most, and `--tree N` their callers: each function with all calls below it, down
to those with N calls for each request or token.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import gateway_mock as mock
import uvloop
from chat_load import closed_loop
from mock_fleet import expected_answer, mock_tokenizer

Function: TypeAlias = tuple[str, int, str]
"""File, line and name, as the profile has them."""

CASES = {
    "request": mock.Case(requests=512, clients=16, tokens=1, stream=False),
    "token": mock.Case(requests=64, clients=16, tokens=128, stream=True, step_s=0.005),
}


async def counted(port: int, case: mock.Case, profile: cProfile.Profile) -> None:
    command = [sys.executable, __file__, "--load", str(port), "--case", json.dumps(asdict(case))]
    load = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert load.stdout is not None
    assert load.stdin is not None
    await load.stdout.readline()
    profile.enable()
    load.stdin.write(b"go\n")
    status = await load.wait()
    profile.disable()
    assert status == 0, "the load generator failed"


def run_load(port: int, case: mock.Case) -> None:
    questions = case.questions(expected_answer(mock_tokenizer()))
    asyncio.run(closed_loop(port, questions[:16], at_once=16))
    print("warm", flush=True)
    sys.stdin.readline()
    asyncio.run(closed_loop(port, questions, at_once=case.clients))


def tree_of(stats: Mapping[Function, Any], units: int, least: float) -> list[str]:
    """Functions by caller, with all calls below, per unit; a function's are shared out to its callers."""
    below: dict[Function, dict[Function, float]] = {function: {} for function in stats}
    for function, (*_, callers) in stats.items():
        for caller, edge in callers.items():
            below[caller][function] = edge[1]
    totals: dict[Function, float] = {}

    def total(function: Function, above: tuple[Function, ...] = ()) -> float:
        """Calls below one call of it, itself included."""
        if function not in totals:
            inner = [(each, calls) for each, calls in below[function].items() if each not in (*above, function)]
            totals[function] = 1.0 + sum(n * total(each, (*above, function)) for each, n in inner) / stats[function][1]
        return totals[function]

    lines: list[str] = []

    def show(function: Function, calls: float, depth: int, above: tuple[Function, ...]) -> None:
        whole = calls * total(function) / units
        if whole < least or function in above:
            return
        name = f"{Path(function[0]).name}:{function[1]} {function[2]}"
        lines.append(f"{whole:8.1f} {calls / units:6.2f}  {'  ' * depth}{name}")
        share = calls / stats[function][1]
        for each, inner in sorted(below[function].items(), key=lambda pair: -pair[1] * total(pair[0])):
            show(each, inner * share, depth + 1, (*above, function))

    roots = [(function, row[1] - sum(each[1] for each in row[4].values())) for function, row in stats.items()]
    for function, calls in sorted(roots, key=lambda pair: -pair[1] * total(pair[0])):
        show(function, calls, 0, ())
    return lines


def run_gateway(case: mock.Case, top: int, tree: float) -> None:
    engine = mock.start("--engine", str(case.step_s))
    assert engine.stdout is not None
    view, profile = engine.stdout.readline(), cProfile.Profile()

    async def main() -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(mock.serve_gateway(view, port.set_result))
        await counted(await port, case, profile)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    try:
        uvloop.run(main())
    finally:
        engine.kill()
        engine.communicate()
    stats = pstats.Stats(profile)
    units = case.requests * (case.tokens if case.stream else 1)
    rows = sorted(((calls / units, name) for name, (_, calls, *_) in stats.stats.items()), reverse=True)[:top]  # type: ignore[attr-defined]
    for line in tree_of(stats.stats, units, tree) if tree else ():  # type: ignore[attr-defined]
        print(line, file=sys.stderr)
    most = {f"{Path(name[0]).name}:{name[2]}": round(calls, 2) for calls, name in rows}
    print(json.dumps({"calls": round(stats.total_calls / units, 1), **({"most": most} if top else {})}))  # type: ignore[attr-defined]


def count(case: mock.Case, checkout: Path | None, top: int, tree: float = 0.0) -> object:
    environment = {**os.environ, mock.CHECKOUT: str(checkout or mock.ROOT)}
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--top", str(top)]
    command += ["--tree", str(tree)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_all(bases: Sequence[str], top: int, tree: float) -> dict[str, object]:
    with ExitStack() as stack:
        sides = {"here": None} | {base: stack.enter_context(mock.checkout_of(base)) for base in bases}
        return {
            side: {f"per_{name}": count(case, checkout, top, tree) for name, case in CASES.items()}
            for side, checkout in sides.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", action="append", default=[], help="another checkout or commit")
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--tree", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        run_load(options.load, mock.Case(**options.case))
    elif options.case is not None:
        run_gateway(mock.Case(**options.case), options.top, options.tree)
    else:
        results = json.dumps(run_all(options.base, options.top, options.tree), indent=2)
        print(results)
        if options.out is not None:
            options.out.write_text(results + "\n")


if __name__ == "__main__":
    main()
