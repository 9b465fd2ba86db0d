"""What drafts are worth: tokens per second with each proposer over tokens per second without.

    python benchmarks/speculation.py [--model models/tandem-mini] [--rounds 5] [--draft-model PATH] [--threads 1]

Workloads: text that repeats itself, which n-gram lookup is for; stories, which do not repeat; the same stories
sampled at temperature 1. Each with one stream and with eight. Outputs have a fixed length.

Each round runs the workload without drafts and then with each proposer, so that a noisy machine disturbs all
alike; `ratio` is the median of the rounds' ratios. Engines have run it `WARM_UP` times before, to know what drafts
cost. Outputs must be equal to those without drafts, token for token, or the benchmark stops. Prints one JSON object
per workload and proposer.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpecAlgorithm, SpecConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

OUTPUT = 128
WARM_UP = 3
WORDS = "river lamp stone green window seven market cloud paper gold morning bridge quiet apple winter road".split()
OPENINGS = (
    "Once upon a time, in a village by the sea,",
    "There was once a fox who",
    "In the old house on the hill lived",
    "The little bear woke up early and",  # words: ok
    "Every evening the baker",
    "A girl named Ada found",
    "When the snow had melted,",
    "Nobody in the town knew why",  # words: ok
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Texts to be continued, each by `OUTPUT` tokens."""

    name: str
    texts: tuple[str, ...]
    temperature: float = 0.0

    def requests(self, loaded: LoadedModel) -> list[GenerateRequest]:
        assert loaded.text is not None, "the benchmark needs a model with a tokenizer"
        return [
            GenerateRequest(
                rid=f"{self.name}-{index}",
                input_ids=tuple(loaded.text.encode(text)),
                sampling=SamplingParams(max_tokens=OUTPUT, temperature=self.temperature, seed=index, ignore_eos=True),
            )
            for index, text in enumerate(self.texts)
        ]


def repeating(seed: int) -> str:
    """A list of words, three times and begun again."""
    line = ", ".join(random.Random(seed).sample(WORDS, 12))
    return "\n".join([line] * 3) + "\n"


def workloads() -> list[Workload]:
    repetitive = tuple(repeating(seed) for seed in range(8))
    kinds = (("repetitive", repetitive, 0.0), ("stories", OPENINGS, 0.0), ("stories, sampled", OPENINGS, 1.0))
    return [
        Workload(name=f"{name}, {count} streams", texts=texts[:count], temperature=temperature)
        for name, texts, temperature in kinds
        for count in (1, 8)
    ]


def proposers(model: str, draft_model: str | None) -> dict[str, SpecConfig]:
    """Those that the model has: n-gram always, EAGLE with a head beside the model, DRAFT when it is named."""
    found = {"NGRAM": SpecConfig(algorithm=SpecAlgorithm.NGRAM)}
    if Path(f"{model}-eagle").is_dir():
        found["EAGLE"] = SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=f"{model}-eagle")
    if draft_model is not None:
        found["DRAFT"] = SpecConfig(algorithm=SpecAlgorithm.DRAFT, draft_model_path=draft_model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tandem-mini", help="checkpoint (default the bundled one)")
    parser.add_argument("--draft-model", default=None, help="checkpoint for DRAFT (default: DRAFT is left out)")
    parser.add_argument("--rounds", type=int, default=5, help="times each workload runs (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a forward (default 1)")
    args = parser.parse_args()
    config = EngineConfig(
        model_path=args.model,
        dtype="float32",
        threads=args.threads,
        scheduler=SchedulerConfig(context_length=1024),
        cache=CacheConfig(num_pages=1024),
    )
    loaded = load(config, progress=False)
    for workload in workloads():
        for row in compare(loaded, workload, proposers(args.model, args.draft_model), args.rounds):
            print(json.dumps(row), flush=True)


def compare(
    loaded: LoadedModel, workload: Workload, specs: dict[str, SpecConfig], rounds: int
) -> list[dict[str, object]]:
    """One row per proposer."""
    requests = workload.requests(loaded)
    with ExitStack() as stack:
        plain = stack.enter_context(Engine.build(loaded, loaded.config))
        engines = {
            name: stack.enter_context(Engine.build(loaded, replace(loaded.config, speculative=spec)))
            for name, spec in specs.items()
        }
        expected = run(plain, requests)[1]
        for name, engine in engines.items():
            for _ in range(WARM_UP):
                assert run(engine, requests)[1] == expected, f"{workload.name}: {name} changes the output"
        seconds = [
            {"": run(plain, requests)[0], **{name: run(engine, requests)[0] for name, engine in engines.items()}}
            for _ in range(rounds)
        ]
        return [row(workload, name, engine, seconds) for name, engine in engines.items()]


def run(engine: Engine, requests: Sequence[GenerateRequest]) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds and outputs. The cache starts empty: a repeated prompt must not look like speed."""
    engine.memory.clear_cache()
    began = time.perf_counter()
    outputs = engine.generate(requests)
    return time.perf_counter() - began, [output.token_ids for output in outputs]


def row(workload: Workload, name: str, engine: Engine, seconds: list[dict[str, float]]) -> dict[str, object]:
    tokens = OUTPUT * len(workload.texts)
    stats = engine.stats().speculation
    assert stats is not None, f"{name} does not speculate"
    return {
        "benchmark": "speculation",
        "workload": workload.name,
        "proposer": name,
        "output_tokens_per_s": round(tokens / statistics.median(round_[name] for round_ in seconds), 1),
        "without_drafts": round(tokens / statistics.median(round_[""] for round_ in seconds), 1),
        "ratio": round(statistics.median(round_[""] / round_[name] for round_ in seconds), 3),
        "tokens_per_run": round(1 + stats.accepted_total / max(1, stats.runs_total), 2),
        "accepted": round(stats.accepted_total / max(1, stats.drafted_total), 3),
    }


if __name__ == "__main__":
    main()
