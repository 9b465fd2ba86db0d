"""Adapters that PEFT itself makes from random configs, and what the engine does with them: equal outputs, or a refusal.

    python -m tandem_testing.lora_draws [--family qwen3] [--draws 200] [--seed 7] [--engine]

Every field of `LoraConfig` has values here that are not its default. A draw has a few of them at a time, with random
target modules, ranks, alphas and patterns, in a random dtype. A folder may be refused only for a field, a module, a
dtype or a model that is not supported, and the sentence names it. A config that PEFT refuses, or cannot save, is drawn
again: there is nothing to compare.

Prints one JSON line per family. Exit status 1 on the first wrong output or refusal, with the draw.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tandem_testing.exactness import one_grammar_process
from tandem_testing.lora_draws.draws import ENGINE_FAMILIES, FAMILIES, UNSUPPORTED, LoraDraws, NothingToCompareError


def main(arguments: argparse.Namespace) -> int:
    families = [arguments.family] if arguments.family else [*FAMILIES, *UNSUPPORTED]
    with one_grammar_process():
        for family in families:
            with tempfile.TemporaryDirectory() as folder:
                engine = arguments.engine and family in ENGINE_FAMILIES
                draws = LoraDraws(family=family, folder=Path(folder), engine=engine)
                try:
                    counts = compared(draws, arguments.draws, random.Random(f"{arguments.seed} {family}"))
                except AssertionError as error:
                    sys.stdout.write(f"{family}: {error}\n")
                    return 1
            sys.stdout.write(f"{json.dumps({'family': family, 'engine': engine, **counts})}\n")
            sys.stdout.flush()
    return 0


def compared(draws: LoraDraws, wanted: int, dice: random.Random) -> dict[str, int]:
    """How many of `wanted` draws were equal and refused, and how many PEFT did not make."""
    counts = Counter({"equal": 0, "refused": 0, "not_made_by_peft": 0})
    while counts["equal"] + counts["refused"] < wanted:
        try:
            outcome = draws.draw(dice)
        except NothingToCompareError:
            counts["not_made_by_peft"] += 1
        else:
            counts["refused" if outcome.refused else "equal"] += 1
    return dict(counts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=[*FAMILIES, *UNSUPPORTED], help="of the base (default: all)")
    parser.add_argument(
        "--draws", type=int, default=100, help="adapters of each family that are compared or refused (default 100)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    parser.add_argument("--engine", action="store_true", help="engines of some families also generate tokens")
    raise SystemExit(main(parser.parse_args()))
