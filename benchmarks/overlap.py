"""What overlapped scheduling and the prefix cache are worth, on real engines around one loaded model.

    python benchmarks/overlap.py [--model models/tandem-mini] [--rounds 5] [--threads 1] [--only prefix]
                                 [--workload "long prompts"]

Overlap: each round runs every workload on an engine that plans step N+1 while step N computes, and on one
that does not, one right after the other and the first one changing. After two rounds both engines are built again:
where their memory lies makes up to 3 % for as long as they live. `ratio` is throughput with overlap over throughput
without, median of the pairs' medians; above 1 overlap pays. `ratio_95` is its 95 % confidence interval by bootstrap
over the pairs: what lies wholly above 1 is no accident. `hidden` is the share of scheduling time that ran beside a
forward.

Prefix: time to the first token of a prompt whose first 1,008 tokens, 63 pages, are cached, over the time of
the same suffix as a prompt of its own. 1.0 would mean that a cached prefix costs nothing at all; what remains
above it is the attention of the suffix over the prefix, and the match. `attention_share` is what that attention
adds in multiplications by the model's shape alone, which no implementation saves: it is large for models as
small as the bundled one, and 7 % for one of 1B parameters (`tools/random_model.py`). Target: at most 1.15.

Prints one JSON object per line; ratios above (overlap) or below (prefix) the target are the claim.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_lab.bench.transformers_peer import Job, random_ids

PREFIX = 1008
SUFFIXES = (16, 64, 256)
PREFIX_LIMIT = 1.15
RESAMPLES = 2000
PAIR_ROUNDS = 2
"""Rounds between two engines; then both are built again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`count` requests of `input_len` prompt and `output_len` output tokens, `stagger` turns apart."""

    name: str
    count: int
    input_len: int
    output_len: int
    stagger: int = 0

    def jobs(self, vocab_size: int) -> list[Job]:
        dice = random.Random(self.name)
        return [
            Job(prompt=random_ids(dice, self.input_len, vocab_size), output_len=self.output_len)
            for _ in range(self.count)
        ]


WORKLOADS = (
    Workload(name="single stream", count=1, input_len=64, output_len=128),
    Workload(name="decode, 16 streams", count=16, input_len=32, output_len=96),
    Workload(name="decode, 64 streams", count=64, input_len=32, output_len=64),
    Workload(name="long prompts", count=8, input_len=900, output_len=8),
    Workload(name="mixed arrivals", count=24, input_len=200, output_len=48, stagger=4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tandem-mini", help="checkpoint (default the bundled one)")
    parser.add_argument("--rounds", type=int, default=5, help="times each workload runs (default 5)")
    parser.add_argument("--only", choices=("overlap", "prefix"), help="leave the other half out")
    parser.add_argument(
        "--workload", choices=[workload.name for workload in WORKLOADS], help="of overlap, this one alone"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of a forward (default 1)")
    args = parser.parse_args()
    loaded = load(config_of(args.model, args.threads), progress=False)
    wanted = [workload for workload in WORKLOADS if args.workload in (None, workload.name)]
    for workload in wanted if args.only != "prefix" else ():
        print(json.dumps(compare_overlap(loaded, workload, args.rounds)), flush=True)
    for suffix in SUFFIXES if args.only != "overlap" else ():
        print(json.dumps(compare_prefix(loaded, suffix, args.rounds)), flush=True)


def config_of(model: str, threads: int) -> EngineConfig:
    return EngineConfig(
        model_path=model,
        dtype="float32",
        threads=threads,
        scheduler=SchedulerConfig(context_length=2048),
        cache=CacheConfig(num_pages=64 * 128),
    )


def engine_of(loaded: LoadedModel, *, overlap: bool) -> Engine:
    scheduler = replace(loaded.config.scheduler, enable_overlap=overlap)
    return Engine.build(loaded, replace(loaded.config, scheduler=scheduler))


def compare_overlap(loaded: LoadedModel, workload: Workload, rounds: int) -> dict[str, object]:
    jobs = workload.jobs(loaded.model_config.vocab_size)
    parts = [compare_pair(loaded, workload, jobs, first=bool(n % 2)) for n in range(max(1, rounds // PAIR_ROUNDS))]
    seconds = [each for part in parts for each in part.seconds]
    tokens = workload.count * workload.output_len
    ratios = [[off / on for on, off in part.seconds] for part in parts]
    return {
        "benchmark": "overlap",
        "workload": workload.name,
        "output_tokens_per_s": round(tokens / statistics.median(on for on, _ in seconds), 1),
        "without_overlap": round(tokens / statistics.median(off for _, off in seconds), 1),
        "ratio": round(statistics.median(statistics.median(part) for part in ratios), 3),
        "ratio_95": [round(end, 3) for end in interval([statistics.median(part) for part in ratios])],
        "rounds": len(seconds),
        "pairs": len(parts),
        "hidden": round(sum(part.hidden_s for part in parts) / sum(part.schedule_s for part in parts), 3),
        "threads": loaded.threads,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Rounds of two engines that were built for them."""

    seconds: list[tuple[float, float]]
    """With overlap and without, by round."""
    hidden_s: float
    schedule_s: float


