"""What a load test sends: prompts, output lengths and arrival times, all a function of the seed.

Prompts are made of blocks of words; equal block numbers give equal text, so that prefix reuse in a trace
(Mooncake's `hash_ids`) is real reuse. Lengths are counted in words here; the server's usage tells tokens.
"""

import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tandem_engine.errors import ConfigError
from tandem_services.common.traces import TRACE_BLOCK, TraceRow, read_trace

WORDS = tuple(
    "the river fox lives near a quiet village and every morning it walks along old stone bridge to look for "
    "bread apples green garden tells friend about long winter night when snow fell on hills children sang small "
    "boat carried letters from island to harbour where baker waited with warm lamp".split()
)

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpec:
    """One request of the run."""

    prompt: Prompt
    max_tokens: int
    at: float = 0.0
    """Seconds after the start of the run; used by rate and trace, not by fixed concurrency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Words per prompt and tokens per answer, uniform in [(1 - spread) * n, n]."""

    prompt: int
    output: int
    spread: float = 0.0
    shared_prefix: int = 0
    """Leading words that all prompts have in common."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        low = 1.0 - self.spread
        return (
            max(1, round(self.prompt * rng.uniform(low, 1.0))),
            max(1, round(self.output * rng.uniform(low, 1.0))),
        )


def block_words(block: int, count: int) -> list[str]:
    """The words of one block: a function of its number alone."""
    rng = random.Random(block)
    return [rng.choice(WORDS) for _ in range(count)]


def fixed_workload(lengths: Lengths, count: int, *, rate: float | None, seed: int) -> list[RequestSpec]:
    """`count` requests; with `rate`, Poisson arrivals of that many per second."""
    rng = random.Random(seed)
    shared = block_words(-1, lengths.shared_prefix)
    at = 0.0
    specs = []
    for number in range(count):
        words, output = lengths.draw(rng)
        own = block_words(seed * 1_000_003 + number, max(1, words - len(shared)))
        if rate is not None:
            at += rng.expovariate(rate)
        specs.append(RequestSpec(prompt=" ".join([*shared, *own]), max_tokens=output, at=at))
    return specs


def trace_workload(path: Path, count: int, *, scale: float, speed: float) -> list[RequestSpec]:
    """The first `count` requests of a Mooncake (.jsonl) or Azure (.csv) trace.

    `scale` divides lengths (64 suits a small CPU model), `speed` divides the times between arrivals.
    Raises `ConfigError` naming the file and line that cannot be read, or the request with several choices.
    """
    chosen = list(islice(read_trace(path), count))
    if not chosen:
        raise ConfigError(f"--trace {path}: no requests in it")
    for number, row in enumerate(chosen, 1):
        if row.choices > 1:
            raise ConfigError(
                f"--trace {path}: request {number} has n = {row.choices}, must be 1 here: one choice is sent"
            )
    start = chosen[0].at
    return [
        RequestSpec(
            prompt=" ".join(_words(row, scale)),
            max_tokens=max(1, round(row.output_tokens / scale)),
            at=(row.at - start) / speed,
        )
        for row in chosen
    ]


def _words(row: TraceRow, scale: float) -> list[str]:
    total = max(1, round(row.prompt_tokens / scale))
    size = max(1, round(TRACE_BLOCK / scale))
    words = [word for block in row.blocks for word in block_words(block, size)]
    return words[:total]
