"""The whole engine with random weights, as fractions of what the device can do at best.

decode    time of a step from two lengths of output, so that neither prefill nor start counts
prefill   a prompt alone, from request to its only token
idle      share of the time in which the device has nothing to do, in the middle of a batch's decode, from a trace
mixed     64 requests of mixed lengths; afterwards, when the engine has given its memory back, the same by transformers
"""

import gc
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.budget import Budget
from gpu.ceilings import Ceilings
from gpu.figures import Figure, Report
from gpu.shapes import Shape
from gpu.transformers_peer import Job, Peer, measure_peer
from tandem_engine import LLM, SamplingParams

ROUNDS = 3
SHORT, LONG = 16, 144
"""Output tokens of the two runs that a step's time is the difference of."""
CONTEXT = 512
WORKING = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of a trace's events in which the device works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """Sizes of what is measured."""

    decode: tuple[int, ...] = (1, 32)
    idle: int = 64
    idle_prompt: int = 64
    """Short, so that decodes are what most of the trace shows."""
    prompt: int = 8192
    mixed: int = 64
    mixed_prompts: tuple[int, int] = (64, 512)
    mixed_outputs: tuple[int, int] = (64, 128)


TINY = Loads(decode=(1, 2), idle=4, idle_prompt=8, prompt=256, mixed=4, mixed_prompts=(8, 16), mixed_outputs=(4, 8))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """The mixed load, and how long this engine took for it."""

    jobs: Sequence[Job]
    seconds: float


