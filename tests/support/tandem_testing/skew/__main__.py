"""`make skew`: roll a fleet from older releases to this one under load, and back, with every answer checked.

Until there are three releases, commits of this repository stand for them. For each, prints a JSON object per stage:
requests served, equal to those of the old release alone, failed; KV handed over, requests moved with their KV, and
requests computed again. Ends with 1 if a request failed, an answer differs, or a stage handed no KV over.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from tandem_testing.skew.releases import HERE, MissingCommitError, Release, take
from tandem_testing.skew.rollout import run_rollout

COMMITS = ("9d9c504f", "126fbc70")
"""Stand for the two releases before this one."""


async def roll(old: Release, new: Release, folder: Path) -> bool:
    """Whether every stage was sound."""
    sound = True
    async with aclosing(run_rollout(old, new, folder)) as stages:
        async for result in stages:
            sound &= result.sound
            sys.stdout.write(json.dumps({"old": old.name, "new": new.name, **result.row()}) + "\n")
            sys.stdout.flush()
    return sound


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make skew", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", nargs="+", default=list(COMMITS), metavar="COMMIT", help="releases to start from")
    parser.add_argument("--new", metavar="COMMIT", help="release to roll to (default: the working tree)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs of all processes in this folder")
    args = parser.parse_args(argv)
    sound = True
    with tempfile.TemporaryDirectory(prefix="tandem-skew-") as temporary:
        trees, logs = Path(temporary) / "releases", args.keep or Path(temporary) / "logs"
        try:
            new = take(args.new, trees) if args.new else HERE
            for commit in args.old:
                old = take(commit, trees)
                folder = logs.absolute() / old.name
                folder.mkdir(parents=True, exist_ok=True)
                sound &= asyncio.run(roll(old, new, folder))
        except MissingCommitError as error:
            parser.error(str(error))
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())
