"""Kernels and engine on a GPU, as fractions of what it was measured to do in the same run.

    make gpu ARGS="--part probe,kernels --out out"     on the GPU machine; called again, it does what is left
    python -m gpu --out out                            the same, with tools/gpu.sh's PYTHONPATH
    python -m gpu --dry-run --out out                  the same programs on a CPU, tiny: figures mean nothing
    python -m gpu report out [--json]                  the table of a run

Parts, in the order of their worth: probe, engine-latents, engine-states, kernels, engine-8b, engine-30b, engine-0.6b,
handoff, tests-exact, tests-rest, sanitize, trace, counters. Each is a process with a limit. A folder has state.json,
lines.jsonl (a line for each figure, test and ceiling, as soon as it is known), log.txt and what `trace` and `counters`
leave: at most 8 files of 16 MiB.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu.control.folder import FolderError, check
from gpu.control.parts import PARTS, Part, named
from gpu.control.report import Report
from gpu.control.runner import Runner

NO_DEVICE = "no CUDA device: nothing was measured (--dry-run tries the programs on a CPU)"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--part", type=_parts, default=PARTS, metavar="P,P", help="these alone (default all)")
    made.add_argument("--minutes", type=float, default=9.0, help="the run ends by then (default 9)")
    made.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder of the run (default results/gpu)")
    made.add_argument("--json", action="store_true", help="end with one JSON line")
    made.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny tensors: figures mean nothing")
    return made


def _parts(text: str) -> tuple[Part, ...]:
    try:
        return named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["report"]:
        return report(words[1:])
    args = parser().parse_args(words)
    if not args.dry_run and not _device():
        print(NO_DEVICE)
        return 0
    # As Ctrl-C: the part that runs ends with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner = Runner(out=args.out, ends_at=time.monotonic() + args.minutes * 60, dry_run=args.dry_run)
    runner.run(args.part)
    return _shown(args.out, as_json=args.json)


def report(argv: Sequence[str]) -> int:
    """The table of a folder."""
    made = argparse.ArgumentParser(prog="python -m gpu report", description="The table of a run.")
    made.add_argument("out", type=Path)
    made.add_argument("--json", action="store_true", help="end with one JSON line")
    args = made.parse_args(argv)
    return _shown(args.out, as_json=args.json)


def _shown(folder: Path, *, as_json: bool) -> int:
    """Prints the table; 1 if anything failed or the folder cannot be carried."""
    found = Report(folder)
    print(found.table())
    if as_json:
        print(found.json())
    try:
        check(folder)
    except FolderError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    return 1 if found.failures else 0


def _device() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
