"""What grammars cost: decoding under a mask against free decoding, and grammar bombs against their limit.

    python benchmarks/structured_output.py [--model models/tandem-mini] [--rounds 5] [--threads 1]

Decoding: `count` streams, of which `constrained` follow a JSON schema that never ends. `ratio_to_free` is their
throughput over that of the same streams without a grammar; `overlap_ratio` is throughput with overlapped scheduling
over without, both constrained; `hidden` is the share of scheduling time, masks included, that ran beside a forward.
An overlap ratio above 1 says that deferring the sampling keeps the overlap.

Bombs: seconds from request to refusal, and the most that a stream decoding at that time waited for its next token, over
its median. The limits are 2 s of CPU and 128 MiB each.

Prints one JSON object per line.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

OUTPUT_LEN = 96
ENDLESS = GrammarSpec(
    kind=GrammarKind.JSON_SCHEMA,
    source='{"type": "array", "minItems": 1000000, "items": {"type": "object", "properties": {"name": {"type": '
    '"string"}, "size": {"type": "integer"}}, "required": ["name", "size"]}}',
)
BOMBS = {
    "multipleOf of nine digits": GrammarSpec(
        kind=GrammarKind.JSON_SCHEMA, source='{"type": "integer", "multipleOf": 100000007}'
    ),
    "29 regexes intersected": GrammarSpec(
        kind=GrammarKind.LARK,
        source="start: A\nA: " + " & ".join(f"/.*[a-z]{{{i}}}.{{{i}}}x.*/" for i in range(1, 30)),
    ),
    "rules that double 30 times": GrammarSpec(
        kind=GrammarKind.LARK,
        source="start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)) + '\nA30: "x"',
    ),
    "2,000 brackets": GrammarSpec(kind=GrammarKind.EBNF, source=f'root ::= {"(" * 2000}"a"{")" * 2000}'),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tandem-mini", help="checkpoint (default the bundled one)")
    parser.add_argument("--rounds", type=int, default=5, help="times each workload runs (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a forward (default 1)")
    args = parser.parse_args()
    config = EngineConfig(
        model_path=args.model,
        dtype="float32",
        threads=args.threads,
        scheduler=SchedulerConfig(context_length=1024),
        cache=CacheConfig(num_pages=64 * 32),
    )
    loaded = load(config, progress=False)
    for count, constrained in ((1, 1), (16, 8), (16, 16), (64, 64)):
        print(json.dumps(compare_decoding(loaded, count, constrained, args.rounds)), flush=True)
    for name, bomb in BOMBS.items():
        print(json.dumps(measure_bomb(loaded, name, bomb)), flush=True)


def compare_decoding(loaded: LoadedModel, count: int, constrained: int, rounds: int) -> dict[str, object]:
    free = [_request(f"r{i}", i, None) for i in range(count)]
    asked = [_request(f"r{i}", i, ENDLESS if i < constrained else None) for i in range(count)]
    normal_config = replace(loaded.config, scheduler=replace(loaded.config.scheduler, enable_overlap=False))
    with Engine.build(loaded, loaded.config) as overlapped, Engine.build(loaded, normal_config) as normal:
        outputs = [run(engine, asked)[1] for engine in (overlapped, normal)]
        assert outputs[0] == outputs[1], "overlap changes the output"
        seconds = [[run(overlapped, free)[0], run(overlapped, asked)[0], run(normal, asked)[0]] for _ in range(rounds)]
        before = overlapped.stats()
        run(overlapped, asked)
        after = overlapped.stats()
    tokens = count * OUTPUT_LEN
    return {
        "benchmark": "grammar",
        "streams": count,
        "constrained": constrained,
        "output_tokens_per_s": round(tokens / statistics.median(on for _, on, _ in seconds), 1),
        "ratio_to_free": round(statistics.median(free / on for free, on, _ in seconds), 3),
        "overlap_ratio": round(statistics.median(off / on for _, on, off in seconds), 3),
        "hidden": round((after.overlap_hidden_s - before.overlap_hidden_s) / (after.schedule_s - before.schedule_s), 3),
        "threads": loaded.threads,
    }


def measure_bomb(loaded: LoadedModel, name: str, bomb: GrammarSpec) -> dict[str, object]:
    arrivals: dict[str, list[float]] = {"bomb": [], "stream": []}

    def sink(_client: bytes, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            arrivals[output.rid].append(time.perf_counter())
            refusals.extend(filter(None, [output.finish.error if output.finish else None]))

    refusals: list[str] = []
    with Engine.build(loaded, loaded.config, sink=sink) as engine:
        engine.add(_request("stream", 0, None, max_tokens=900))
        while len(arrivals["stream"]) < 20:
            engine.step()
        began = time.perf_counter()
        engine.add(_request("bomb", 1, bomb))
        while not engine.scheduler.idle and not arrivals["bomb"]:
            if not engine.step():
                engine.scheduler.wait_for_grammar(0.05)
    gaps = [later - sooner for sooner, later in zip(arrivals["stream"], arrivals["stream"][1:], strict=False)]
    return {
        "benchmark": "bomb",
        "bomb": name,
        "seconds": round(arrivals["bomb"][0] - began, 2),
        "longest_gap_over_median": round(max(gaps) / statistics.median(gaps), 1),
        "refused": refusals[-1],
    }


def run(engine: Engine, requests: list[GenerateRequest]) -> tuple[float, list[tuple[int, ...]]]:
    engine.memory.clear_cache()
    began = time.perf_counter()
    outputs = engine.generate(requests)
    return time.perf_counter() - began, [output.token_ids for output in outputs]


def _request(rid: str, seed: int, grammar: GrammarSpec | None, max_tokens: int = OUTPUT_LEN) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=tuple((seed * 31 + i * 7) % 900 + 10 for i in range(32)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, grammar=grammar),
    )


if __name__ == "__main__":
    main()
