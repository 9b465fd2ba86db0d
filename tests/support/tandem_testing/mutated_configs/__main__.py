"""config.json field by field against transformers: a mutated checkpoint gives equal tokens, or is refused.

    python -m tandem_testing.mutated_configs [--model mistral] [--only 12] [--every 1] [--json FILE]
    python -m tandem_testing.mutated_configs --seed 3 [--count 20]

With --seed, pairs of mutations that the seed draws. Prints each fault and how many mutations ended how; exits 1 on a
fault, and 2 if there was nothing to compare. A mutation is named MODEL#NUMBER, of a seed or of the list.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem_testing.mutated_configs.run import MODELS, run

PAIRS = 20


def main(arguments: argparse.Namespace) -> int:
    counts: dict[str, Counter[str]] = {}
    faults: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.model or MODELS:
            counts[name] = Counter()
            chosen = {key: getattr(arguments, key) for key in ("every", "only", "seed", "count")}
            for number, mutation, result in run(name, Path(folder) / name, **chosen):
                label = result.outcome if result.impl is None else f"{result.outcome} ({result.impl})"
                counts[name][label] += 1
                if result.outcome.is_fault:
                    outcome = {"outcome": result.outcome, "detail": result.detail}
                    faults.append({"model": name, "number": number, "changes": dict(mutation.changes), **outcome})
                if result.outcome.is_fault or arguments.verbose:
                    say(f"{name}#{number} {mutation}: {result.outcome}: {result.detail[:300]}")
    say(json.dumps(counts, indent=1, sort_keys=True))
    if not any(counter.total() for counter in counts.values()):
        say(f"no checkpoint has a mutation {arguments.only}")
        return 2
    if arguments.json is not None:
        document = {"seed": arguments.seed, "counts": counts, "faults": faults}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 1 if faults else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="a checkpoint instead of all; repeatable")
    parser.add_argument("--only", type=int, metavar="N", help="number of one mutation")
    parser.add_argument("--every", type=_positive, default=1, metavar="N", help="take every N-th mutation")
    parser.add_argument("--seed", type=int, metavar="N", help="draw pairs of mutations")
    parser.add_argument("--count", type=_positive, metavar="N", help=f"pairs of each checkpoint (default: {PAIRS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and faults to it")
    parser.add_argument("--verbose", action="store_true", help="print every mutation")
    arguments = parser.parse_args(argv)
    if arguments.count is not None and arguments.seed is None:
        parser.error("--count needs --seed: the list of mutations has no pairs to count")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: make the folder {arguments.json.parent} first")
    arguments.count = arguments.count or PAIRS
    return arguments


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main(parsed()))
