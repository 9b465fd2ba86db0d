"""`make skew`: roll a fleet from older releases to this one under load, and partly back, with every answer checked.

Until there are three releases, commits of this repository stand for them. Prints a table for each pair, a line for each
stage: requests served, those equal to the answers of the old release alone, failed; KV handed over, requests moved with
their KV, and prompts computed again, all three in choices. Then a gateway of each in front of two services, one of
which is rolled. Then a fleet of this release and of one outside its window, which refuse each other. `--only` chooses
parts of it. Ends with 1 if a request failed, an answer differs, no KV was handed over between releases of equal KV, or
a release outside the window was not refused.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from tandem_testing.chaos.runner import new_folder
from tandem_testing.skew.outside import later_release, refusals
from tandem_testing.skew.releases import COMMITS, HERE, MissingCommitError, Release, take
from tandem_testing.skew.rollout import StageResult, run_rollout
from tandem_testing.skew.shared import shared_problems

LAST = "HEAD"
"""The last commit, whose KV is that of the working tree unless a change of KV is not committed yet."""
TREES = Path.home() / ".cache" / "tandem-skew"
"""Trees of `COMMITS` stay there, with the kernels that they have compiled."""

PARTS = ("rollout", "shared", "outside")

LINE = "{:<34} {:>6} {:>6} {:>6} {:>11} {:>6} {:>10}"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def roll(old: Release, new: Release, folder: Path, *, shares_kv: bool) -> bool:
    """Whether every stage was sound."""
    say(f"\n{old.name} -> {new.name}")
    say(LINE.format("stage", "served", "equal", "failed", "handed over", "moved", "recomputed"))
    results: list[StageResult] = []
    async with aclosing(run_rollout(old, new, folder)) as stages:
        async for each in stages:
            results.append(each)
            counts = (each.served, each.equal, each.failed, each.handed_over, each.moved, each.recomputed)
            say(LINE.format(each.stage, *counts))
            for problem in each.problems:
                say(f"  {problem}")
    return all(each.sound and (each.handed_over or not shares_kv) for each in results)


async def share(old: Release, new: Release, folder: Path) -> bool:
    """Whether gateways of both served both services soundly."""
    say(f"\none gateway for two services, {old.name} and {new.name}")
    problems = await shared_problems(old, new, folder)
    say("\n".join(problems) or "both services through both gateways; all requests equal")
    return not problems


async def refuse(folder: Path, later: Release) -> bool:
    """Whether each side refused the other."""
    say(f"\n{HERE.name} and a release outside its window")
    problems = await refusals(folder, later)
    say("\n".join(problems) or "refused by name on both sides; all requests equal")
    return not problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make skew", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--old", nargs="*", default=[*COMMITS, LAST], metavar="COMMIT", help="releases to start from; none: no rollout"
    )
    parser.add_argument("--new", metavar="COMMIT", help="release to roll to (default: the working tree)")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs of all processes in this folder")
    args = parser.parse_args(argv)
    sound = True
    with tempfile.TemporaryDirectory(prefix="tandem-skew-") as temporary:
        logs = (args.keep or Path(temporary) / "logs").absolute()
        try:
            new = take(args.new, Path(temporary)) if args.new else HERE
            for commit in args.old:
                old = take(commit, TREES if commit in COMMITS else Path(temporary))
                if "rollout" in args.only:
                    sound &= asyncio.run(roll(old, new, new_folder(logs / old.name), shares_kv=commit == LAST))
                if "shared" in args.only:
                    sound &= asyncio.run(share(old, new, new_folder(logs / f"{old.name}-shared")))
        except MissingCommitError as error:
            parser.error(str(error))
        if "outside" in args.only:
            sound &= asyncio.run(refuse(new_folder(logs / "outside"), later_release(Path(temporary))))
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())
