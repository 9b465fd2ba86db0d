"""KV of one prompt from a prefill to a decode engine on the same device, by NIXL.

    benchmarks/nixl_write.py         pages alone: against the device's copy bandwidth
    benchmarks/exposed_transfer.py   two engines: what a handoff costs after the prefill that it overlaps with

Both run as programs of their own: an agent of NIXL and its memory end with their process.
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from gpu.control.bench import Bench
from gpu.control.lines import Figure
from gpu.shapes import SHAPES, Shape

TOKENS = (4096, 32768)
TINY_TOKENS = (64,)
SCRIPTS = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0


def run(bench: Bench) -> None:
    shape = SHAPES["tiny" if bench.tiny else "8B"]
    tokens = TINY_TOKENS if bench.tiny else TOKENS
    bench.ceilings  # noqa: B018 - before others have the device
    bench.record.case(f"pages ({shape.name})", partial(_pages, bench, shape, tokens), needs_s=40)
    bench.record.case(f"two engines ({shape.name})", partial(_engines, bench, shape, tokens[0]), needs_s=60)


def _pages(bench: Bench, shape: Shape, tokens: tuple[int, ...]) -> None:
    found = _run(
        bench,
        "nixl_write.py",
        *("--device", _device(bench), "--dtype", _dtype(bench), "--page-tokens", "16,64"),
        *("--prompts", ",".join(map(str, tokens)), "--layers", str(shape.layers)),
        *("--heads", str(shape.kv_heads), "--head-dim", str(shape.head_dim), "--rounds", "3" if bench.tiny else "9"),
    )
    for row in found["transfers"]:
        # A copy reads and writes each byte; so does a transfer.
        moved = 2 * row["mib"] * 2**20 / (row["sampled_ms"] / 1e3)
        bench.record.add(
            Figure(
                name=f"handoff of {row['prompt']} tokens, pages of {row['page_tokens']} ({shape.name})",
                ratio=moved / bench.ceilings.copy_bytes_per_s,
                of="copy bandwidth",
                target=0.7,
                facts={"ms": row["sampled_ms"], "raw ms": row["raw_ms"], "bare ms": row["bare_ms"], "MiB": row["mib"]}
                | _breakdown(row),
            )
        )


def _engines(bench: Bench, shape: Shape, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = _run(
            bench,
            "exposed_transfer.py",
            *("--model", str(shape.write(Path(folder))), "--load-format", "dummy", "--device", _device(bench)),
            *("--dtype", _dtype(bench), "--lens", str(tokens), "--chunk", str(tokens), "--layers", ""),
            *("--rounds", "2" if bench.tiny else "5"),
        )
    for row in found["results"]:
        bench.record.add(
            Figure(
                name=f"exposed handoff of {tokens} tokens, {row['mode']} ({shape.name})",
                ratio=row["exposed_ms"],
                of="milliseconds",
                target=3.0 if row["mode"] == "auto" else None,
                at_most=True,
                facts={"prefill ms": row["prefill_ms"]} | _breakdown(row),
            )
        )


def _breakdown(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each phase, and how many pieces there were."""
    return {f"{name} ms": ms for name, ms in row["phases"].items()} | dict(row["counts"])


def _device(bench: Bench) -> str:
    return bench.device.type


def _dtype(bench: Bench) -> str:
    return str(bench.dtype).removeprefix("torch.")


def _run(bench: Bench, script: str, *arguments: str) -> dict[str, Any]:
    """What a script printed last, as JSON. Raises `CalledProcessError` or `TimeoutExpired`."""
    limit_s = min(LIMIT_S, max(1.0, bench.record.left_s))
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))
