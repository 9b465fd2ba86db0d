"""KV of one prompt from a prefill to a decode engine on the same device, by NIXL.

    benchmarks/nixl_write.py         pages alone: against the device's copy bandwidth
    benchmarks/exposed_transfer.py   two engines: what a handoff costs behind the prefill that it overlaps with

Both run as programs of their own: an agent of NIXL and its memory end with their process.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu.budget import Budget
from gpu.ceilings import Ceilings
from gpu.figures import Figure, Report
from gpu.shapes import Shape

TOKENS = 4096
SCRIPTS = Path(__file__).parent.parent
LIMIT_S = 90.0


def measure_handoff(report: Report, shape: Shape, ceilings: Ceilings, budget: Budget, device: str) -> None:
    if budget.allows(f"KV by NIXL, {shape.name}", needs_s=45):
        _pages(report, shape, ceilings, budget, device)
    if budget.allows(f"handoff between two engines, {shape.name}", needs_s=60):
        _engines(report, shape, budget, device)


def _pages(report: Report, shape: Shape, ceilings: Ceilings, budget: Budget, device: str) -> None:
    found = _run(
        report,
        budget,
        "nixl_write.py",
        *("--device", device, "--dtype", "bfloat16", "--page-tokens", "16,64", "--prompts", str(TOKENS)),
        *("--layers", str(shape.layers), "--heads", str(shape.kv_heads), "--head-dim", str(shape.head_dim)),
    )
    for row in [] if found is None else found["transfers"]:
        # A copy reads and writes each byte; so does a transfer.
        moved = 2 * row["mib"] * 2**20 / (row["sampled_ms"] / 1e3)
        report.add(
            Figure(
                name=f"handoff of {TOKENS} tokens, pages of {row['page_tokens']} ({shape.name})",
                ratio=moved / ceilings.copy_bytes_per_s,
                of="copy bandwidth",
                target=0.7,
                facts={"ms": row["sampled_ms"], "raw ms": row["raw_ms"]},
            )
        )


def _engines(report: Report, shape: Shape, budget: Budget, device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = _run(
            report,
            budget,
            "exposed_transfer.py",
            *("--model", str(shape.write(Path(folder))), "--load-format", "dummy", "--device", device),
            *("--dtype", "bfloat16", "--lens", str(TOKENS), "--chunk", str(TOKENS), "--layers", ""),
        )
    for row in [] if found is None else found["results"]:
        report.add(
            Figure(
                name=f"exposed handoff of {TOKENS} tokens, {row['mode']} ({shape.name})",
                ratio=row["exposed_ms"],
                of="milliseconds",
                target=3.0 if row["mode"] == "auto" else None,
                at_most=True,
                facts={"prefill ms": row["prefill_ms"]},
            )
        )


def _run(report: Report, budget: Budget, script: str, *arguments: str) -> dict[str, Any] | None:
    """What a script printed last, as JSON; None, and a line in the report, when it failed."""
    limit_s = min(LIMIT_S, max(1.0, budget.left_s))
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        report.missing.append(f"{script}: no answer within {limit_s:.0f} s")
    except subprocess.CalledProcessError as error:
        said = [line for line in str(error.stderr).splitlines() if line.strip()] or ["it said nothing"]
        report.missing.append(f"{script} ended with status {error.returncode}: {said[-1]}")
    else:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    return None
