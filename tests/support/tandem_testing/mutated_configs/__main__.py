"""config.json field by field against transformers: a mutated checkpoint gives equal tokens, or is refused.

    python -m tandem_testing.mutated_configs [--model mistral] [--only 12] [--every 1] [--json FILE]

Prints each fault and how many mutations ended how; exits 1 on a fault. A mutation is named MODEL#NUMBER.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tandem_testing.mutated_configs.run import MODELS, run


def main(arguments: argparse.Namespace) -> int:
    names = [arguments.model] if arguments.model else list(MODELS)
    counts: dict[str, Counter[str]] = {}
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            counts[name] = Counter()
            for number, mutation, result in run(name, Path(folder) / name, every=arguments.every, only=arguments.only):
                label = result.outcome if result.impl is None else f"{result.outcome} ({result.impl})"
                counts[name][label] += 1
                faults += result.outcome.is_fault
                if result.outcome.is_fault or arguments.verbose:
                    sys.stdout.write(f"{name}#{number} {mutation}: {result.outcome}: {result.detail[:300]}\n")
                    sys.stdout.flush()
    sys.stdout.write(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="one checkpoint instead of all")
    parser.add_argument("--only", type=int, help="number of one mutation")
    parser.add_argument("--every", type=int, default=1, help="take every N-th mutation")
    parser.add_argument("--verbose", action="store_true", help="print every mutation")
    sys.exit(main(parser.parse_args()))
