"""What typed KV memory is worth: latents, windows and states over the memory that keeps K and V of all tokens.

    python benchmarks/cache_groups.py [--only NAME,...] [--rounds 5] [--tokens 4096] [--base DIR]

Models have random weights and few parameters, with the layers of real ones. Each ratio is of two runs that take turns
in one process, and of several rounds the median. Prints one JSON object: `value` and target of each ratio (`at_most`,
`at_least`). Exit status 1 if one is missed; on a busy machine times may be: `load_average` shows how busy it was.

    windows     requests of `--tokens` that have pages at once in one pool, five of six layers with a window of 1,024,
                over those where every layer keeps all tokens
    handoff     bytes of pages that a handoff sends for a prompt of `--tokens`, every second layer with a window of 128,
                over those where every layer keeps all tokens
    turns       hybrid model: time to the first token of turn 2 of a chat of `--tokens`, and of the second and third
                question after the same text, over that of a first prompt
    snapshots   hybrid model, eight streams: a decode step that also copies every state to an anchor, over one without
    latents     KV bytes per token and time of a decode step at `--tokens`, over a model with K and V per head instead
    misses      prompts that share nothing: throughput with a prefix cache over without, windows and hybrid
    dense       `tandem bench offline` of the bundled model: this checkout's throughput over that of `--base`
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tandem_engine.config import CacheConfig, DisaggConfig, EngineConfig, HostConfig, LoadFormat, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.assembly import cache_layout
from tandem_engine.engine.loaded_model import LoadedModel, kv_geometry, load
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 512
STREAMS = 8
OUTPUTS = 24
CHUNK = 512
"""Prompt tokens of a step, as far as memory is concerned."""
OFFLINE = ("--skip-reference", "--json", "--rounds", "1", "--num-prompts", "32")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "eos_token_id": None,
}
HYBRID = {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LATENT = {
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "first_k_dense_replace": 1,
}
PER_HEAD = {"num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 192}
"""What latents stand for: keys of 192 and values of 128 numbers per head, the values filled up."""
HEAD_FIELDS = ("num_attention_heads", "num_key_value_heads")
PUBLISHED_HEADS = 128
"""Of DeepSeek V3: by which bytes are compared."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """What was measured, and what is good enough."""

    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def reached(self) -> bool:
        above = self.at_most is None or self.value <= self.at_most
        return above and (self.at_least is None or self.value >= self.at_least)

    @property
    def fields(self) -> dict[str, float | bool | None]:
        name, target = ("at_least", self.at_least) if self.at_most is None else ("at_most", self.at_most)
        return {"value": round(self.value, 4), name: target, "reached": self.reached}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all cases share."""

    rounds: int
    tokens: int
    folder: Path
    base: Path | None

    def model(self, config_class: str, **fields: Any) -> LoadedModel:
        """Of random weights."""
        import transformers

        path = self.folder / f"{config_class}-{len([*self.folder.iterdir()])}"
        config = getattr(transformers, config_class)(**{**SIZES, **fields})
        config.architectures = [config_class.removesuffix("Config").removesuffix("Text") + "ForCausalLM"]
        config.save_pretrained(path)
        options = EngineConfig(
            model_path=str(path),
            dtype="float32",
            load_format=LoadFormat.DUMMY,
            disagg=DisaggConfig(transport="none"),
            context_length=2 * self.tokens,
            scheduler=SchedulerConfig(max_running_requests=64, enable_overlap=False),
        )
        return load(options, progress=False)

    def engine(self, model: LoadedModel, *, pages: int, cached: bool = True) -> Engine:
        cache = CacheConfig(num_pages=pages, enable_prefix_cache=cached)
        return Engine.build(model, replace(model.config, cache=cache))

    def median(self, measure: Callable[[int], float]) -> float:
        """Of `measure` of each round."""
        return median(measure(number) for number in range(self.rounds))


def request(rid: str, tokens: Sequence[int], *, outputs: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=tuple(tokens), sampling=sampling)


