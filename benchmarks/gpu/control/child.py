"""The process of one part: `python -m gpu.control.child PART --out FOLDER --seconds S [--dry-run]`.

Its exit status is the outcome: 0 all done, the others below, anything else a crash.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu.control.lines import LineFile, Machine, Missing
from gpu.control.parts import PARTS, REHEARSAL, Part

LEFT, SKIPPED, LOST = 3, 4, 75
"""Cases are left for lack of time; the machine lacks something; the device failed in a case."""


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m gpu.control.child", description=__doc__)
    made.add_argument("part", choices=[part.name for part in PARTS])
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--seconds", type=float, required=True)
    made.add_argument("--dry-run", action="store_true")
    args = made.parse_args(argv)
    ends_at = time.monotonic() + args.seconds
    (part,) = (part for part in PARTS if part.name == args.part)
    why = lacking(part, tiny=args.dry_run)
    if why:
        LineFile(args.out).write(Missing(part=part.name, case=part.name, why=why, failed=False))
        return SKIPPED
    return run(part, args.out, ends_at, tiny=args.dry_run)


def lacking(part: Part, *, tiny: bool) -> str | None:
    """What keeps a part from running here."""
    reasons = [need() for need in (*part.needs, *(() if tiny else part.needs_device))]
    return "; ".join(reason for reason in reasons if reason) or None


def run(part: Part, folder: Path, ends_at: float, *, tiny: bool) -> int:
    """All its cases that are not done, as far as there is time."""
    import torch

    from gpu.control import machine
    from gpu.control.bench import Bench
    from gpu.control.record import DeviceLostError, Record, ended_at

    if tiny:
        from tandem_testing.triton_kernels import bfloat16, scalars

        bfloat16.install()
        scalars.install()
    device, factor = torch.device("cpu" if tiny else "cuda:0"), REHEARSAL if tiny else 1.0
    record = Record(
        part=part.name, lines=LineFile(folder), ends_at=ends_at, limit=lambda seconds: ended_at(factor * seconds)
    )
    record.write(Machine(part=part.name, facts=machine.facts(device)))
    bench = Bench(record=record, device=device, tiny=tiny, folder=folder)
    module, _, argument = part.run.partition(":")
    try:
        importlib.import_module(module).run(bench, *([argument] if argument else []))
        bench.close()
    except DeviceLostError as error:
        sys.stderr.write(f"the device failed in {error}: the part is restarted after it\n")
        return LOST
    return LEFT if record.postponed else 0


if __name__ == "__main__":
    sys.exit(main())
