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
from peers.results import Results, write
from peers.session import Session, new_results
from peers.shapes import BYTES, SHAPES
from peers.targets import targets

DESCRIPTION = """\
Install the engines that people would pick instead, from package registries into ~/.cache/tandem-peers; make the same
random-weight models for all; run Tandem and each of them in turn, with the same threads, dtype, prompts, greedy
sampling and forced output lengths; print tables and every target with the ratio measured.

Tokens are compared (in float32 they should be equal), lengths always; before each figure the machine is looked at, and
beside each stands the share of it that others used. Only ratios within one run mean anything elsewhere.
"""
EXAMPLES = """\
examples (through make: BENCH_ARGS="--quick"):
  python -m peers                             everything that fits into 40 minutes, installation included
  python -m peers --quick                     q25m in float32, one round
  python -m peers --full                      q125m and batches on q500m as well, bfloat16 servers, 5 rounds: hours
  python -m peers --only single,prefill --models q500m --peers vllm,llama.cpp
  python -m peers --only interference         1P+1D against one mixed worker, no peer
  python -m peers --only startup --json       the last line is one JSON object
  python -m peers --docs                      write the tables into docs/benchmarks.md
  python -m peers --install-only
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
    choice.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="of each engine (all)")
    made.add_argument(
        "--home", type=Path, default=default_home(), metavar="DIR", help="peers, models, logs (%(default)s)"
    )
    made.add_argument("--out", type=Path, default=ROOT / "results" / "peers.json", metavar="FILE", help="results")
    made.add_argument("--docs", action="store_true", help="write the tables into docs/benchmarks.md, too")
    made.add_argument("--json", action="store_true", help="the last line is one JSON object with all targets")
    made.add_argument("--install-only", action="store_true", help="install peers, make models, measure nothing")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    plan = make_plan(options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if left := end_marked(home=options.home):
        CONSOLE.print(f"ended {len(left)} processes that an earlier run had left behind")
    try:
        missing = prepare(plan, options.home)
        if options.install_only:
            return 0
        session = Session(plan=plan, home=options.home, results=new_results(plan, missing))
        try:
            session.run()
        finally:
            write(session.results, options.out)
    except (PeerError, NotInstalledError) as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    finally:
        end_marked([own_mark()], home=options.home)
    show(session.results, options)
    return 0


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
