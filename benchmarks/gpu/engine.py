"""The whole engine with random weights and default flags, as fractions of what the device can do at best.

decode    time of a step from two lengths of output, so that neither prefill nor start counts
sampled   the same with temperature, filters and penalties, against greedy
prefill   a prompt alone, from request to its only token
prompts   the same of short ones, against the same engine without graphs of prompts, and how long the device waits
idle      share of the time in which the device has nothing to do, in the middle of a batch's decode, from a trace
mixed     requests of mixed lengths; afterwards, when the engine has given its memory back, the same by transformers
"""

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.control.bench import Bench
from gpu.control.lines import Figure
from gpu.shapes import Shape
from gpu.spans import idle_share, launches_of, spans_of
from gpu.transformers_peer import Job, Peer, measure_peer
from tandem_engine import LLM, SamplingParams
from tandem_engine.executor.cuda.prompt_graphs import NO_PROMPT_GRAPHS
from tandem_engine.executor.cuda.runner import StreamRunner
from tandem_engine.executor.cuda.step_graphs import StepGraphs
from tandem_engine.kernels.compiles import COMPILED

ROUNDS = 2
SHORT, LONG = 16, 144
"""Output tokens of the two runs that a step's time is the difference of."""
FILTERED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "presence_penalty": 0.1}
PROMPT_ROUNDS = 7
PREFILL_RATE = 20_000
"""Tokens per second that a model surely computes: for how long a case will take."""
PEER_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """Sizes of what is measured, the most important first."""

    decode: tuple[tuple[int, int], ...] = ((1, 512), (64, 4096), (64, 512), (256, 512), (1, 4096), (1, 32768))
    """Sequences, and tokens that each of them has."""
    sampled: tuple[tuple[int, int], ...] = ((64, 512), (1, 512))
    prefill: tuple[int, ...] = (8192, 2048, 32768)
    prompts: tuple[int, ...] = (128, 16, 512, 1024)
    """By a graph and without."""
    float8: tuple[tuple[int, int], ...] = ((64, 4096), (1, 512))
    idle: int = 64
    idle_prompt: int = 64
    """Short, so that decodes are what most of the trace shows."""
    mixed: int = 64
    mixed_prompts: tuple[int, int] = (64, 512)
    mixed_outputs: tuple[int, int] = (64, 128)
    peers: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(*self.prefill, *(context for _, context in self.decode)) + LONG + 1


