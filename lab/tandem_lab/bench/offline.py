"""`tandem bench offline`: the engine against transformers generate, in alternation.

Each round runs every workload on Tandem and then on transformers (A B A B …), so that a noisy machine affects both
equally. Results are medians over rounds, and only ratios are meaningful across machines. The outputs of both sides are
compared before any result is printed.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec
import torch
from tqdm import tqdm

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_lab.bench.transformers_peer import Job, Start, TransformersBaseline, mixed_jobs, random_ids, single_job

Runner = Callable[[Sequence[Job]], list[tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    model_path: str
    num_prompts: int
    input_len: int
    output_len: int
    rounds: int
    dtype: str
    threads: int
    """0 leaves torch's choice."""
    skip_reference: bool
    as_json: bool


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over rounds of one side."""

    offline_output_tokens_per_s: float
    single_itl_ms: float
    single_ttft_ms: float


class OfflineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    model: str
    dtype: str
    threads: int
    torch: str
    num_prompts: int
    rounds: int
    tandem: Figures
    transformers: Figures | None
    offline_ratio: float | None
    """Tandem's throughput over transformers'."""
    single_itl_ratio: float | None
    """transformers' inter-token latency over Tandem's: above 1 Tandem is faster."""
    equal_outputs: float | None
    """Share of jobs whose greedy tokens are equal on both sides (1.0 in float32; bfloat16 may differ on near ties)."""
    ttft_cold_ms: float
    """1,000-token prompt, nothing cached."""
    ttft_cached_ms: float
    """The same prompt with its prefix cached."""
    schedule_s: float
    overlap_hidden_s: float
    overlap_hidden_share: float
    """Part of all scheduling time that ran while a forward was computing."""


@dataclass(kw_only=True, slots=True)
class _Side:
    name: str
    run: Runner
    offline: list[float]
    single: list[float]
    first: list[float]


def run_bench(options: BenchOptions) -> int:
    """Entry point of the command; returns the exit status. Raises `EngineError`."""
    with ExitStack() as stack:
        engine = stack.enter_context(_build(options))
        vocab = engine.model_config.vocab_size
        jobs = mixed_jobs(
            options.num_prompts, input_len=options.input_len, output_len=options.output_len, vocab_size=vocab, seed=1
        )
        stream = single_job(input_len=128, output_len=options.output_len, vocab_size=vocab, seed=2)
        sides = [_side("tandem", lambda batch: run_on(engine, batch))]
        if not options.skip_reference:
            start = Start(model_path=options.model_path, dtype=options.dtype, threads=engine.threads)
            baseline = stack.enter_context(TransformersBaseline(start))
            sides.append(_side("transformers", baseline.run))
        equal = _compare(sides, jobs)
        _measure(options, sides, jobs, stream)
        cold, cached = _cached_ttft(engine, vocab, options.rounds)
        figures = [_figures(side, sum(job.output_len for job in jobs), options.output_len) for side in sides]
        _print(options, engine, figures, equal, cold, cached)
    return 0


def _build(options: BenchOptions) -> Engine:
    loaded = load(engine_config(options), progress=not options.as_json)
    return Engine.build(loaded, loaded.config)


def engine_config(options: BenchOptions) -> EngineConfig:
    """Of an engine that takes all of the workload at once."""
    longest = max(options.input_len + options.output_len, 1024) + 8
    return EngineConfig(
        model_path=options.model_path,
        dtype=options.dtype,
        threads=options.threads,
        context_length=longest,
        scheduler=SchedulerConfig(max_running_requests=options.num_prompts, chunked_prefill_size=2048),
        cache=CacheConfig(num_pages=2 + options.num_prompts * (longest // 16 + 1)),
    )


def run_on(engine: Engine, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
    """Every run starts with an empty prefix cache: repeating a prompt must not look like speed."""
    engine.memory.clear_cache()
    outputs = engine.generate([job.request(f"bench-{i}") for i, job in enumerate(jobs)])
    return [output.token_ids for output in outputs]


def _side(name: str, run: Runner) -> _Side:
    return _Side(name=name, run=run, offline=[], single=[], first=[])


def _compare(sides: Sequence[_Side], jobs: Sequence[Job]) -> float | None:
    """Share of jobs with equal tokens. Also the warm-up of both sides."""
    outputs = [side.run(jobs[:8]) for side in sides]
    if len(outputs) < 2:
        return None
    return statistics.fmean(a == b for a, b in zip(*outputs, strict=True))


def _measure(options: BenchOptions, sides: Sequence[_Side], jobs: Sequence[Job], stream: Sequence[Job]) -> None:
    first_token = [replace(stream[0], output_len=1)]
    total = options.rounds * len(sides)
    with tqdm(total=total, desc="bench", unit="run", file=sys.stderr, disable=options.as_json) as bar:
        for _ in range(options.rounds):
            for side in sides:
                bar.set_postfix_str(side.name)
                side.offline.append(_timed(side.run, jobs))
                side.single.append(_timed(side.run, stream))
                side.first.append(_timed(side.run, first_token))
                bar.update()


def _timed(run: Runner, jobs: Sequence[Job]) -> float:
    began = time.perf_counter()
    outputs = run(jobs)
    seconds = time.perf_counter() - began
    short = [i for i, (job, out) in enumerate(zip(jobs, outputs, strict=True)) if len(out) != job.output_len]
    assert not short, f"jobs {short[:5]} returned fewer tokens than requested"
    return seconds


def _cached_ttft(engine: Engine, vocab_size: int, rounds: int) -> tuple[float, float]:
    """Seconds to the first token of a 1,000-token prompt: cold, and with its prefix cached."""
    cold: list[float] = []
    cached: list[float] = []
    for round_number in range(rounds):
        prompt = random_ids(random.Random(100 + round_number), 1000, vocab_size)
        for samples in (cold, cached):
            began = time.perf_counter()
            engine.generate([Job(prompt=prompt, output_len=1).request(f"ttft-{round_number}-{len(samples)}")])
            samples.append(time.perf_counter() - began)
    return statistics.median(cold), statistics.median(cached)


def _figures(side: _Side, jobs_tokens: int, stream_tokens: int) -> Figures:
    first = statistics.median(side.first)
    return Figures(
        offline_output_tokens_per_s=jobs_tokens / statistics.median(side.offline),
        single_itl_ms=(statistics.median(side.single) - first) / (stream_tokens - 1) * 1e3,
        single_ttft_ms=first * 1e3,
    )


def _print(
    options: BenchOptions,
    engine: Engine,
    figures: Sequence[Figures],
    equal: float | None,
    cold: float,
    cached: float,
) -> None:
    stats = engine.stats()
    other = figures[1] if len(figures) > 1 else None
    report = OfflineReport(
        model=options.model_path,
        dtype=options.dtype,
        threads=engine.threads,
        torch=str(torch.__version__),
        num_prompts=options.num_prompts,
        rounds=options.rounds,
        tandem=figures[0],
        transformers=other,
        offline_ratio=figures[0].offline_output_tokens_per_s / other.offline_output_tokens_per_s if other else None,
        single_itl_ratio=other.single_itl_ms / figures[0].single_itl_ms if other else None,
        equal_outputs=equal,
        ttft_cold_ms=cold * 1e3,
        ttft_cached_ms=cached * 1e3,
        schedule_s=stats.schedule_s,
        overlap_hidden_s=stats.overlap_hidden_s,
        overlap_hidden_share=stats.overlap_hidden_s / stats.schedule_s if stats.schedule_s else 0.0,
    )
    if options.as_json:
        print(msgspec.json.encode(report).decode())
        return
    for name, value in msgspec.to_builtins(report).items():
        for key, figure in value.items() if isinstance(value, dict) else [("", value)]:
            label = f"{name} {key}".replace("_", " ").strip()
            print(f"{label:<44} {figure:.3f}" if isinstance(figure, float) else f"{label:<44} {figure}")
