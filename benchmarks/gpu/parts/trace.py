"""A few steps of an engine by torch's profiler: trace.json.gz for a viewer, and the longest kernels as figures."""

import gzip
import json
import tempfile
from pathlib import Path

from gpu.control.bench import Bench
from gpu.control.lines import Figure
from gpu.engine import run_s
from gpu.shapes import SHAPES
from gpu.spans import busiest, idle_share, launches_of, spans_of
from tandem_engine import LLM

FILE = "trace.json.gz"
BATCH, CONTEXT, STEPS = 64, 512, 10
LONGEST = 12
"""Kernels that become figures."""


def run(bench: Bench) -> None:
    bench.record.case("decodes and prompts", lambda: _traced(bench), needs_s=5.0 if bench.tiny else 60.0)


def _traced(bench: Bench) -> None:
    shape = SHAPES["tiny" if bench.tiny else "8B"]
    batch, context = (2, 16) if bench.tiny else (BATCH, CONTEXT)
    options = {"num_pages": 64, "threads": 1} if bench.tiny else {}
    prompts = [[2 + row] * context for row in range(batch)]
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            shape.write(Path(folder) / "model"),
            device=str(bench.device),
            dtype=str(bench.dtype).removeprefix("torch."),
            load_format="dummy",
            context_length=2 * context + STEPS,
            max_running_requests=batch,
            progress=False,
            **options,
        ) as llm,
    ):
        run_s(llm, prompts, [STEPS] * batch)
        llm.reset_prefix_cache()
        llm.start_profile(folder)
        run_s(llm, prompts, [STEPS] * batch)
        trace = llm.stop_profile().read_bytes()
    with gzip.open(bench.folder / FILE, "wb") as packed:
        packed.write(trace)
    _figures(bench, json.loads(trace)["traceEvents"], shape.name)


def _figures(bench: Bench, events: list[dict[str, object]], model: str) -> None:
    spans = spans_of(events)
    if not spans:
        bench.record.missing("kernels of a trace", "the trace has no event of a device", failed=not bench.tiny)
        return
    total = sum(end - begin for begin, end in spans)
    for name, micros, count in busiest(events, LONGEST):
        facts = {"us": micros, "launches": float(count)}
        bench.record.add(Figure(name=f"{name[:80]} ({model})", ratio=micros / total, of="device time", facts=facts))
    bench.record.add(Figure(name=f"device idle ({model})", ratio=idle_share(launches_of(events)), of="time"))