TINY = Loads(
    decode=((1, 16), (2, 16)), sampled=((2, 16),), prefill=(64,), prompts=(16,), float8=((2, 16),), idle=4,
    idle_prompt=8, mixed=4, mixed_prompts=(8, 16), mixed_outputs=(4, 8),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """The mixed load, and how long this engine took for it."""

    jobs: Sequence[Job]
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineCase:
    """What is measured of an engine, and about how long it takes."""

    name: str
    run: Callable[[LLM], None]
    needs_s: float


@dataclass(kw_only=True)
class EngineRun:
    """One model and its engines."""

    bench: Bench
    shape: Shape
    loads: Loads
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    _steps_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Of greedy decodes that were measured."""
    _mixed: Mixed | None = None

    def measure(self) -> None:
        """All that is not done. What the engines had of the device is free again."""
        self.bench.ceilings  # noqa: B018 - before an engine takes the memory
        COMPILED.watch()
        self._with_engine(self._cases(), {})
        self._with_engine(self._float8_cases(), {"kv_cache_dtype": "fp8"})
        if self._mixed is not None and self.loads.peers:
            mixed = self._mixed
            self._case("mixed load by transformers", lambda: self._compare(mixed), needs_s=PEER_S)

    def _with_engine(self, cases: Sequence[EngineCase], options: dict[str, object]) -> None:
        """An engine is started if any of its cases is to be done; when it has ended, its memory is free."""
        record = self.bench.record
        if any(record.wants(self._name(case.name), needs_s=case.needs_s) for case in cases):
            with record.attempt(self._name("an engine")):
                self._run_cases(cases, options)
        # A closed engine keeps its memory until nothing refers to it, and what is measured next needs the device.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run_cases(self, cases: Sequence[EngineCase], options: dict[str, object]) -> None:
        with self._engine(options) as llm:
            for case in cases:
                self._case(case.name, partial(case.run, llm), needs_s=case.needs_s)

    def _case(self, name: str, run: Callable[[], None], *, needs_s: float) -> None:
        self.bench.record.case(self._name(name), run, needs_s=needs_s)

    def _name(self, what: str) -> str:
        return f"{what} ({self.shape.name})"

    def _cases(self) -> list[EngineCase]:
        loads = self.loads
        first, *others = self._decodes(loads.decode, "", 1)
        prefill, *prefills = (
            EngineCase(f"prefill of {tokens} tokens", partial(self._prefill, tokens), 8 + 3 * tokens / PREFILL_RATE)
            for tokens in loads.prefill
        )
        sampled = [
            EngineCase(f"sampled decode at batch {batch} × {context}", partial(self._sampled, batch, context), 15)
            for batch, context in loads.sampled
        ]
        idle = [] if self.bench.device.type == "cpu" else [EngineCase("idle share", self._idle, 15)]
        mixed = EngineCase(f"mixed load of {loads.mixed} requests", self._run_mixed, 15)
        prompts = [
            EngineCase(f"prompt of {tokens} tokens by a graph", partial(self._by_graph, tokens), 6)
            for tokens in loads.prompts
        ]
        return [first, prefill, *prompts, *others, *idle, *sampled, *prefills, mixed]

    def _float8_cases(self) -> list[EngineCase]:
        return self._decodes(self.loads.float8, ", KV in fp8", 0.5)

    def _decodes(self, sizes: Sequence[tuple[int, int]], how: str, kv_share: float) -> list[EngineCase]:
        return [
            EngineCase(
                f"decode step at batch {batch} × {context}{how}",
                partial(self._decode, batch, context, how, kv_share),
                12 + batch * context / PREFILL_RATE,
            )
            for batch, context in sizes
        ]

    @contextmanager
    def _engine(self, options: dict[str, object]) -> Iterator[LLM]:
        loads, bench = self.loads, self.bench
        began = time.perf_counter()
        with (
            tempfile.TemporaryDirectory() as folder,
            LLM(
                self.shape.write(Path(folder)),
                device=str(bench.device),
                dtype=str(bench.dtype).removeprefix("torch."),
                load_format="dummy",
                context_length=loads.longest,
                progress=False,
                **({"num_pages": 256, "threads": 1} if bench.tiny else {}),
                **options,
            ) as llm,
        ):
            seconds, pages = time.perf_counter() - began, llm.stats().total_pages
            print(f"engine of {self.shape.name} {options}: started in {seconds:.1f} s, {pages} pages", flush=True)
            yield llm

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        vocabulary = int(self.shape.config["vocab_size"])
        return [[self.dice.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]

    def _fits(self, llm: LLM, what: str, batch: int, context: int) -> bool:
        """Whether all sequences have their KV at once; a batch that takes turns is none."""
        page = llm._engine.geometry.page_size
        needed, total = batch * -(-(context + LONG) // page), llm.stats().total_pages
        if needed > total:
            self.bench.record.missing(self._name(what), f"{needed} pages needed, the pool has {total}", failed=False)
        return needed <= total

    def _decode(self, batch: int, context: int, how: str, kv_share: float, llm: LLM) -> None:
        what = f"decode step at batch {batch} × {context}{how}"
        if not self._fits(llm, what, batch, context):
            return
        step_s, compiled = self._step_s(llm, batch, context)
        if not how:
            self._steps_s[batch, context] = step_s
        itemsize = self.bench.dtype.itemsize
        least = self.shape.decode_bytes(
            batch, context + (SHORT + LONG) // 2, itemsize, kv_itemsize=max(1, int(kv_share * itemsize))
        )
        facts = {"ms": step_s * 1e3, "tokens/s": batch / step_s, "GB/s": least / step_s / 1e9, "compiles": compiled}
        self._add(what, least / self.bench.ceilings.copy_bytes_per_s / step_s, "copy bandwidth", 0.8, facts)

    def _sampled(self, batch: int, context: int, llm: LLM) -> None:
        greedy_s = self._steps_s.get((batch, context)) or self._step_s(llm, batch, context)[0]
        step_s, compiled = self._step_s(llm, batch, context, **FILTERED)
        target = 1.1 if batch > 1 else 1.25
        facts = {"ms": step_s * 1e3, "greedy ms": greedy_s * 1e3, "compiles": compiled}
        name = f"sampled decode step at batch {batch} × {context}"
        self._add(name, step_s / greedy_s, "a greedy step's time", target, facts, at_most=True)

    def _step_s(self, llm: LLM, batch: int, context: int, **sampling: float) -> tuple[float, int]:
        """Seconds of a step, and kernels compiled while it was measured. Prompts are in the prefix cache after the
        first run, so the others are short."""
        prompts = self._prompts(batch, context)
        run_s(llm, prompts, [LONG] * batch, **sampling)
        before = compiled_so_far()
        short, long = (
            statistics.median(run_s(llm, prompts, [length] * batch, **sampling) for _ in range(ROUNDS))
            for length in (SHORT, LONG)
        )
        return (long - short) / (LONG - SHORT), compiled_so_far() - before

    def _prefill(self, tokens: int, llm: LLM) -> None:
        """Of other prompts each time: the prefix cache has none of them."""
        run_s(llm, self._prompts(1, tokens), [1])
        seconds = statistics.median(run_s(llm, self._prompts(1, tokens), [1]) for _ in range(ROUNDS + 1))
        rate = self.shape.prefill_flops(tokens) / seconds
        facts = {"ms": seconds * 1e3, "tokens/s": tokens / seconds, "TFLOP/s": rate / 1e12}
        target = (0.35 if self.shape.experts else 0.7) if tokens >= 2048 else None
        self._add(f"prefill of {tokens} tokens", rate / self.bench.ceilings.matmul_flops, "matmul rate", target, facts)

    def _by_graph(self, tokens: int, llm: LLM) -> None:
        """Steps of one prompt, alternately by a graph and without: what changes on a machine changes both."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(PROMPT_ROUNDS + 1):
            for graphs, found in seconds.items():
                with prompt_graphs(llm, graphs=graphs):
                    found.append(run_s(llm, self._prompts(1, tokens), [1]))
        with_s, without_s = (statistics.median(found[1:]) for found in seconds.values())
        rate = self.shape.prefill_flops(tokens) / with_s
        facts = {
            "ms": with_s * 1e3,
            "ms without": without_s * 1e3,
            "share of matmul rate": rate / self.bench.ceilings.matmul_flops,
        }
        if self.bench.device.type != "cpu":
            for graphs, name in ((True, "device idle"), (False, "device idle without")):
                with prompt_graphs(llm, graphs=graphs):
                    prompts = [self._prompts(1, tokens) for _ in range(PROMPT_ROUNDS)]
                    facts[name] = idle_share(launches_of(traced(llm, prompts, 1)))
        self._add(
            f"prompt of {tokens} tokens by a graph", with_s / without_s, "time without", None, facts, at_most=True
        )

    def _idle(self, llm: LLM) -> None:
        prompts = self._prompts(self.loads.idle, self.loads.idle_prompt)
        run_s(llm, prompts, [LONG] * len(prompts))
        events = traced(llm, [prompts], LONG)
        name = f"device idle between launches of decodes at batch {self.loads.idle}"
        facts = {"with gaps within graphs": idle_share(spans_of(events))}
        self._add(name, idle_share(launches_of(events)), "time", 0.05, facts, at_most=True)

    def _run_mixed(self, llm: LLM) -> None:
        jobs = [*self._jobs()]
        prompts, lens = [job.prompt for job in jobs], [job.output_len for job in jobs]
        run_s(llm, prompts, lens)
        llm.reset_prefix_cache()
        seconds = run_s(llm, prompts, lens)
        self._mixed = Mixed(jobs=jobs, seconds=seconds)
        tokens = sum(lens)
        self._add(f"mixed load of {len(jobs)} requests", tokens / seconds, "tokens per second", None, {"s": seconds})

    def _jobs(self) -> Iterator[Job]:
        for _ in range(self.loads.mixed):
            (prompt,) = self._prompts(1, self.dice.randint(*self.loads.mixed_prompts))
            yield Job(prompt=prompt, output_len=self.dice.randint(*self.loads.mixed_outputs))

    def _compare(self, mixed: Mixed) -> None:
        bench = self.bench
        limit_s = min(2 * PEER_S, bench.record.left_s)
        peers = measure_peer(self.shape, mixed.jobs, str(bench.device), bench.dtype, limit_s=limit_s)
        for peer in peers:
            self._add_peer(mixed, peer)

    def _add_peer(self, mixed: Mixed, peer: Peer) -> None:
        if peer.seconds is None:
            self.bench.record.missing(f"transformers {peer.name}", peer.why_not, failed=False)
            return
        tokens = sum(job.output_len for job in mixed.jobs)
        facts = {"tokens/s": tokens / mixed.seconds, "theirs": tokens / peer.seconds}
        target = 3.0 if peer.name == "continuous batching" else None
        name = f"mixed load of {len(mixed.jobs)} requests"
        self._add(name, peer.seconds / mixed.seconds, f"transformers {peer.name}", target, facts)

    def _add(
        self, what: str, ratio: float, of: str, target: float | None, facts: dict[str, float], *, at_most: bool = False
    ) -> None:
        figure = Figure(name=self._name(what), ratio=ratio, of=of, target=target, facts=facts, at_most=at_most)
        self.bench.record.add(figure)


def run_s(llm: LLM, prompts: Sequence[list[int]], output_lens: Sequence[int], **sampling: float) -> float:
    """Seconds until all have their outputs, whose lengths are forced and checked. Greedy without `sampling`."""
    chosen: dict[str, Any] = {"temperature": 0.0, **sampling}
    params = [SamplingParams(max_tokens=length, ignore_eos=True, **chosen) for length in output_lens]
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == list(output_lens), f"outputs of {lengths} tokens, {list(output_lens)} were expected"
    return seconds


def traced(llm: LLM, loads: Sequence[list[list[int]]], output_len: int) -> list[dict[str, Any]]:
    """Events of torch's profiler while prompts are answered, one load after the other."""
    with tempfile.TemporaryDirectory() as folder:
        llm.start_profile(folder)
        for prompts in loads:
            run_s(llm, prompts, [output_len] * len(prompts))
        events: list[dict[str, Any]] = json.loads(llm.stop_profile().read_text("utf-8"))["traceEvents"]
    return events


@contextmanager
def prompt_graphs(llm: LLM, *, graphs: bool) -> Iterator[None]:
    """Without `graphs`, steps with prompts are launched one operation at a time, by an engine that has any."""
    runner = llm._engine._parts.runner
    if graphs or not isinstance(runner, StreamRunner):
        yield
        return
    whole = runner._graphs
    runner._graphs = StepGraphs(whole.decodes, NO_PROMPT_GRAPHS)
    try:
        yield
    finally:
        runner._graphs = whole


def compiled_so_far() -> int:
    """Kernels, from the compiler or its cache."""
    return COMPILED.counts.starting + COMPILED.counts.serving
