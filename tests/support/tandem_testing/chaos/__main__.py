"""`make chaos`: break a real system in every way of the fault table and see what its clients notice."""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.config.flags import host_address
from tandem_testing.chaos.catalogue import PROMISES, promise
from tandem_testing.chaos.report import json_line, print_outcome, stall_table, summary_line, summary_table
from tandem_testing.chaos.runner import Outcome, Progress, Runner
from tandem_testing.chaos.scenario import Result, Scale, Scenario
from tandem_testing.chaos.suite import FAMILIES, of_family, scenarios
from tandem_testing.inherited_signals import give_children_default_signals
from tandem_testing.redis_server import REDIS_SERVER

EPILOG = """\
examples:
  make chaos                                       everything; on two cores twenty minutes
  make chaos CHAOS_ARGS=--quick                    what `make test` runs, a few minutes
  make chaos CHAOS_ARGS="--only 1,2,16"            three scenarios
  make chaos CHAOS_ARGS="--only 56 --minutes 60"   an hour of random faults
  make chaos CHAOS_ARGS=--list                     what there is, and what is absent
  make chaos CHAOS_ARGS=--json                     the last line is one JSON object

Each scenario starts real processes (gateways, prefill and decode workers with NIXL, Redis), sends streams, breaks
something, and compares every stream token by token with one that nothing happened to. Afterwards every KV page
must be free. Recovery is the longest silence that any client met. docs/chaos.md explains the table.

Ctrl-C and SIGTERM end everything that was started here, then this.

Exit status: 0 every promise that was tested is kept · 1 one is broken · 2 wrong usage · 3 it could not run, or not to
its end
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make chaos", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show all scenarios and end")
    parser.add_argument(
        "--only", type=_numbers, metavar="N,N…", help="run these numbers, or families such as adapters, in this order"
    )
    parser.add_argument("--quick", action="store_true", help="run those that matter most and take seconds")
    parser.add_argument("--json", action="store_true", help="end with one JSON line of all counts")
    parser.add_argument("--streams", type=_positive, default=Scale().streams, metavar="N", help="streams at once")
    parser.add_argument("--tokens", type=_positive, default=Scale().tokens, metavar="N", help="longest answer")
    parser.add_argument(
        "--exceptions",
        type=_positive,
        default=Scale().exceptions,
        metavar="N",
        help="functions that raise in scenarios 72 and 73, each (default %(default)s)",
    )
    parser.add_argument(
        "--minutes", type=float, default=1.0, metavar="M", help="length of scenario 56, random faults (default 1)"
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep logs here (default: a temporary folder)")
    parser.add_argument(
        "--host", type=host_address, default=LOOPBACK, help="loopback address of all processes; ::1 for IPv6"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint with the bundled tokenizer, as of tools/random_model.py (default: the bundled model)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the variations that are drawn where all take too long"
    )
    parser.add_argument("--repeat", type=_positive, default=1, metavar="N", help="run the chosen scenarios N times")
    return parser


def _numbers(text: str) -> list[int]:
    known = {line.number for line in PROMISES}
    numbers = [
        number
        for part in text.split(",")
        if part
        for number in ([int(part)] if part.isdecimal() else of_family(part) or _no_family(part))
    ]
    for number in numbers:
        if number not in known:
            raise argparse.ArgumentTypeError(f"there is no scenario {number}; --list shows all")
    return numbers


def _no_family(name: str) -> list[int]:
    names = ", ".join(sorted(each.__name__.rpartition(".")[2] for each in FAMILIES))
    raise argparse.ArgumentTypeError(f"there is no family {name!r}: {names}")


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def chosen(args: argparse.Namespace, available: dict[int, Scenario]) -> list[int]:
    """Numbers to run or to report as absent. Scenario 0 comes first, because it is the yardstick."""
    if args.only:
        numbers = args.only
    elif args.quick:
        numbers = [number for number, each in available.items() if each.quick]
    else:
        numbers = [line.number for line in PROMISES]
    return numbers * args.repeat


def print_list(console: Console, available: dict[int, Scenario]) -> None:
    for line in PROMISES:
        reason = why_absent(available.get(line.number))
        state = f"[yellow]absent[/] ({reason})" if reason else "quick" if available[line.number].quick else ""
        bound = "" if line.bound_s is None else f"{line.bound_s:g} s"
        console.print(
            f"{line.number:>3}  {line.title:42} {bound:>5}  {line.promise}  {state}", highlight=False, soft_wrap=True
        )


async def run(args: argparse.Namespace, numbers: Sequence[int], console: Console, folder: Path) -> list[Outcome]:
    available = scenarios()
    outcomes: list[Outcome] = []
    scale = Scale(
        streams=args.streams,
        tokens=args.tokens,
        random_faults_s=60 * args.minutes,
        exceptions=args.exceptions,
    )
    wanted = []
    for number in numbers:
        if not (reason := why_absent(available.get(number))):
            wanted.append(available[number])
            continue
        outcomes.append(_absent(number, reason))
        print_outcome(console, outcomes[-1])
    if not args.only:
        wanted = by_shape(wanted)
    with console.status("starting") as status:
        async with Runner(
            folder=folder,
            scale=scale,
            host=args.host,
            checkpoint=args.model,
            seed=args.seed,
            progress=_progress(status, wanted, outcomes),
        ) as runner:
            for scenario in wanted:
                outcomes.append(await runner.run(scenario))
                print_outcome(console, outcomes[-1])
    return outcomes


async def until_signalled(work: "Coroutine[Any, Any, list[Outcome]]") -> list[Outcome] | None:
    """None when a signal came first: then `work` has put away all that it had started."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A second signal must not end what the first one has begun.
        loop.add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        return None


def by_shape(wanted: Sequence[Scenario]) -> list[Scenario]:
    """Those that share a fleet one after the other: starting one takes as long as a scenario."""
    shapes = list(dict.fromkeys(scenario.shape for scenario in wanted))
    return sorted(wanted, key=lambda scenario: shapes.index(scenario.shape))


def _progress(status: Status, wanted: Sequence[Scenario], outcomes: Sequence[Outcome]) -> Progress:
    def show(text: str) -> None:
        done = sum(outcome.result is not Result.ABSENT for outcome in outcomes)
        if done < len(wanted):
            line = wanted[done].promise
            status.update(f"{done + 1}/{len(wanted)}  {line.number} {line.title}: {text}")

    return show


def why_absent(scenario: Scenario | None) -> str:
    """Why this machine tests a promise not; "" when it does."""
    return "no test yet" if scenario is None else scenario.why_not()


def _absent(number: int, reason: str) -> Outcome:
    return Outcome(promise=promise(number), result=Result.ABSENT, notes=(reason,))


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    give_children_default_signals()
    console = Console(stderr=True) if args.json else Console()
    available = scenarios()
    if args.list:
        print_list(console, available)
        return 0
    if REDIS_SERVER is None:
        console.print("chaos: redis-server is not installed: run 'apt-get install redis-server'")
        return 3
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-", ignore_cleanup_errors=True) as temporary:
        folder = args.run_dir or Path(temporary)
        outcomes = asyncio.run(until_signalled(run(args, chosen(args, available), console, folder)))
    if outcomes is None:
        console.print("chaos: ended before its time; nothing was left running")
        return 3
    outcomes.sort(key=lambda outcome: outcome.promise.number)
    console.print(summary_table(outcomes))
    if (stalls := stall_table(outcomes)) is not None:
        console.print(stalls)
    console.print(summary_line(outcomes), markup=False, highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(json_line(outcomes) + "\n")
    return int(any(outcome.result is Result.BROKEN for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
