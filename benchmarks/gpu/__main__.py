"""Kernels and engine on a GPU, as fractions of what it was measured to do in the same run.

    make gpu                                           tests on the device, then everything here
    PYTHONPATH=benchmarks python -m gpu                everything: eight minutes at most
    PYTHONPATH=benchmarks python -m gpu --only kernels --model 0.6B
    PYTHONPATH=benchmarks python -m gpu --json         the last line is one JSON object
    PYTHONPATH=benchmarks TRITON_INTERPRET=1 python -m gpu --dry-run
                                                       the same programs on a CPU, tiny: figures mean nothing

Ceilings come first: bandwidth of a copy, rate of a bf16 product of matrices. Then each kernel at sizes of a real model,
with what torch has for the same work; the engine with random weights; a handoff between two processes on this device;
and transformers on the same mixed load. What no longer fits into the time is named, and so is what failed: then the
exit status is 1.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

SECTIONS = ("kernels", "engine", "handoff")
NO_DEVICE = "no CUDA device: nothing was measured (--dry-run tries the programs on a CPU)"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", type=_sections, default=SECTIONS, metavar="S,S", help=f"of {', '.join(SECTIONS)}")
    made.add_argument("--model", choices=("0.6B", "8B"), default="8B", help="shape of the model (default 8B)")
    made.add_argument("--minutes", type=float, default=8.0, help="the run ends by then (default 8)")
    made.add_argument("--json", action="store_true", help="end with one JSON line")
    made.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny tensors: figures mean nothing")
    return made


def _sections(text: str) -> tuple[str, ...]:
    wanted = tuple(part for part in text.split(",") if part)
    unknown = [part for part in wanted if part not in SECTIONS]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"must name some of {', '.join(SECTIONS)}, got {text!r}")
    return wanted


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    # Kernels need Triton, which only machines with a device are sure to have.
    from gpu.session import run

    report = run(args)
    print(report.table())
    if args.json:
        print(report.json())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