def prompt(seed: int, tokens: int) -> list[int]:
    """Unlike that of any other seed from its first token on."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (tokens,), generator=draw).tolist()


def seconds(engine: Engine, *requests: GenerateRequest) -> float:
    """That `requests` take together. Raises `RuntimeError` where one fails."""
    began = time.perf_counter()
    answers = engine.generate([*requests])
    taken = time.perf_counter() - began
    for answer in answers:
        if answer.finish.reason is not FinishReason.LENGTH:
            raise RuntimeError(f"{answer.rid}: {answer.finish}")
    return taken


def windows(bench: Bench) -> dict[str, Ratio]:
    """By memory alone: nothing is computed. Host memory needs pages of all layers, so swap space merges the groups."""
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    model = bench.model("Gemma3TextConfig", num_hidden_layers=6, sliding_window=1024, layer_types=kinds)
    pool = CacheConfig(kv_cache_bytes=256 << 20)
    merged = replace(pool, host=HostConfig(swap_bytes=1 << 20))
    counts = []
    for cache in (pool, merged):
        with Engine.build(model, replace(model.config, cache=cache)) as engine:
            counts.append(fitting(engine.memory, bench.tokens))
    return {"windows_requests": Ratio(value=counts[0] / counts[1], at_least=3.0)}


def fitting(memory: KvMemory, tokens: int) -> int:
    """Requests of so many tokens that have their pages at once."""
    held: list[RequestKv] = []
    while (kv := memory.begin(prompt(len(held), tokens), space=BASE_SPACE, max_match=0)) is not None:
        held.append(kv)
        for stop in range(CHUNK, tokens + 1, CHUNK):
            if not memory.ensure(kv, stop):
                for each in held:
                    memory.release(each, (), checkpoint=False, after_step=None)
                return len(held) - 1
            memory.commit(kv, stop)
            memory.pass_by(kv)
    raise RuntimeError(f"{len(held)} requests have every row: lower the memory of the pool")


def handoff(bench: Bench) -> dict[str, Ratio]:
    """By the layout of an engine with peers."""
    kinds = ["sliding_attention", "full_attention"] * 3
    model = bench.model("Gemma3TextConfig", num_hidden_layers=6, sliding_window=128, layer_types=kinds)
    geometry = kv_geometry(model, model.config)
    blocks = -(-bench.tokens // geometry.page_size)
    sent = 0
    for group in cache_layout(model, geometry, model.config, has_peers=True).groups:
        seen = -(-min(bench.tokens, group.spec.reach.span or bench.tokens) // geometry.page_size)
        sent += seen * len(group.layers)
    return {"handoff_bytes": Ratio(value=sent / (blocks * geometry.num_layers), at_most=0.54)}


def turns(bench: Bench) -> dict[str, Ratio]:
    model = bench.model("Qwen3NextConfig", **HYBRID)
    text, question = bench.tokens * 7 // 8, bench.tokens // 64
    limits = {"turn_2": 0.2, "question_2": 0.3, "question_3": 0.3, "question_2_between": 0.3}
    found: dict[str, list[float]] = {name: [] for name in limits}
    between = bench.tokens * 27 // 32
    """Where another text is left: in the middle between two provisional states."""
    with bench.engine(model, pages=6 * bench.tokens * (bench.rounds + 1) // 16) as engine:
        for number in range(bench.rounds + 1):
            opening = prompt(9 * number, bench.tokens)
            first = seconds(engine, request(f"turn 1, {number}", opening, outputs=1))
            later = [*opening, *prompt(9 * number + 1, question)]
            times = {"turn_2": seconds(engine, request(f"turn 2, {number}", later, outputs=1))}
            for index in (2, 3):
                asked = [*opening[:text], *prompt(9 * number + index, bench.tokens - text)]
                times[f"question_{index}"] = seconds(engine, request(f"question {index}, {number}", asked, outputs=1))
            other = prompt(9 * number + 4, bench.tokens)
            engine.generate([request(f"other, {number}", other, outputs=1)])
            asked = [*other[:between], *prompt(9 * number + 5, bench.tokens - between)]
            times["question_2_between"] = seconds(engine, request(f"between, {number}", asked, outputs=1))
            if number:  # the first round warms up
                for name, value in times.items():
                    found[name].append(value / first)
    return {f"hybrid_{name}": Ratio(value=median(values), at_most=limits[name]) for name, values in found.items()}


def snapshots(bench: Bench) -> dict[str, Ratio]:
    """Streams of equal lengths, so that all of them pass a multiple of 64 in the same step."""
    model = bench.model("Qwen3NextConfig", **HYBRID)
    times: dict[bool, list[float]] = {True: [], False: []}
    copies = 4 * bench.rounds
    with bench.engine(model, pages=STREAMS * 4 * (copies + 4)) as engine:
        for stream in range(STREAMS):
            engine.add(request(f"stream {stream}", prompt(stream, 64), outputs=64 * (copies + 2)))
        states = engine._parts.pools.states
        assert states is not None, "a model without states"
        copy, copied = states.copy, 0

        def counted(copies: Sequence[tuple[int, int]]) -> None:
            nonlocal copied
            copied = len(copies)
            copy(copies)

        with pytest.MonkeyPatch.context() as patch, frozen_objects():
            patch.setattr(states, "copy", counted)
            while not engine.scheduler.idle:
                began = time.perf_counter()
                engine.step()
                if copied in (0, STREAMS):
                    times[copied == STREAMS].append(time.perf_counter() - began)
    return {"hybrid_snapshot_step": Ratio(value=median(times[True]) / median(times[False]), at_most=1.05)}


@contextmanager
def frozen_objects() -> Iterator[None]:
    """As in an engine's process: else collections walk all of torch and transformers, and come where objects stay."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def latents(bench: Bench) -> dict[str, Ratio]:
    models = [bench.model("DeepseekV3Config", **LATENT), bench.model("LlamaConfig", **PER_HEAD)]
    published = bench.model("DeepseekV3Config", **{**LATENT, **dict.fromkeys(HEAD_FIELDS, PUBLISHED_HEADS)})
    geometry = kv_geometry(published, published.config)
    with ExitStack() as stack:
        pages = 2 * bench.tokens // 16
        engines = [stack.enter_context(bench.engine(model, pages=pages)) for model in models]

        def round_of(number: int) -> float:
            text = prompt(0, bench.tokens)
            taken = []
            for engine in engines:
                once, more = (
                    seconds(engine, request(f"{number}, {outputs}", text, outputs=outputs)) for outputs in (1, OUTPUTS)
                )
                taken.append(more - once)
            return taken[0] / taken[1]

        round_of(-1)
        step = bench.median(round_of)
    per_head = geometry.page_size * PUBLISHED_HEADS * (192 + 128) * published.dtype.itemsize
    return {
        "latent_bytes": Ratio(value=geometry.page_bytes / per_head, at_most=0.05),
        "latent_decode": Ratio(value=step, at_most=0.5),
    }


