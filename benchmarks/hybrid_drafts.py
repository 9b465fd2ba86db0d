"""What a layer that predicts ahead (MTP) is worth on a model with states: tokens per second with it over without.

    python benchmarks/hybrid_drafts.py [--rounds 3] [--hidden 512] [--layers 8] [--tokens 64]

The model has random weights and the layers of Qwen3-Next, with an MTP layer beside them, and is larger than the caches
of usual machines. Of random weights no draft is right. So the layer drafts at its full cost, and of its tokens a given
share is then replaced by the right ones: what drafts gain, or cost, by how often they are right.

Each round runs the streams without drafts and with each setting in turn, in one process; `ratio` is the median of the
rounds' ratios. Engines have run `WARM_UP` times before, so that drafts of `adaptive` length are fitted. Outputs must be
equal to those without drafts, or the benchmark stops. Prints one JSON object per setting.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from tandem_engine.config import CacheConfig, DisaggConfig, EngineConfig, SchedulerConfig, SpecAlgorithm, SpecConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.speculative.interface import DraftRequest, DraftTokens, Proposer
from tandem_testing.draft_heads import add_mtp_layer

VOCABULARY = 8192
PROMPT = 64
WARM_UP = 2
STREAMS = (1, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    right: float
    """Share of drafts that are right."""
    adaptive: bool

    @property
    def spec(self) -> dict[str, object]:
        return {"algorithm": SpecAlgorithm.EAGLE, "num_draft_tokens": 3, "adaptive": self.adaptive}


SETTINGS = [
    Setting(right=0.0, adaptive=False),
    *(Setting(right=right, adaptive=True) for right in (0.0, 0.5, 0.8, 1.0)),
]


class Corrected:
    """The drafts of another proposer, at its cost, with a share of them right."""

    def __init__(self, inner: Proposer, texts: Sequence[Sequence[int]], right: float) -> None:
        """`texts`: prompts with the outputs that are expected."""
        self.name, self.writes_kv = inner.name, inner.writes_kv
        self.ready, self.release = inner.ready, inner.release
        self._inner = inner
        self._texts = {tuple(text[:PROMPT]): [*text] for text in texts}
        self._right = right
        self._dice = random.Random(7)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
        drafts = self._inner.propose(requests)
        pairs = zip(requests, drafts.chains, strict=True)
        return replace(drafts, chains=tuple(self._corrected(request, len(chain)) for request, chain in pairs))

    def _corrected(self, request: DraftRequest, count: int) -> tuple[int, ...]:
        text = self._texts[tuple(request.token_ids(0, PROMPT))]
        wanted = text[request.seq_len : request.seq_len + count]
        return tuple(token if self._dice.random() < self._right else token ^ 1 for token in wanted)


def model(folder: Path, *, hidden: int, layers: int) -> LoadedModel:
    """Of random weights, written to `folder`."""
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    torch.manual_seed(3)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden,
        shared_expert_intermediate_size=hidden,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        eos_token_id=None,
    )
    config.architectures = ["Qwen3NextForCausalLM"]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    options = EngineConfig(
        model_path=str(add_mtp_layer(folder)),
        dtype="float32",
        disagg=DisaggConfig(transport="none"),
        scheduler=SchedulerConfig(context_length=1024, max_running_requests=8),
        cache=CacheConfig(num_pages=512),
    )
    return load(options, progress=False)


def requests(streams: int, tokens: int) -> list[GenerateRequest]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    draw = torch.Generator().manual_seed(5)
    prompts = torch.randint(VOCABULARY, (streams, PROMPT), generator=draw).tolist()
    return [
        GenerateRequest(rid=f"{number}", input_ids=tuple(prompt), sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]


def run(engine: Engine, asked: Sequence[GenerateRequest]) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens per second and outputs. The cache starts empty."""
    engine.memory.clear_cache()
    began = perf_counter()
    outputs = [output.token_ids for output in engine.generate([*asked])]
    return sum(map(len, outputs)) / (perf_counter() - began), outputs


def measure(loaded: LoadedModel, streams: int, *, tokens: int, rounds: int) -> list[dict[str, object]]:
    """One row per setting."""
    asked = requests(streams, tokens)
    with ExitStack() as stack:
        plain = stack.enter_context(Engine.build(loaded, loaded.config))
        _, expected = run(plain, asked)
        texts = [[*each.input_ids, *output] for each, output in zip(asked, expected, strict=True)]
        engines: list[Engine] = []
        for setting in SETTINGS:
            spec = SpecConfig(draft_model_path=loaded.config.model_path, **setting.spec)
            engine = stack.enter_context(Engine.build(loaded, replace(loaded.config, speculative=spec)))
            speculation = engine.scheduler._shared.speculation
            speculation.proposer = Corrected(speculation.proposer, texts, setting.right)
            for _ in range(WARM_UP):
                assert run(engine, asked)[1] == expected, f"{setting} changes the output"
            engines.append(engine)
        rates = [[run(engine, asked)[0] for engine in (plain, *engines)] for _ in range(rounds)]
        return [
            {
                "streams": streams,
                "right": setting.right,
                "adaptive": setting.adaptive,
                "tokens_per_s": round(median(row[number] for row in rates), 1),
                "without_drafts": round(median(row[0] for row in rates), 1),
                "ratio": round(median(row[number] / row[0] for row in rates), 3),
                "drafted": engine.stats().speculation.drafted_total,
                "load_average": os.getloadavg()[0],
            }
            for number, (setting, engine) in enumerate(zip(SETTINGS, engines, strict=True), start=1)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512, help="size of the hidden states (default 512)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="outputs of each stream (default 64)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        loaded = model(Path(folder), hidden=args.hidden, layers=args.layers)
        for streams in STREAMS:
            for row in measure(loaded, streams, tokens=args.tokens, rounds=args.rounds):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
