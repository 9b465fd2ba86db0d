"""`make pairs`: every pair of values of request fields, of engine options, and of flags of fleets.

    fields     each row is asked of one worker that does both, whole, streamed and in a crowd of all rows, and of a
               prefill and a decode worker: equal text, token ids, finish reasons, usage and logprobs
    options    each row is an `LLM` with these options: the tokens of the plain one
    rounded    the same in bfloat16 and with KV in float8: logprobs within a bound
    fleets     each row is a `tandem up` with these flags, whose processes are killed: the answers of one worker

Prints a table and, as its last line, a JSON object. Ends with 1 if an answer differs.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem_testing.pairs.asking import Outcome, ask_refused, ask_rows, asking
from tandem_testing.pairs.fields import ROUTES
from tandem_testing.pairs.fleets import compare_fleets, fleet_rows
from tandem_testing.pairs.options import compare_options, option_rows
from tandem_testing.pairs.other_apis import MESSAGES, RESPONSES
from tandem_testing.pairs.rounded import Judge, compare_rounded, rounded_rows
from tandem_testing.system import System

FLAGS = ("--threads", "1", "--kv-cache-gib", "0.1", "--dtype", "float32", "--chunked-prefill-size", "256")
BOTH = ("--prefill", "0", "--decode", "0", "--both", "1")
TWO = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "4")
LINE = "{:<24} {:>5} {:>7} {:>7} {:>10}"
Figures = dict[str, Any]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_problems(outcome: Outcome) -> None:
    say(f"  {json.dumps(dict(outcome.row))}")
    for problem in outcome.problems:
        say(f"    {problem}")


def report(array: str, seed: int, outcomes: Sequence[Outcome], *, refused: int = 0) -> Figures:
    """Prints a line, and what differs."""
    differing = [outcome for outcome in outcomes if outcome.problems]
    say(LINE.format(array, seed, len(outcomes) - refused, refused, len(differing)))
    for outcome in differing:
        say_problems(outcome)
    return {
        "array": array,
        "seed": seed,
        "rows": len(outcomes) - refused,
        "refused_pairs": refused,
        "differing": [{"row": dict(outcome.row), "problems": outcome.problems} for outcome in differing],
    }


async def ask_fields(one: System, other: System, seed: int) -> list[Figures]:
    figures = []
    async with asking(one.url) as here, asking(other.url) as there:
        for route in (*ROUTES, RESPONSES, MESSAGES):
            refused = await ask_refused(route, here, there)
            asked = await ask_rows(route, route.rows(seed), here, there)
            figures.append(report(route.path, seed, [*refused, *asked], refused=len(refused)))
    return figures


def check_fields(args: argparse.Namespace, folder: Path) -> list[Figures]:
    systems: list[System] = []
    try:
        # The first compiles what the second finds.
        systems.append(System.start(folder / "both", *BOTH, *FLAGS))
        systems.append(System.start(folder / "two", *TWO, *FLAGS))
        one, other = systems
        return asyncio.run(ask_fields(one, other, args.seed))
    finally:
        for system in systems:
            system.close()


def check_options(args: argparse.Namespace, folder: Path) -> list[Figures]:
    return [report("options", args.seed, compare_options(option_rows(args.seed), folder))]


def check_rounded(args: argparse.Namespace, folder: Path) -> list[Figures]:
    own = folder / "rounded"
    own.mkdir()
    return [report("rounded", args.seed, compare_rounded(rounded_rows(args.seed), own, Judge.measured(own)))]


def check_fleets(args: argparse.Namespace, folder: Path) -> list[Figures]:
    """A line for each fleet when it has ended: all of them take twenty minutes on two cores."""
    own = folder / "fleets"
    own.mkdir()
    rows, outcomes = fleet_rows(args.seed), []
    for number, outcome in enumerate(compare_fleets(rows, args.seed, own, first=args.first), args.first):
        outcomes.append(outcome)
        say(f"  fleet {number} of {len(rows)}: {'differs' if outcome.problems else 'equal'}")
        if outcome.problems:
            say_problems(outcome)
    return [report("fleets", args.seed, outcomes)]


CHECKS = {"fields": check_fields, "options": check_options, "rounded": check_rounded, "fleets": check_fleets}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make pairs", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the arrays (default: 1)")
    parser.add_argument("--only", choices=[*CHECKS], help="one of these arrays (default: all)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first fleet (default: 0)")
    args = parser.parse_args(argv)
    if args.first < 0:
        parser.error(f"--first: must be at least 0, got {args.first}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    say(LINE.format("array", "seed", "rows", "refused", "differing"))
    figures: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="tandem-pairs-") as folder:
        for name in [args.only] if args.only else CHECKS:
            figures += CHECKS[name](args, Path(folder))
    say(json.dumps(figures))
    return int(any(each["differing"] for each in figures))


if __name__ == "__main__":
    raise SystemExit(main())
