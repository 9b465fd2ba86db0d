"""`make bench-peers`, or `PYTHONPATH=benchmarks python -m peers`."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from peers.checkpoints import make_checkpoints, make_gguf
from peers.docs import write_docs
from peers.engines.base import ROOT
from peers.home import default_home
from peers.install import peers
from peers.install.steps import CONSOLE, NotInstalledError
from peers.plan import PARTS, PEERS, Plan, make_plan
from peers.processes import PeerError, end_marked, own_mark
from peers.report import markdown, plot
from peers.results import Results, complete_part, read
from peers.session import Session, commit, new_results
from peers.shapes import BYTES, SHAPES
from peers.stages import stages_of
from peers.targets import targets
from peers.time_limit import GRACE_S, TimeLimit

DESCRIPTION = """\
Install the engines that people would pick instead, from package registries into ~/.cache/tandem-peers; make the same
random-weight models for all; run Tandem and each of them in turn, with the same threads, dtype, prompts, greedy
sampling and forced output lengths; print tables and every target with the ratio measured.

Tokens are compared (in float32 they should be equal), lengths always; before each figure the machine is looked at, and
beside each stands the share of it that others used. Only ratios within one run mean anything elsewhere.

The run ends in time (--minutes): each of its stages has a share of what is left, and rounds that do not fit are left
out and noted. Results are written as they come.
"""
EXAMPLES = """\
examples (through make: BENCH_ARGS="--quick"):
  python -m peers                             every target, within 37 minutes, installation included
  python -m peers --quick                     q25m in float32, one round
  python -m peers --full                      q125m and batches on q500m as well, bfloat16 servers, 5 rounds: hours
  python -m peers --only single,prefill --models q500m --peers vllm,llama.cpp
  python -m peers --only interference         1P+1D against one mixed worker, no peer
  python -m peers --only startup --json       the last line is one JSON object
  python -m peers --docs                      write the tables into docs/benchmarks.md
  python -m peers --install-only
  python -m peers --resume                    continue a run that was interrupted or out of time
"""


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """argparse type: names of `known` with commas between them; "none" is none of them."""

    def parse(text: str) -> list[str]:
        names = [] if text == "none" else text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m peers",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    size = made.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="q25m in float32, one round: minutes once peers are there")
    size.add_argument("--full", action="store_true", help="all models, dtypes and workloads, five rounds: hours")
    choice = made.add_argument_group("what is measured")
    choice.add_argument("--only", type=some_of(PARTS), metavar="PART,…", help=f"of {', '.join(PARTS)} (default all)")
    choice.add_argument("--models", type=some_of(tuple(SHAPES)), metavar="MODEL,…", help=f"of {', '.join(SHAPES)}")
    choice.add_argument("--dtypes", type=some_of(tuple(BYTES)), metavar="DTYPE,…", help=f"of {', '.join(BYTES)}")
    choice.add_argument("--peers", type=some_of(PEERS), metavar="PEER,…", help=f"of {', '.join(PEERS)}, or none")
    choice.add_argument("--rounds", type=int, metavar="N", help="medians of so many (default 3; 1 quick, 5 full)")
    choice.add_argument(
        "--budget", type=float, default=30.0, metavar="S", help="seconds of a workload after which an engine stops (30)"
    )
    choice.add_argument(
        "--minutes", type=float, metavar="M", help="end after so many, installation included (default 37; 600 full)"
    )
    choice.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="of each engine (all)")
    made.add_argument(
        "--home", type=Path, default=default_home(), metavar="DIR", help="peers, models, logs (%(default)s)"
    )
    made.add_argument("--out", type=Path, default=ROOT / "results" / "peers.json", metavar="FILE", help="results")
    made.add_argument("--resume", action="store_true", help="run only what the results at --out lack")
    made.add_argument("--docs", action="store_true", help="write the tables into docs/benchmarks.md, too")
    made.add_argument("--json", action="store_true", help="the last line is one JSON object with all targets")
    made.add_argument("--install-only", action="store_true", help="install peers, make models, measure nothing")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    plan, limit = make_plan(options), time_limit(options)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler)
    # Every wait has a limit; this is for the one that was forgotten.
    signal.alarm(round(limit.ends - limit.clock() + 4 * GRACE_S))
    if left := end_marked(home=options.home):
        CONSOLE.print(f"ended {len(left)} processes that an earlier run had left behind")
    try:
        results = earlier(options, plan) if options.resume else None
        missing = prepare(plan, options.home)
        if options.install_only:
            return 0
        session = Session(plan=plan, home=options.home, results=results or new_results(plan, missing), out=options.out)
    except (PeerError, NotInstalledError) as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    try:
        session.run(stages_of(plan), limit)
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        signal.alarm(0)
        end_marked([own_mark()], home=options.home)
        show(session.results, options)


def time_limit(options: argparse.Namespace) -> TimeLimit:
    """From now on."""
    minutes = options.minutes or (600.0 if options.full else 37.0)
    return TimeLimit(ends=time.monotonic() + 60 * minutes, answer_s=900.0 if options.full else 120.0)


def earlier(options: argparse.Namespace, plan: Plan) -> Results | None:
    """What an earlier run has complete; None without one. Raises `PeerError` for one of another code or machine."""
    if not options.out.is_file():
        return None
    found = read(options.out)
    here = (commit(), plan.threads)
    if (found.commit, found.threads) != here:
        raise PeerError(
            f"{options.out} is of commit {found.commit} with {found.threads} threads, not of {here[0]} with {here[1]}: "
            "leave --resume out"
        )
    return complete_part(found)


def prepare(plan: Plan, home: Path) -> dict[str, str]:
    """Install peers and make models; peers that are missing, and why. Raises `NotInstalledError` for a model."""
    began = time.monotonic()
    wanted = plan.wanted_peers
    missing = peers.install(sorted(wanted), home)
    make_checkpoints(home, plan.models)
    if "llama.cpp" in wanted and "llama.cpp" not in missing:
        pairs = {(comparison.model, comparison.dtype) for comparison in plan.comparisons}
        for model, dtype in sorted(pairs | {(plan.models[0], dtype) for dtype in plan.served_dtypes}):
            make_gguf(home, model, dtype)
    CONSOLE.print(f"peers and models are there after {time.monotonic() - began:.0f} s")
    return missing


def show(results: Results, options: argparse.Namespace) -> None:
    print(markdown(results))
    plot(results, options.out.with_suffix(".svg"))
    if options.docs:
        write_docs(results)
    if options.json:
        print(msgspec.json.encode(summary(results)).decode())


def summary(results: Results) -> dict[str, Any]:
    """The JSON object of the last line."""
    found = [{**msgspec.to_builtins(target), "met": target.met} for target in targets(results)]
    return {"targets": found, **msgspec.to_builtins(results)}


if __name__ == "__main__":
    sys.exit(main())