def compare_pair(loaded: LoadedModel, workload: Workload, jobs: Sequence[Job], *, first: bool) -> Pair:
    """`first`: the engine with overlap is built first. Where its pool lies in memory is worth some per cent."""
    one, other = engine_of(loaded, overlap=first), engine_of(loaded, overlap=not first)
    with one, other:
        overlapped, normal = (one, other) if first else (other, one)
        outputs = [run(engine, jobs, workload.stagger)[1] for engine in (overlapped, normal)]
        assert outputs[0] == outputs[1], f"{workload.name}: overlap changes the output"
        turns = range(PAIR_ROUNDS)
        seconds = [in_turn(overlapped, normal, jobs, workload.stagger, swap=bool(n % 2)) for n in turns]
        stats = overlapped.stats()
        return Pair(seconds=seconds, hidden_s=stats.overlap_hidden_s, schedule_s=stats.schedule_s)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median: of `RESAMPLES` draws with replacement, the middle 95 % of the medians."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES * 25 // 1000], medians[RESAMPLES * 975 // 1000]


def in_turn(
    overlapped: Engine, normal: Engine, jobs: Sequence[Job], stagger: int, *, swap: bool
) -> tuple[float, float]:
    """Seconds of each engine, the one that goes first changing from round to round."""
    if swap:
        without = run(normal, jobs, stagger)[0]
        return run(overlapped, jobs, stagger)[0], without
    return run(overlapped, jobs, stagger)[0], run(normal, jobs, stagger)[0]


def run(engine: Engine, jobs: Sequence[Job], stagger: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds and outputs. The cache starts empty: a repeated prompt must not look like speed."""
    engine.memory.clear_cache()
    began = time.perf_counter()
    outputs = engine.generate([job.request(f"r{i}") for i, job in enumerate(jobs)], steps_between=stagger)
    return time.perf_counter() - began, [output.token_ids for output in outputs]


def compare_prefix(loaded: LoadedModel, suffix: int, rounds: int) -> dict[str, object]:
    vocab_size = loaded.model_config.vocab_size
    with engine_of(loaded, overlap=True) as engine:
        first_token(engine, random_ids(random.Random(0), suffix, vocab_size), "warm")
        pairs = []
        for number in range(3 * rounds):
            dice = random.Random(number)
            prefix, own = random_ids(dice, PREFIX, vocab_size), random_ids(dice, suffix, vocab_size)
            first_token(engine, prefix, f"prefix-{number}")
            cached = first_token(engine, (*prefix, *own), f"cached-{number}")
            alone = first_token(engine, own, f"alone-{number}")
            pairs.append((cached, alone))
    ratios = [cached / alone for cached, alone in pairs]
    return {
        "benchmark": "prefix",
        "cached_tokens": PREFIX,
        "suffix_tokens": suffix,
        "cached_ttft_ms": round(statistics.median(cached for cached, _ in pairs) * 1e3, 2),
        "alone_ttft_ms": round(statistics.median(alone for _, alone in pairs) * 1e3, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_95": [round(end, 3) for end in interval(ratios)],
        "attention_share": round(attention_share(loaded.model_config), 3),
        "limit": PREFIX_LIMIT,
        "threads": loaded.threads,
    }


def attention_share(config: ModelConfig) -> float:
    """Multiplications of a token's attention over the prefix, over those of its projections."""
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    projections = config.hidden_size * (heads + 3 * config.intermediate_size)
    return 2 * PREFIX * config.num_heads * config.head_dim / projections


def first_token(engine: Engine, prompt: Sequence[int], rid: str) -> float:
    """Seconds to the first token of `prompt`."""
    request = Job(prompt=tuple(prompt), output_len=1).request(rid)
    began = time.perf_counter()
    engine.generate([request])
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
