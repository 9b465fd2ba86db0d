"""Kernels and engine on a GPU, as fractions of what it was measured to do in the same run.

    make gpu                                           tests on the device, then everything here
    PYTHONPATH=benchmarks python -m gpu                everything: eight minutes at most, the larger model first
    PYTHONPATH=benchmarks python -m gpu --only kernels --model 0.6B
    PYTHONPATH=benchmarks python -m gpu --json         the last line is one JSON object
    PYTHONPATH=benchmarks TRITON_INTERPRET=1 python -m gpu --dry-run
                                                       the same programs on a CPU, tiny: figures mean nothing

Ceilings come first: bandwidth of a copy, rate of a bf16 product of matrices. Then, at the sizes of Llama-3.1-8B and of
Qwen3-0.6B, each kernel with what torch has for the same work (attention: SDPA and FlexAttention); the engine with
random weights; a handoff between two processes on this device; and transformers on the same mixed load. What no longer
fits into the time is named, and so is what failed: then the exit status is 1.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

SECTIONS = ("kernels", "engine", "handoff")
MODELS = ("8B", "0.6B")
NO_DEVICE = "no CUDA device: nothing was measured (--dry-run tries the programs on a CPU)"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", type=_some_of(SECTIONS), default=SECTIONS, metavar="S,S", help=_all_of(SECTIONS))
    made.add_argument("--model", type=_some_of(MODELS), default=MODELS, metavar="M,M", help=_all_of(MODELS))
    made.add_argument("--minutes", type=float, default=8.0, help="the run ends by then (default 8)")
    made.add_argument("--json", action="store_true", help="end with one JSON line")
    made.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny tensors: figures mean nothing")
    return made


def _some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        wanted = tuple(part for part in text.split(",") if part)
        if not wanted or not {*wanted} <= {*known}:
            raise argparse.ArgumentTypeError(f"must name some of {', '.join(known)}, got {text!r}")
        return wanted

    return parse


def _all_of(known: Sequence[str]) -> str:
    return f"of {', '.join(known)}, in this order (default all)"


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
