"""Attention twice at the sizes that matter, for `counters`: the first launch compiles, the second is counted."""

import argparse

import torch

from gpu.attention_cases import AttentionCases
from gpu.cases import TINY, Sizes
from gpu.shapes import SHAPES
from tandem_testing.triton_kernels import scalars

CASES = 3
"""So many: decodes with both page sizes, and a prompt."""


@torch.inference_mode()
def main() -> None:
    made = argparse.ArgumentParser(prog="python -m gpu.parts.counted", description=__doc__)
    made.add_argument("--dry-run", action="store_true")
    tiny = made.parse_args().dry_run
    if tiny:
        scalars.install()
    maker = AttentionCases(
        shape=SHAPES["tiny" if tiny else "8B"],
        sizes=TINY if tiny else Sizes(),
        device=torch.device("cpu" if tiny else "cuda:0"),
        dtype=torch.float32 if tiny else torch.bfloat16,
    )
    for number, make in enumerate(maker.cases()):
        if number == CASES:
            break
        case = make()
        print(case.name, flush=True)
        for _ in range(2):
            case.run()
        if not tiny:
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
