"""What a step and a prompt cost a real engine, by batch and by context. Not a command: see `cost_growth.py`."""

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from growth_fit import Curve

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_lab.bench.transformers_peer import Job, random_ids

STEPS = 32
"""Of decoding, that are timed."""
SHORT = 64
"""Prompt tokens of a row of a batch: so few that the batch is what counts."""
ATTENTION = "each token attends to all before it, n²/2 pairs in all, as in every exact transformer"


Prompt = tuple[int, ...]


class Prompts:
    """New random ones at each call, the same in each run."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._dice = random.Random(0)
        self.last: list[Prompt] = []

    def __call__(self, tokens: int, count: int) -> list[Prompt]:
        self.last = [random_ids(self._dice, tokens, self._vocab_size) for _ in range(count)]
        return self.last


def engine_curves(
    model: Path, *, batches: Sequence[int], contexts: Sequence[int], rounds: int, threads: int
) -> dict[str, Curve]:
    """A decode step by batch and by context, and a prompt by its length: milliseconds, medians of `rounds`."""
    with _engine(model, max(batches), max(contexts), threads) as engine:
        draw = Prompts(engine.model_config.vocab_size)
        _seconds(engine, draw(SHORT, 1), STEPS)
        by_batch = {batch: _decode_ms(engine, draw(SHORT, batch), rounds) for batch in batches}
        by_length, by_context = {}, {}
        for context in contexts:
            # A prompt of 32k tokens takes minutes: it is timed once, and its prefix then serves the decodes.
            times = rounds if context <= 4096 else 1
            by_length[context] = median(_prompt_ms(engine, draw(context, 1)) for _ in range(times))
            by_context[context] = _decode_ms(engine, draw.last, rounds)
    return {
        "decode step by batch": Curve(points=by_batch, unit="ms"),
        "decode step by context": Curve(points=by_context, unit="ms"),
        "prompt by length": Curve(points=by_length, unit="ms", reason=ATTENTION, reason_power=2.0),
    }


def _engine(model: Path, batch: int, context: int, threads: int) -> Engine:
    longest = context + STEPS + 32
    pages = 2 + longest // 16 + batch * ((SHORT + STEPS + 32) // 16 + 1)
    config = EngineConfig(
        model_path=str(model),
        dtype="float32",
        threads=threads,
        context_length=longest,
        scheduler=SchedulerConfig(max_running_requests=batch, chunked_prefill_size=2048),
        cache=CacheConfig(num_pages=pages),
    )
    loaded = load(config, progress=False)
    return Engine.build(loaded, loaded.config)


def _decode_ms(engine: Engine, prompts: Sequence[Prompt], rounds: int) -> float:
    """Of one step in which all decode: the lower quartile, which others on the machine disturb least."""
    steps: list[float] = []
    for _ in range(rounds):
        turns: list[float] = []
        _seconds(engine, prompts, 1 + STEPS, turns)
        # Prompts are computed in the first turns, and the last ones only settle.
        steps += [later - earlier for earlier, later in pairwise(turns[-STEPS // 2 : -3])]
    return quantiles(steps)[0] * 1e3


def _prompt_ms(engine: Engine, prompts: Sequence[Prompt]) -> float:
    engine.memory.clear_cache()
    return _seconds(engine, prompts, 1) * 1e3


def _seconds(engine: Engine, prompts: Sequence[Prompt], tokens: int, turns: list[float] | None = None) -> float:
    """To the last of `tokens` for each prompt. `turns`: gets the moment at which each of the engine's turns began."""
    noted = [] if turns is None else turns
    requests = [Job(prompt=prompt, output_len=tokens).request(f"growth-{n}") for n, prompt in enumerate(prompts)]
    began = time.perf_counter()
    outputs = engine.generate(requests, before_turn=lambda: noted.append(time.perf_counter()))
    seconds = time.perf_counter() - began
    short = [output for output in outputs if len(output.token_ids) != tokens]
    assert not short, f"{len(short)} outputs are not of {tokens} tokens, the first ended with {short[0].finish}"
    return seconds
