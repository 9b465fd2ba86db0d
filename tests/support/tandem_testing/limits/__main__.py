"""`make limits`: a whole Tandem of the bundled model in containers of several sizes, under load.

    memory       one worker in a control group of 0.7, 1, 2 and 4 GiB, 64 and 256 requests with logprobs at once: the
                 kernel kills nothing, and each request is answered
    processes    no thread or process may start after the system is ready: each request is answered, and a grammar gets
                 a 503 while its compiler cannot start
    descriptors  a gateway with 256 open files, 700 streams at once: each is answered, with 200 or 503
    cpu          a quota of one CPU: requests per second of CPU time with the default number of threads, in relation to
                 --threads 1; at least 0.8. In relation to the clock it is noise where other processes compute
    places       `tandem up` in containers of other shapes, see `tandem_testing.limits.places`: it answers, or an error
                 names the limit

Prints a JSON object per case. A case whose control group cannot be made here is printed as not checked; one that does
not come to its end is printed with its error. Exits 1 if a case ended with an error or not as it should.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from tandem_testing.control_groups import ControlGroup, can_limit, new_group, system_within
from tandem_testing.limits.places import PLACES, Place, check, problem
from tandem_testing.system import System

GIB = 1 << 30
SIZES = (0.7, 1.0, 2.0, 4.0)
CROWDS = (64, 256)
ROUNDS = 6
"""Requests per case, as a multiple of those at once."""
FILES, STREAMS = 256, 700
MODEL = "tandem-mini"
NONE_MORE = 1
"""Threads and processes of a group that has more: those that run stay."""
PATIENCE_S = 600.0
MIN_RATIO = 0.8
COMPUTED = 64
"""Requests of the case `cpu`."""
TICKS = os.sysconf("SC_CLK_TCK")
Figures = dict[str, Any]


@contextmanager
def run_within(group: ControlGroup | None, *flags: str, prefix: Sequence[str] = ()) -> Iterator[System]:
    """`system_within` with a run directory of its time."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-limits-") as folder,
        system_within(group, Path(folder) / "run", *flags, prefix=prefix) as system,
    ):
        yield system


async def statuses(url: str, bodies: Sequence[Figures], *, at_once: int) -> Counter[str]:
    """How the requests end: a status, or the name of a transport error."""
    free = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:

        async def one(body: Figures) -> str:
            async with free:
                try:
                    return str((await http.post("/v1/completions", json=body)).status_code)
                except httpx.HTTPError as error:
                    return type(error).__name__

        return Counter(await asyncio.gather(*map(one, bodies)))


def completions(count: int, **fields: Any) -> list[Figures]:
    """Prompts and answers of several lengths."""
    words = "the fox and the river "
    return [
        {"model": MODEL, "prompt": f"{n} " + words * (n % 40), "max_tokens": 8 + n % 40, "logprobs": 5, **fields}
        for n in range(count)
    ]


def memory(gib: float, at_once: int) -> Figures:
    with limited("memory", gib * GIB) as group, run_within(group) as system:
        ready = group.kept()
        ended = asyncio.run(statuses(system.url, completions(ROUNDS * at_once), at_once=at_once))
        return {"ended": ended, "kills": group.kills(), "ready_mib": ready >> 20, "kept_mib": group.kept() >> 20}


def processes() -> Figures:
    with limited("pids", 10_000) as group, run_within(group) as system:
        group.limit(NONE_MORE)
        plain = asyncio.run(statuses(system.url, completions(64), at_once=64))
        grammar = asyncio.run(statuses(system.url, completions(4, structured_outputs={"regex": "[a-z]+"}), at_once=4))
        return {"ended": plain, "grammars": grammar, "running": group.used()}


def descriptors() -> Figures:
    with run_within(None, prefix=("prlimit", f"--nofile={FILES}:{FILES}")) as system:
        return {"ended": asyncio.run(statuses(system.url, completions(STREAMS), at_once=STREAMS))}


def cpu() -> Figures:
    rates, clocks, threads, ended = {}, {}, {}, Counter[str]()
    for name, flags in {"default": (), "threads_1": ("--threads", "1")}.items():
        with limited("cpu", 1.0) as group, run_within(group, *flags) as system:
            asyncio.run(statuses(system.url, completions(8), at_once=8))
            began, used = perf_counter(), used_cpu_s(group)
            ended += asyncio.run(statuses(system.url, completions(COMPUTED), at_once=16))
            clocks[name] = COMPUTED / (perf_counter() - began)
            rates[name] = COMPUTED / (used_cpu_s(group) - used)
            threads[name] = described_threads(system)
    ratio = rates["default"] / rates["threads_1"]
    return {"ended": ended, "requests_per_s": clocks, "requests_per_cpu_s": rates, "ratio": ratio, "threads": threads}


def used_cpu_s(group: ControlGroup) -> float:
    """Of all processes that are in the group, and of their children that have ended, since each has started."""
    return sum(map(_cpu_s, group.processes()))


def _cpu_s(pid: int) -> float:
    """0 for a process that has ended since it was listed: its parent has its time."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / TICKS


def described_threads(system: System) -> str:
    """The worker's line about its threads."""
    return re.findall(r"computing with .*\)", (system.run_dir / "both-0.log").read_text("utf-8"))[-1]


def place(of: Place) -> Figures:
    if reason := of.not_checked():
        return {"not_checked": reason}
    figures = check(of)
    return {**figures, "problem": problem(of, figures)}


@contextmanager
def limited(controller: str, most: float) -> Iterator[ControlGroup]:
    with new_group(controller) as group:
        group.limit(most)
        yield group


def figures_of(run: Callable[[], Figures]) -> Figures:
    """What a case has measured, or its error: the other cases still run."""
    try:
        return run()
    except (AssertionError, OSError, httpx.HTTPError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def broken(case: str, figures: Figures) -> bool:
    """Whether a promise of the module docstring is not kept."""
    if "error" in figures:
        return True
    allowed = {"200", "503"} if case == "descriptors" else {"200"}
    if case == "places":
        return bool(figures.get("problem"))
    if figures.get("ratio", 1.0) < MIN_RATIO:
        return True
    ended, grammars = figures.get("ended", {}), figures.get("grammars", {"503": 1})
    return bool(set(ended) - allowed or figures.get("kills") or set(grammars) - {"503"})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make limits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("memory", "processes", "descriptors", "cpu", "places"), help="these cases")
    args = parser.parse_args(argv)
    cases: list[tuple[str, str, Figures, Callable[[], Figures]]] = [
        ("memory", "memory", {"gib": gib, "at_once": crowd}, lambda gib=gib, crowd=crowd: memory(gib, crowd))
        for gib in SIZES
        for crowd in CROWDS
    ]
    cases += [("processes", "pids", {}, processes), ("descriptors", "", {}, descriptors), ("cpu", "cpu", {}, cpu)]
    cases += [("places", "", {"place": each.name}, lambda each=each: place(each)) for each in PLACES]
    failed = False
    for case, controller, shape, run in cases:
        if args.only not in (None, case):
            continue
        checked = not controller or can_limit(controller)
        figures = figures_of(run) if checked else {"not_checked": f"no control group of {controller} can be made here"}
        failed |= checked and broken(case, figures)
        sys.stdout.write(json.dumps({"case": case, **shape, **figures}) + "\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
