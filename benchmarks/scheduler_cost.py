"""What one step costs the scheduler when the model costs nothing.

    python benchmarks/scheduler_cost.py [--plot docs/benchmarks/scheduler_cost.svg] [--sizes 1 8 64 …]

A real scheduler runs over real KV memory with an executor that answers at once, in overlap mode, so plan, build
and settle are all there is. Prints one JSON object: per workload and number of running requests the microseconds
of a step, in all and by phase, and a straight line through the totals. Totals are CPU time of the thread, phases
wall time; of several hundred steps the lower quartile, which others on the machine disturb least.

    plan     the planner: sweep, pages of decodes, admission
    build    the tensors of the step
    settle   results to requests: stop rules, outputs, releases
    rest     the loop itself, delivery of outputs, and what the collector of garbage takes

    decode     every request decodes; greedy, no extras
    sampling   the same with temperature, top-k, top-p, penalties, stop ids and a seed per request
    logprobs   the same with five top-logprobs each
    mixed      every step also prefills 128 prompt tokens, and as many requests start as end

Limits: 200 µs at 64 running and 600 µs at 256, decoding.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any, TypeVar

import numpy as np
from line_plot import draw

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import SchedulerConfig
from tandem_engine.forward.batch import ForwardBatch, ForwardResult, SampledLogprobs
from tandem_engine.memory.allocator import PageAllocator, ReqToTokenPool
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyQueue, CopyReport, PageCopy
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.loop import Loop
from tandem_engine.scheduler.scheduler import Scheduler
from tandem_engine.scheduler.stop import ModelFacts

SIZES = (1, 8, 64, 128, 256, 384, 512)
LIMITS = {64: 200.0, 256: 600.0}
PAGE_SIZE, CONTEXT, PROMPT, OUTPUT = 16, 4096, 128, 512
VOCAB = 32_000
WARM_UP, STEPS = 20, 300
PHASES = ("plan", "build", "settle")
T = TypeVar("T")


class Instant:
    """Implements `ModelExecutor`: every step is done when it is launched."""

    def __init__(self) -> None:
        self.logprob = SampledLogprobs(logprob=-0.5, top=tuple((token, -float(token)) for token in range(1, 6)))

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        future: Future[ForwardResult] = Future()
        wanted = batch.sampling.logprobs
        future.set_result(
            ForwardResult(
                step=batch.step,
                next_token_ids=(7,) * batch.sample_index.shape[0],
                logprobs=tuple(None if n < 0 else self.logprob for n in wanted),
            )
        )
        return future

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        raise AssertionError(f"no workload has a host tier, so nothing copies pages: {copy}")

    def shutdown(self) -> None:
        """Nothing runs."""


@dataclass
class Stopwatch:
    """Seconds by phase."""

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def call(self, phase: str, function: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = function()
        self.spent[phase] += time.perf_counter() - start
        return result

    def attach(self, loop: Loop) -> None:
        """Put a timer around the three parts of `loop`."""
        for part, method in (("planner", "plan"), ("builder", "build"), ("settlement", "settle")):
            setattr(loop, part, Timed(getattr(loop, part), method, self))


class Timed:
    """A part of the loop, all of it, with a timer around one of its methods."""

    def __init__(self, inner: object, method: str, watch: Stopwatch) -> None:
        self._inner, self._method, self._watch = inner, method, watch

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name != self._method:
            return attribute
        return lambda *args, **kwargs: self._watch.call(name, lambda: attribute(*args, **kwargs))


def plain(_: int) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)


def varied(number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=OUTPUT,
        temperature=0.5 + number % 5 / 10,
        top_k=number % 3 * 20,
        top_p=0.9,
        min_p=0.01 * (number % 2),
        seed=number,
        stop_token_ids=(1, 2, 3),
        ignore_eos=True,
        presence_penalty=0.1 * (number % 4),
        frequency_penalty=0.1 * (number % 3),
        repetition_penalty=1.0 + 0.1 * (number % 2),
    )


def with_logprobs(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, logprobs=5, seed=number)


WORKLOADS: dict[str, Callable[[int], SamplingParams]] = {
    "decode": plain,
    "sampling": varied,
    "logprobs": with_logprobs,
    "mixed": plain,
}


class Bench:
    """One scheduler with `running` requests."""

    def __init__(self, workload: str, running: int) -> None:
        self.sampling = WORKLOADS[workload]
        self.running = running
        self.names = count()
        self.watch = Stopwatch()
        pages = (running + 8) * (CONTEXT // PAGE_SIZE // 4) + 1
        executor = Instant()
        copies = CopyQueue(submit=executor.copy)
        memory = KvMemory(
            rows=ReqToTokenPool(2 * running + 8, CONTEXT // PAGE_SIZE + 1),
            allocator=PageAllocator(pages, copies),
            cache=RadixCache(PAGE_SIZE),
            page_size=PAGE_SIZE,
            copies=copies,
        )
        self.scheduler = Scheduler(
            memory=memory,
            executor=executor,
            config=SchedulerConfig(
                context_length=CONTEXT,
                max_running_requests=running + 1,
                max_prefill_tokens=8192,
                chunked_prefill_size=8192,
            ),
            model=ModelFacts(vocab_size=VOCAB, eos_token_ids=frozenset({0}), context_length=CONTEXT),
            clock=MonotonicClock(),
            sink=self.discard,
        )
        for _ in range(running):
            self.add()
        while len(self.scheduler.queues.running) < running:
            self.step()

    def discard(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        """A client that reads everything at once."""

    def step(self) -> None:
        self.scheduler.step()
        self.scheduler.memory.cache.take_events()

    def add(self) -> None:
        number = next(self.names)
        prompt = tuple((number * 7919 + i * 31) % VOCAB for i in range(PROMPT))
        self.scheduler.add(GenerateRequest(rid=f"r{number}", input_ids=prompt, sampling=self.sampling(number)))

    def replace_one(self) -> None:
        """The oldest request ends with its next token, and a new one comes."""
        oldest = self.scheduler.queues.running[0]
        self.scheduler.abort(oldest.rid)
        self.add()

    def time_step(self) -> dict[str, float]:
        """Microseconds of one step, in all and by phase."""
        self.watch.spent = dict.fromkeys(PHASES, 0.0)
        start = time.thread_time()
        self.scheduler.step()
        total = time.thread_time() - start
        self.scheduler.memory.cache.take_events()
        return {phase: seconds * 1e6 for phase, seconds in {"total": total, **self.watch.spent}.items()}


def cost(workload: str, running: int, measured_steps: int = STEPS) -> dict[str, float]:
    """Microseconds of a step, in all and by phase."""
    bench = Bench(workload, running)
    bench.watch.attach(bench.scheduler._loop)
    gc.collect()
    gc.freeze()  # as the engine process does
    steps = []
    for _ in range(WARM_UP + measured_steps):
        if workload == "mixed":
            bench.replace_one()
        steps.append(bench.time_step())
    measured = steps[WARM_UP:]
    costs = {phase: quantiles((step[phase] for step in measured), n=4)[0] for phase in ("total", *PHASES)}
    costs["rest"] = costs["total"] - sum(costs[phase] for phase in PHASES)
    return {phase: round(spent, 1) for phase, spent in costs.items()}


def line(points: dict[int, dict[str, float]]) -> dict[str, float]:
    """Least squares through the totals: microseconds per step and per running request, and how straight it is."""
    x, y = np.array([*points]), np.array([point["total"] for point in points.values()])
    slope, fixed = np.polyfit(x, y, 1)
    residual = y - (slope * x + fixed)
    unexplained = float((residual**2).sum() / ((y - y.mean()) ** 2).sum()) if len(x) > 1 else 0.0
    return {"fixed_us": round(fixed, 1), "us_per_request": round(slope, 3), "r_squared": round(1 - unexplained, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="running requests")
    parser.add_argument("--plot", type=Path, help="also draw the totals into this SVG file")
    args = parser.parse_args()

    costs = {name: {size: cost(name, size) for size in args.sizes} for name in WORKLOADS}
    report = {
        "us_per_step": costs,
        "line": {name: line(points) for name, points in costs.items()},
        "limits": {
            str(size): {"limit_us": limit, "decode_us": costs["decode"][size]["total"]}
            for size, limit in LIMITS.items()
            if size in args.sizes
        },
    }
    print(json.dumps(report, indent=2))
    if args.plot is not None:
        totals = {name: {size: point["total"] for size, point in points.items()} for name, points in costs.items()}
        draw(
            args.plot,
            {**totals, "limit": LIMITS},
            title="Scheduler cost of one step, by running requests",
            x_label="running requests",
            y_label="µs of CPU per step (median)",
        )


if __name__ == "__main__":
    main()
