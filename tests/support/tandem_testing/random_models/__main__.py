"""Random checkpoints of every family against transformers: equal, or refused by one sentence.

    python -m tandem_testing.random_models [--family gemma4_text] [--seeds 12] [--first 0] [--paths]

Prints each fault and how many draws of each family ended how; exits 1 on a fault. A draw is named FAMILY#SEED.
"""

import argparse
import json
import sys
from collections import Counter

from tandem_testing.mutated_configs.comparison import Outcome
from tandem_testing.random_models.draws import DRAWS, draw
from tandem_testing.random_models.run import compared

FAULTS = (Outcome.DIFFERENT, Outcome.CRASHED, Outcome.NO_REFERENCE)
"""A model that transformers does not compute shows nothing, and is a fault of the draw."""


def main(arguments: argparse.Namespace) -> int:
    families = [arguments.family] if arguments.family else list(DRAWS)
    counts: dict[str, Counter[str]] = {family: Counter() for family in families}
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    faults = 0
    for name, result in compared(families, seeds, paths=arguments.paths):
        family, _, seed = name.partition("#")
        counts[family][result.outcome if result.impl is None else f"{result.outcome} ({result.impl})"] += 1
        faults += result.outcome in FAULTS
        if result.outcome is not Outcome.EQUAL:
            fields = dict(draw(family, int(seed)).fields)
            sys.stdout.write(f"{name}: {result.outcome}: {result.detail[:300]}\n  {json.dumps(fields)}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=DRAWS, help="one family instead of all")
    parser.add_argument("--seeds", type=int, default=12, help="draws of each family")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--paths", action="store_true", help="by paths of tandem verify, a minute each")
    sys.exit(main(parser.parse_args()))