def misses(bench: Bench) -> dict[str, Ratio]:
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    models = {
        "windows": bench.model("Gemma3TextConfig", num_hidden_layers=6, sliding_window=256, layer_types=kinds),
        "hybrid": bench.model("Qwen3NextConfig", **HYBRID),
    }
    found = {}
    for name, model in models.items():
        with ExitStack() as stack:
            pair = [stack.enter_context(bench.engine(model, pages=1000, cached=cached)) for cached in (True, False)]

            def round_of(number: int, pair: Sequence[Engine] = pair) -> float:
                load = [
                    request(f"{number}, {stream}", prompt(99 * number + stream, 500), outputs=OUTPUTS)
                    for stream in range(STREAMS)
                ]
                cached, plain = (seconds(engine, *load) for engine in pair)
                return plain / cached

            round_of(100)
            found[f"misses_{name}"] = Ratio(value=bench.median(round_of), at_least=0.97)
    return found


def dense(bench: Bench) -> dict[str, Ratio]:
    """Nothing without `--base`."""
    if bench.base is None:
        return {}
    base = bench.base

    def round_of(number: int) -> float:
        both = [ROOT, base] if number % 2 else [base, ROOT]
        rates = {checkout: offline_rate(checkout) for checkout in both}
        return rates[base] / rates[ROOT]

    return {"dense_offline": Ratio(value=bench.median(round_of), at_most=1.01)}


def offline_rate(checkout: Path) -> float:
    """Output tokens per second."""
    path = os.pathsep.join(str(checkout / part) for part in ("engine", "services", "lab"))
    model = str(ROOT / "models" / "tandem-mini")
    command = [sys.executable, "-m", *offline_module(checkout), *OFFLINE, "--model", model]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    return float(report["tandem"]["offline_output_tokens_per_s"])


def offline_module(checkout: Path) -> tuple[str, str]:
    """Module and command of the offline benchmark. Before there was a lab, the engine had it."""
    return ("tandem_lab" if (checkout / "lab").is_dir() else "tandem_engine.cli", "bench")


CASES: dict[str, Callable[[Bench], dict[str, Ratio]]] = {
    "windows": windows,
    "handoff": handoff,
    "turns": turns,
    "snapshots": snapshots,
    "latents": latents,
    "misses": misses,
    "dense": dense,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--base", type=Path, help="another checkout, for `dense`")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--only {unknown[0]}: one of {', '.join(CASES)}")
    torch.set_num_threads(1)
    ratios: dict[str, Ratio] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(rounds=args.rounds, tokens=args.tokens, folder=Path(folder), base=args.base)
        for name in names:
            ratios |= CASES[name](bench)
    report = {"tokens": args.tokens, "rounds": args.rounds, "load_average": os.getloadavg()[0]}
    print(json.dumps({**report, "ratios": {name: ratio.fields for name, ratio in ratios.items()}}, indent=1))
    return 0 if all(ratio.reached for ratio in ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
