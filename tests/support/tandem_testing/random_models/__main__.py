"""Random checkpoints of every family against transformers: equal, or refused by one sentence.

    python -m tandem_testing.random_models [--family gemma4_text] [--seeds 12] [--first 0] [--by logits]

    --by logits    logits of whole prompts, and tokens of a decode, without an engine
    --by paths     some paths of `tandem verify`, a minute each
    --by verify    all paths of `tandem verify`, some minutes each
    --by fleet     streams of two prefill and two decode workers, of which one each is killed; a minute each

Draws have a form besides, as people publish it: plain, packed (MXFP4, fp8, int4, int8), with a layer that predicts
ahead, or beside an EAGLE-3 head. Prints each fault and how many draws of each family ended how; exits 1 on a fault. A
draw is named FAMILY#SEED. `--write FOLDER` writes the draws and compares nothing.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from tandem_testing.mutated_configs.comparison import Outcome
from tandem_testing.random_models.draws import DRAWS, draw
from tandem_testing.random_models.forms import write_draw
from tandem_testing.random_models.run import Way, compared

FAULTS = (Outcome.DIFFERENT, Outcome.CRASHED, Outcome.NO_REFERENCE)
"""A model that transformers does not compute shows nothing, and is a fault of the draw."""


def main(arguments: argparse.Namespace) -> int:
    families = arguments.family or list(DRAWS)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.write is not None:
        for family in families:
            for seed in seeds:
                written = write_draw(family, seed, arguments.write / f"{family}-{seed}")
                sys.stdout.write(f"{written.checkpoint}: {written.form}\n")
        return 0
    counts: dict[str, Counter[str]] = {family: Counter() for family in families}
    faults = 0
    for name, form, result in compared(families, seeds, way=arguments.by):
        family, _, seed = name.partition("#")
        counts[family][result.outcome if result.impl is None else f"{result.outcome} ({result.impl})"] += 1
        faults += result.outcome in FAULTS
        if result.outcome is not Outcome.EQUAL or result.detail:
            sys.stdout.write(f"{name} ({form}): {result.outcome}: {result.detail[:1000]}\n")
        if result.outcome is not Outcome.EQUAL:
            sys.stdout.write(f"  {json.dumps(dict(draw(family, int(seed)).fields))}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=DRAWS, action="append", help="this family instead of all; may be repeated")
    parser.add_argument("--seeds", type=int, default=12, help="draws of each family")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--by", type=Way, choices=list(Way), default=Way.LOGITS, help="what is compared")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the draws there and compare nothing")
    sys.exit(main(parser.parse_args()))
