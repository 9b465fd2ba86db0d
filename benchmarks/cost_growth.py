"""How costs grow: with the batch, the context, the workers and the blocks in the index.

    python tools/random_model.py 25M /tmp/random-25m
    python benchmarks/cost_growth.py --model /tmp/random-25m [--only batch,workers,views,gateways,blocks]
                                     [--plots docs/benchmarks] [--rounds 3] [--threads 2] [--quick] [--table]
                                     [--out r.json] [--keep]

Prints one JSON object: for each cost its points, the power of the axis that it follows over the upper half of the axis,
and the terms of the parabola that fits best. Exits with 1 when one grows faster than its axis, or than its known reason
explains. `--table`: a table in Markdown instead. `--keep`: with the costs that `--out` has of other parts.

    batch     a decode step by 1 to 128 running requests; a decode step and a prompt by 128 to 32k tokens, of a real
              engine: wall time, prefix cached for decodes. The model must have 32k positions
    workers   1 to 10,000: a decision in Redis, of a prompt of 32k tokens, and without (CPU of Redis, of the gateway); 1
              to 16: a request through `tandem gateway` with its router and mock workers (CPU of both)
    views     64 to 10,000 workers: a heartbeat, a gateway's view of the fleet each second, a summary for gateways
              of other cells, its first view, and the sweep of each second (CPU of Redis)
    gateways  1 to 64, at 1,024 workers: a second of the views of all gateways, and a decision of one of them while all
              decide (CPU of Redis)
    blocks    10^4 to 10^7 in the index, over eight workers: Redis's memory, and its CPU for a decision. What does not
              fit in memory is left out and named

`--plots`: one SVG for each cost there, on logarithmic axes beside a line of the power 1. `--quick`: short axes, to see
that it runs.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

from growth_fit import Curve  # noqa: E402
from line_plot import draw  # noqa: E402
from peers.report import table  # noqa: E402

PARTS = ("batch", "workers", "views", "gateways", "blocks")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_000)
DECIDING = (1, 4, 16, 64, 256, 1024, 4096, 10_000)
SERVING = (1, 2, 4, 8, 16)
VIEWING = (64, 256, 1024, 4096, 10_000)
GATEWAYS = (1, 4, 16, 64)
BLOCKS = (10**4, 10**5, 10**6, 10**7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint for `batch`")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; comma-separated")
    parser.add_argument("--plots", type=Path, help="folder of the SVG files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if "batch" in parts and options.model is None:
        parser.error("batch needs --model; or leave it out with --only workers,views,gateways,blocks")
    if options.keep and options.out is None:
        parser.error("--keep needs the --out of the earlier run")
    curves, left_out = measured(options, parts)
    report = {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "costs": {name: curve.as_json() for name, curve in curves.items()},
        "left_out": {str(count): why for count, why in left_out.items()},
        "superlinear_without_reason": [name for name, curve in curves.items() if curve.unexplained],
    }
    if options.keep and options.out.exists():
        report = with_earlier(json.loads(options.out.read_text()), report)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(table_of(report["costs"]) if options.table else text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if options.plots is not None:
        plot(options.plots, curves)
    return 1 if report["superlinear_without_reason"] else 0


def measured(options: argparse.Namespace, parts: list[str]) -> tuple[dict[str, Curve], dict[int, str]]:
    """Costs by name, and the points that could not be taken."""
    short = slice(0, 4) if options.quick else slice(None)
    curves: dict[str, Curve] = {}
    left_out: dict[int, str] = {}
    if "batch" in parts:
        from growth_engine import engine_curves

        curves |= engine_curves(
            options.model,
            batches=BATCHES[short],
            contexts=CONTEXTS[short],
            rounds=options.rounds,
            threads=options.threads,
        )
    if "workers" in parts:
        from growth_routing import worker_curves

        requests = 200 if options.quick else 800
        curves |= worker_curves(DECIDING[short], SERVING[short], requests=requests, rounds=options.rounds)
    if "views" in parts:
        from growth_routing import view_curves

        curves |= view_curves(VIEWING[:3] if options.quick else VIEWING, rounds=options.rounds)
    if "gateways" in parts:
        from growth_routing import gateway_curves

        curves |= gateway_curves(GATEWAYS[short], rounds=options.rounds)
    if "blocks" in parts:
        from growth_routing import block_curves

        found, left_out = block_curves(BLOCKS[:3] if options.quick else BLOCKS, rounds=options.rounds)
        curves |= found
    return curves, left_out


def with_earlier(earlier: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """`report`, with costs of `earlier` that it has not measured."""
    costs, unexplained = report["costs"], report["superlinear_without_reason"]
    known = [name for name in earlier["superlinear_without_reason"] if name not in costs]
    return {
        **report,
        "costs": earlier["costs"] | costs,
        "left_out": report["left_out"] or earlier["left_out"],
        "superlinear_without_reason": [*known, *unexplained],
    }


def table_of(costs: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: the first point of each cost, one in the middle, the last one, its power and the highest allowed."""
    rows = []
    for name, curve in costs.items():
        points = [(float(at), cost) for at, cost in curve["points"].items()]
        shown = (points[0], points[len(points) // 2], points[-1]) if points else ()
        places = [f"{cost:,g} at {at:,.0f}" for at, cost in shown]
        rows.append([name, curve["unit"], *places, f"{curve['power']:g}", f"{curve['allowed']:g}"])
    return table(["cost", "unit", "", "", "", "power", "at most"], rows)


def plot(folder: Path, curves: Mapping[str, Curve]) -> None:
    """`growth_<cost>.svg` for each."""
    for name, curve in curves.items():
        last = max(curve.points)
        linear = {x: curve.points[last] * x / last for x in curve.points}
        draw(
            folder / f"growth_{name.replace(' ', '_')}.svg",
            {"measured": curve.points, "linear": linear},
            title=f"{name}: power {curve.power:g}",
            x_label=name.rpartition(" by ")[2],
            y_label=curve.unit,
            logarithmic=True,
        )


if __name__ == "__main__":
    sys.exit(main())
