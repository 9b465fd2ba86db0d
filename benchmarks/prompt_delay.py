"""When `--scheduler-delay-factor` pays: times to the first token and between tokens, by factor, on a modelled device.

    python benchmarks/prompt_delay.py [--factors 0,0.5,1,2,4] [--requests 600] [--out r.json]

The real scheduler runs in simulated time. A step takes a fixed time, which reading the weights takes whatever is
computed, and a time for each prompt token and each sequence that decodes. Requests arrive at random (Poisson). Equal
inputs give equal figures. Cases:

    short, own steps      short prompts; a step computes prompts or decodes (--disable-mixed-chunk)
    short, mixed          the same; decodes join steps with prompts (the default)
    long, own steps       prompts that fill a step alone
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean, quantiles

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

from tandem_engine.config import SchedulerConfig  # noqa: E402
from tandem_engine.forward.batch import ForwardBatch, ForwardResult  # noqa: E402
from tandem_engine.memory.allocator import PageAllocator, ReqToTokenPool  # noqa: E402
from tandem_engine.memory.kv_memory import KvMemory  # noqa: E402
from tandem_engine.memory.page_copies import CopyQueue, CopyReport, PageCopy  # noqa: E402
from tandem_engine.memory.radix_cache import RadixCache  # noqa: E402
from tandem_engine.messages.outputs import TokenOutput  # noqa: E402
from tandem_engine.messages.requests import GenerateRequest  # noqa: E402
from tandem_engine.messages.sampling import SamplingParams  # noqa: E402
from tandem_engine.scheduler.scheduler import Scheduler  # noqa: E402
from tandem_engine.scheduler.stop import ModelFacts  # noqa: E402

STEP_S = 0.02
TOKEN_S = 50e-6
SEQUENCE_S = 50e-6
PAGE_SIZE, CONTEXT, VOCAB = 16, 4096, 32_000
OUTPUT = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    prompt: int
    per_second: float
    mixed: bool


CASES = (
    Case(name="short, own steps", prompt=64, per_second=12.0, mixed=False),
    Case(name="short, mixed", prompt=64, per_second=12.0, mixed=True),
    Case(name="long, own steps", prompt=2048, per_second=4.0, mixed=False),
)


@dataclass
class SimulatedClock:
    time: float = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class ModelledDevice:
    """Implements `ModelExecutor`: a step is done when it is launched, and the clock shows what it took."""

    clock: SimulatedClock
    prompt_steps: int = 0

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        tokens, sequences = int(batch.input_ids.shape[0]), int(batch.sample_index.shape[0])
        self.prompt_steps += tokens > sequences
        seconds = STEP_S + max(0, tokens - sequences) * TOKEN_S + sequences * SEQUENCE_S
        self.clock.time += seconds
        future: Future[ForwardResult] = Future()
        future.set_result(ForwardResult(step=batch.step, next_token_ids=(7,) * sequences))
        return future

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        raise AssertionError(f"there is no host tier, so nothing copies pages: {copy}")

    def shutdown(self) -> None:
        """Nothing runs."""


@dataclass
class Seen:
    """When a request had its tokens."""

    arrived: float
    tokens: list[float] = field(default_factory=list)


class Run:
    """One case with one factor, to the last token."""

    def __init__(self, case: Case, factor: float, requests: int) -> None:
        self.case, self.clock = case, SimulatedClock()
        self.device = ModelledDevice(self.clock)
        self.seen: dict[str, Seen] = {}
        random, at = Random(1), 0.0
        self.arrivals: list[float] = []
        for _ in range(requests):
            at += random.expovariate(case.per_second)
            self.arrivals.append(at)
        copies = CopyQueue(submit=self.device.copy)
        memory = KvMemory(
            rows=ReqToTokenPool(264, CONTEXT // PAGE_SIZE + 1),
            allocator=PageAllocator(60_000, copies),
            cache=RadixCache(PAGE_SIZE),
            page_size=PAGE_SIZE,
            copies=copies,
        )
        self.scheduler = Scheduler(
            memory=memory,
            executor=self.device,
            config=SchedulerConfig(
                context_length=CONTEXT,
                max_running_requests=256,
                chunked_prefill_size=2048,
                enable_mixed_chunk=case.mixed,
                enable_overlap=False,
                scheduler_delay_factor=factor,
            ),
            model=ModelFacts(vocab_size=VOCAB, eos_token_ids=frozenset({0}), context_length=CONTEXT),
            clock=self.clock,
            sink=self.take,
        )

    def take(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        del client
        for output in outputs:
            self.seen[output.rid].tokens += [self.clock.time] * len(output.token_ids)

    def to_the_end(self) -> dict[str, object]:
        number = 0
        while number < len(self.arrivals) or not self.scheduler.idle:
            if self.scheduler.idle:
                self.clock.time = max(self.clock.time, self.arrivals[number])
            while number < len(self.arrivals) and self.arrivals[number] <= self.clock.time:
                self.add(number)
                number += 1
            self.scheduler.step()
            self.scheduler.memory.cache.take_events()
        return self.figures()

    def add(self, number: int) -> None:
        prompt = tuple(Random(number).choices(range(1, VOCAB), k=self.case.prompt))
        sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        self.seen[f"r{number}"] = Seen(self.arrivals[number])
        self.scheduler.add(GenerateRequest(rid=f"r{number}", input_ids=prompt, sampling=sampling))

    def figures(self) -> dict[str, object]:
        first = [each.tokens[0] - each.arrived for each in self.seen.values()]
        gaps = [b - a for each in self.seen.values() for a, b in zip(each.tokens, each.tokens[1:], strict=False)]
        whole = [each.tokens[-1] - each.arrived for each in self.seen.values()]
        return {
            "steps_with_prompts": self.device.prompt_steps,
            "ttft_ms": milliseconds(first),
            "itl_ms": milliseconds(gaps),
            "e2e_ms": milliseconds(whole),
        }


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {"mean": round(mean(seconds) * 1e3, 1), "p99": round(quantiles(seconds, n=100)[98] * 1e3, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", default="0,0.5,1,2,4")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [
        {"case": case.name, "factor": factor, **Run(case, factor, options.requests).to_the_end()}
        for case in CASES
        for factor in map(float, options.factors.split(","))
    ]
    text = json.dumps(results, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
