"""What LoRA adapters cost: tokens per second of some streams, over those of an engine without adapters.

    PYTHONPATH=tests/support python benchmarks/adapters.py [--model models/tandem-mini] [--rank 16] [--rounds 5]
        [--streams 8] [--stored float32]

    unused      eight adapters are loaded, and the requests are of the model alone
    mixed       the same engine; the requests have the eight adapters, of all seven projections, in turn

Each round runs the engine without adapters, then both cases, every second one in the opposite order, so that a noisy
machine and what ran before disturb all alike; `ratio` is the median of the rounds' ratios, and `target` its limit.
Engines have run the workload `WARM_UP` times before. Outputs of the model alone must be equal in both engines, token
for token, and those of adapters must differ from them, or the benchmark stops. Prints one JSON object per case, with
the same ratio of CPU seconds of the process (`cpu_ratio`), which other processes disturb less, and the bytes of
projections and of A and B that a decode step reads: where both come from memory or a cache of the same speed,
`bytes_ratio` bounds the ratio of decode steps. Exit status 1 if a ratio misses its target.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tandem_engine.config import AdapterConfig, CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.requests import AdapterRef, GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.adapters import write_adapter

ADAPTERS, PROMPT, OUTPUT = 8, 128, 64
WARM_UP = 2
TARGETS = {"unused": 1 / 1.01, "mixed": 0.85}
"""Least ratio. Adapters that nothing uses may take 1 % more time."""

Outputs = list[tuple[int, ...]]


class Seconds(NamedTuple):
    """That a run took."""

    wall: float
    cpu: float
    """Of all threads of the process."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tandem-mini"), help="checkpoint (the bundled one)")
    parser.add_argument("--rank", type=int, default=16, help="of all adapters (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="times each case runs (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a forward (default 1)")
    parser.add_argument("--streams", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--dtype", default="float32", help="of the model (default float32)")
    parser.add_argument(
        "--stored", choices=("float32", "bfloat16"), default="float32", help="dtype of the adapters (default float32)"
    )
    args = parser.parse_args()
    if args.streams < ADAPTERS or args.streams % ADAPTERS:
        parser.error(f"--streams must be a multiple of {ADAPTERS}, one or more for each adapter")
    config = EngineConfig(
        model_path=str(args.model),
        dtype=args.dtype,
        threads=args.threads,
        scheduler=SchedulerConfig(context_length=1024, max_running_requests=max(args.streams, ADAPTERS)),
        cache=CacheConfig(num_pages=max(1024, 16 * args.streams)),
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = {
            f"a{number}": write_adapter(
                Path(folder, str(number)), args.model, seed=number, rank=args.rank, dtype=getattr(torch, args.stored)
            )
            for number in range(1, ADAPTERS + 1)
        }
        adapted = replace(config, adapters=AdapterConfig.of(paths, max_rank=args.rank))
        loaded = load(adapted, progress=False)
        bare = stack.enter_context(Engine.build(load(config, progress=False), config))
        full = stack.enter_context(Engine.build(loaded, adapted))
        found = measure(bare, full, args.rounds, streams=args.streams)
        return report(found, rank=args.rank, streams=args.streams, sizes=bytes_of_step(loaded), stored=args.stored)


def requests(adapters: Sequence[AdapterRef | None]) -> list[GenerateRequest]:
    """One for each of `adapters`, with a separate prompt."""
    dice = random.Random(22)
    return [
        GenerateRequest(
            rid=f"r{number}",
            input_ids=tuple(dice.choices(range(20, 900), k=PROMPT)),
            sampling=SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True),
            adapter=adapter,
        )
        for number, adapter in enumerate(adapters)
    ]


def measure(bare: Engine, full: Engine, rounds: int, *, streams: int) -> list[dict[str, Seconds]]:
    """Of each case and of the engine without adapters (`bare`), by round."""
    alone = requests([None] * streams)
    refs = [AdapterRef(name=each.name, digest=bytes.fromhex(each.digest)) for each in full.served_adapters]
    cases = {"bare": (bare, alone), "unused": (full, alone), "mixed": (full, requests(refs * (streams // ADAPTERS)))}
    found = []
    for number in range(WARM_UP + rounds):
        order = list(cases.items())[:: -1 if number % 2 else 1]
        runs = {name: run(engine, sent) for name, (engine, sent) in order}
        expected = runs["bare"][1]
        if runs["unused"][1] != expected:
            raise SystemExit("adapters that are not used change outputs of the model")
        if any(mine == its for mine, its in zip(runs["mixed"][1], expected, strict=True)):
            raise SystemExit("an adapter changes no output: nothing is measured")
        if number >= WARM_UP:
            found.append({name: seconds for name, (seconds, _) in runs.items()})
    return found


def run(engine: Engine, sent: Sequence[GenerateRequest]) -> tuple[Seconds, Outputs]:
    """The cache starts empty: a repeated prompt must not look like speed."""
    engine.memory.clear_cache()
    began, used = time.perf_counter(), time.process_time()
    outputs = engine.generate(sent)
    took = Seconds(time.perf_counter() - began, time.process_time() - used)
    return took, [output.token_ids for output in outputs]


def bytes_of_step(loaded: LoadedModel) -> tuple[int, int]:
    """Of the projections of all layers, and of A and B of all adapters."""
    config = loaded.model_config
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    gathered, inner = config.num_heads * config.head_dim, config.intermediate_size
    each = (heads + gathered) * config.hidden_size + 3 * inner * config.hidden_size
    weights = config.num_layers * each * loaded.dtype.itemsize
    return weights, sum(
        site.a.nbytes + sum(part.b.nbytes for part in site.parts)
        for adapter in loaded.adapters.weights
        for site in adapter.sites.values()
    )


def report(found: Sequence[dict[str, Seconds]], *, rank: int, streams: int, sizes: tuple[int, int], stored: str) -> int:
    """Print the ratios. Returns the exit status."""
    missed = False
    for case, target in TARGETS.items():
        ratio = statistics.median(each["bare"].wall / each[case].wall for each in found)
        missed = missed or ratio < target
        row = {
            "benchmark": "adapters",
            "case": case,
            "rank": rank,
            "streams": streams,
            "stored": stored,
            "tokens_per_s": round(streams * OUTPUT / statistics.median(each[case].wall for each in found), 1),
            "without_adapters": round(streams * OUTPUT / statistics.median(each["bare"].wall for each in found), 1),
            "ratio": round(ratio, 3),
            "cpu_ratio": round(statistics.median(each["bare"].cpu / each[case].cpu for each in found), 3),
            "target": round(target, 3),
            "bytes_of_weights": sizes[0],
            "bytes_of_adapters": sizes[1] if case == "mixed" else 0,
            "bytes_ratio": round(sizes[0] / sum(sizes), 3) if case == "mixed" else 1.0,
        }
        print(json.dumps(row), flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