@dataclass(kw_only=True)
class EngineRun:
    """One model, its engine, and where figures go."""

    shape: Shape
    loads: Loads
    ceilings: Ceilings
    dtype: torch.dtype
    report: Report
    budget: Budget

    def measure(self, device: str) -> Mixed:
        """All but peers. What the engine had of the device is free again."""
        mixed = self._measure(device, random.Random(0))
        # A closed engine keeps its memory until nobody knows it, and who is measured next needs the device.
        gc.collect()
        torch.cuda.empty_cache()
        return mixed

    def compare(self, mixed: Mixed, device: str) -> None:
        """Beside transformers, in whatever time is left: the last of a run."""
        if self.budget.allows(f"mixed load beside transformers, {self.shape.name}", needs_s=90):
            self._compare(mixed, measure_peer(self.shape, mixed.jobs, device, self.dtype, limit_s=self.budget.left_s))

    def _measure(self, device: str, dice: random.Random) -> Mixed:
        with tempfile.TemporaryDirectory() as folder, self._engine(Path(folder), device) as llm:
            for batch in self.loads.decode:
                if self.budget.allows(f"decode at batch {batch}, {self.shape.name}", needs_s=20):
                    self._decode(llm, batch, dice)
            if self.budget.allows(f"prefill, {self.shape.name}", needs_s=10):
                self._prefill(llm, dice)
            if device != "cpu" and self.budget.allows(f"idle share, {self.shape.name}", needs_s=15):
                with self.report.attempt("idle share"):
                    self._idle(llm, dice, Path(folder))
            jobs = [*self._jobs(dice)]
            return Mixed(
                jobs=jobs, seconds=median_s(llm, [job.prompt for job in jobs], [job.output_len for job in jobs])
            )

    @contextmanager
    def _engine(self, folder: Path, device: str) -> Iterator[LLM]:
        longest = self.loads.prompt + LONG + 1
        options = {"device": device, "dtype": str(self.dtype).removeprefix("torch."), "load_format": "dummy"}
        with LLM(
            self.shape.write(folder),
            context_length=longest,
            max_prefill_tokens=longest,
            chunked_prefill_size=longest,
            disable_radix_cache=True,
            **options,
        ) as llm:
            yield llm

    def _prompts(self, dice: random.Random, count: int, length: int) -> list[list[int]]:
        vocabulary = int(self.shape.config["vocab_size"])
        return [[dice.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]

    def _decode(self, llm: LLM, batch: int, dice: random.Random) -> None:
        prompts = self._prompts(dice, batch, min(CONTEXT, self.loads.prompt))
        short, long = (median_s(llm, prompts, [length] * batch) for length in (SHORT, LONG))
        step_s = (long - short) / (LONG - SHORT)
        context = len(prompts[0]) + (SHORT + LONG) // 2
        least_s = self.shape.decode_bytes(batch, context, self.dtype.itemsize) / self.ceilings.copy_bytes_per_s
        self._add(f"decode step at batch {batch}", least_s / step_s, "copy bandwidth", 0.8, {"ms": step_s * 1e3})

    def _prefill(self, llm: LLM, dice: random.Random) -> None:
        seconds = median_s(llm, self._prompts(dice, 1, self.loads.prompt), [1])
        rate = self.shape.prefill_flops(self.loads.prompt) / seconds
        facts = {"ms": seconds * 1e3, "tokens/s": self.loads.prompt / seconds}
        self._add(
            f"prefill of {self.loads.prompt} tokens", rate / self.ceilings.matmul_flops, "matmul rate", 0.55, facts
        )

    def _idle(self, llm: LLM, dice: random.Random, folder: Path) -> None:
        prompts = self._prompts(dice, self.loads.idle, self.loads.idle_prompt)
        llm.start_profile(folder)
        run_s(llm, prompts, [SHORT + LONG] * len(prompts))
        events = json.loads(llm.stop_profile().read_text("utf-8"))["traceEvents"]
        name = f"device idle between launches of decodes at batch {self.loads.idle}"
        facts = {"with gaps within graphs": idle_share(spans_of(events))}
        self._add(name, idle_share(launches_of(events)), "time", 0.02, facts, at_most=True)

    def _jobs(self, dice: random.Random) -> Iterator[Job]:
        for _ in range(self.loads.mixed):
            (prompt,) = self._prompts(dice, 1, dice.randint(*self.loads.mixed_prompts))
            yield Job(prompt=prompt, output_len=dice.randint(*self.loads.mixed_outputs))

    def _compare(self, mixed: Mixed, peers: Sequence[Peer]) -> None:
        tokens, ours_s = sum(job.output_len for job in mixed.jobs), mixed.seconds
        for peer in peers:
            if peer.seconds is None:
                self.report.missing.append(f"transformers {peer.name}: {peer.why_not}")
                continue
            facts = {"tokens/s": tokens / ours_s, "theirs": tokens / peer.seconds}
            target = 3.0 if peer.name == "continuous batching" else None
            self._add(
                f"mixed load of {len(mixed.jobs)} requests",
                peer.seconds / ours_s,
                f"transformers {peer.name}",
                target,
                facts,
            )

    def _add(
        self, what: str, ratio: float, of: str, target: float | None, facts: dict[str, float], *, at_most: bool = False
    ) -> None:
        name = f"{what} ({self.shape.name})"
        self.report.add(Figure(name=name, ratio=ratio, of=of, target=target, facts=facts, at_most=at_most))


def run_s(llm: LLM, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> float:
    """Seconds until all have their outputs, whose lengths are forced and checked."""
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in output_lens]
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == list(output_lens), f"outputs of {lengths} tokens, {list(output_lens)} were asked for"
    return seconds


def median_s(llm: LLM, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> float:
    """Of a few runs, behind one that does not count."""
    run_s(llm, prompts, output_lens)
    return statistics.median(run_s(llm, prompts, output_lens) for _ in range(ROUNDS))


Span = tuple[float, float]
"""Begin and end, in microseconds."""


def spans_of(events: Sequence[dict[str, Any]]) -> list[Span]:
    """When the device worked, in a Chrome trace: one for each kernel and copy."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in WORKING]


def launches_of(events: Sequence[dict[str, Any]]) -> list[Span]:
    """As `spans_of`, with all that one call of the host has started as one: a graph is a single launch, and what is
    between its kernels is no wait for the host."""
    launched: dict[object, list[Span]] = defaultdict(list)
    for number, event in enumerate(events):
        call = event.get("args", {}).get("correlation") or f"event {number}"
        launched[call] += spans_of([event])
    return [(min(span)[0], max(end for _, end in span)) for span in launched.values() if span]


def idle_share(spans: Sequence[Span]) -> float:
    """Of the middle half of a device's time: the part in which it did nothing."""
    assert spans, "the trace has no event of a device"
    first, last = min(spans)[0], max(end for _, end in spans)
    begin, end = first + (last - first) / 4, last - (last - first) / 4
    busy, reached = 0.0, begin
    for start, stop in sorted(spans):
        new = min(stop, end) - max(start, reached)
        if new > 0:
            busy += new
            reached = min(stop, end)
    return 1.0 - busy / (end - begin)
