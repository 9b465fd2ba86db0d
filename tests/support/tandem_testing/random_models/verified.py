"""All paths of `tandem verify` on one checkpoint, by the command that people run."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tandem_lab.verify.command import DIFFERENT, NOT_EXERCISED, VerifyReport
from tandem_testing.mutated_configs.comparison import Comparison, Outcome

REJECTED = 2
"""Exit status of a command that was given what it does not do."""


def verified(checkpoint: Path) -> Comparison:
    """The first difference counts. A path that did not do what it is named after is reported next to equal outputs."""
    argv = [sys.executable, "-m", "tandem_lab", "verify", "--model", str(checkpoint), "--json"]
    environment = {**os.environ, "TANDEM_LOG_LEVEL": "critical", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in (0, DIFFERENT, NOT_EXERCISED) or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        outcome = Outcome.REFUSED if done.returncode == REJECTED else Outcome.CRASHED
        return Comparison(outcome=outcome, detail=last)
    report = msgspec.json.decode(done.stdout, type=VerifyReport)
    different = next((path for path in report.paths if not path.equal), None)
    if different is not None:
        return Comparison(
            outcome=Outcome.DIFFERENT, detail=f"{different.path}: {different.difference}", impl=report.impl
        )
    idle = [f"{path.path} ({path.not_exercised})" for path in report.paths if path.not_exercised is not None]
    detail = f"{len(report.paths)} paths equal, {len(report.left_out)} left out"
    detail += f"; not exercised: {'; '.join(idle)}" if idle else ""
    return Comparison(outcome=Outcome.EQUAL, detail=detail, impl=report.impl)
