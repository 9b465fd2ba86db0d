"""The engine on a CPU against what memory and multipliers of the machine allow, measured in the same run.

    python benchmarks/cpu_engine.py [--models q25m,q125m,q500m] [--dtypes float32,bfloat16] [--threads 2] [--rounds 5]
                                    [--only decode,prefill] [--offline] [--profile] [--quantization int8]
                                    [--small-pages]

Models are random Qwen3s of three sizes, made in memory. Each round measures, on the threads that compute the forwards:

    memory      bytes per second that a sum over 256 MiB reads
    gemm        operations per second of a matrix product of 2,048 by 2,048 by 2,048 in the dtype
    decode      milliseconds per token of one stream, 128 tokens in and 128 out
    prefill     tokens per second of a prompt of 2,048 tokens
    offline     output tokens per second of 64 requests of 64 to 512 tokens in and 64 to 128 out (`--offline`)

`decode_share` is the least time in which memory gives the weights and the KV that a token reads, over the time it took;
`prefill_share` the least time for the operations of a prompt, projections and causal attention, over the time it took.
`shapes` is the rate of oneDNN's products at the shapes of the model's own projections, over `gemm`: what is missing
there no engine can make up for. Medians over rounds of figures of one round. Prints a JSON object per model and dtype.

`--small-pages` leaves the weights in pages of 4 KiB, which an engine moves to huge ones where the system has them.

`--profile` prints, instead, where the time of a prefill and of a decode step goes, layer by layer, by operation.
"""

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tandem_engine.base.linux import to_huge_pages
from tandem_engine.config import CacheConfig, EngineConfig, ModelConfig, QkNorm, RopeConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, weight_memory
from tandem_engine.model.blocks import Block
from tandem_engine.model.decoder import Decoder, build_decoder
from tandem_engine.model.layers.linear import projection
from tandem_engine.model.layers.mlp import FeedForward
from tandem_engine.model.layers.norm import Norm
from tandem_engine.model.loader import DummyWeights
from tandem_engine.model.quantization.scheme import Holding
from tandem_engine.model.tensor_names import expected_shapes
from tandem_lab.bench.transformers_peer import Job, mixed_jobs, random_ids

PROMPT = 2048
STREAM_IN, STREAM_OUT = 128, 128
CONTEXT = PROMPT + 64
PAGE_SIZE = 16
READ_BYTES = 256 << 20
SQUARE = 2048


def qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=16384,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=8192,
        rms_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        tie_embeddings=True,
        qk_norm=QkNorm.HEADS,
    )


MODELS = {
    "q25m": qwen3(384, 1152, 11, 6, 2, 64),
    "q125m": qwen3(768, 2304, 16, 12, 4, 64),
    "q500m": qwen3(1536, 4096, 19, 12, 4, 128),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a model's arithmetic and memory traffic come to."""

    config: ModelConfig
    dtype: torch.dtype
    holding: Holding

    @property
    def projection_shapes(self) -> list[tuple[int, int]]:
        """[out, in] of one layer."""
        c = self.config
        heads, kv = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
        return [
            (heads + kv, c.hidden_size),
            (c.hidden_size, heads),
            (2 * c.intermediate_size, c.hidden_size),
            (c.hidden_size, c.intermediate_size),
        ]

    @property
    def block_weights(self) -> int:
        return self.config.num_layers * sum(outputs * inputs for outputs, inputs in self.projection_shapes)

    @property
    def head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    def decode_bytes(self, context: float) -> float:
        """That a token behind `context` others reads."""
        c = self.config
        kv = 2 * c.num_layers * c.num_kv_heads * c.head_dim * context
        weight = 1 if self.holding is Holding.INT8 else self.dtype.itemsize
        return self.block_weights * weight + (self.head_weights + kv) * self.dtype.itemsize

    def prefill_operations(self, tokens: int) -> float:
        """Of a prompt: all projections, causal attention, one row of logits; multiplying and adding are two."""
        c = self.config
        pairs = tokens * (tokens + 1) / 2
        attention = 2 * c.num_layers * c.num_heads * c.head_dim * pairs
        return 2 * (self.block_weights * tokens + attention + self.head_weights)


class Subject:
    """An engine around random weights, and the thread that its forwards run on."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        threads: int,
        *,
        requests: int,
        holding: Holding,
        huge_pages: bool = True,
    ) -> None:
        torch.set_num_threads(1)
        self.cost = Cost(config=config, dtype=dtype, holding=holding)
        weights = DummyWeights(shapes=expected_shapes(config), dtype=dtype, device=torch.device("cpu"), holding=holding)
        self.model = build_decoder(config, weights, positions=config.max_position)
        if huge_pages:
            to_huge_pages(weight_memory(self.model))
        pages = 2 + max(CONTEXT // PAGE_SIZE + 1, requests * (640 // PAGE_SIZE + 1))
        self.config = EngineConfig(
            model_path="random",
            dtype=str(dtype).removeprefix("torch."),
            threads=threads,
            scheduler=SchedulerConfig(
                context_length=CONTEXT, chunked_prefill_size=PROMPT, max_running_requests=max(64, requests)
            ),
            cache=CacheConfig(num_pages=pages),
        )
        loaded = LoadedModel(config=self.config, model=self.model, dtype=dtype, threads=threads, text=None)
        self.engine = Engine.build(loaded, self.config)

    def on_forward_thread(self, work: Callable[[], float]) -> float:
        """Another thread would have a team of its own, and make this one's slower (`ForwardThread`)."""
        return self.engine._parts.executor.run(work)

    def seconds(self, jobs: list[Job]) -> float:
        self.engine.memory.clear_cache()
        began = time.perf_counter()
        outputs = self.engine.generate([job.request(f"r{i}") for i, job in enumerate(jobs)])
        seconds = time.perf_counter() - began
        assert [len(output.token_ids) for output in outputs] == [job.output_len for job in jobs]
        return seconds

    def decode_seconds(self) -> float:
        """Per token of one stream."""
        prompt = self._prompt(STREAM_IN)
        first = self.seconds([Job(prompt=prompt, output_len=1)])
        return (self.seconds([Job(prompt=prompt, output_len=STREAM_OUT)]) - first) / (STREAM_OUT - 1)

    def prefill_seconds(self) -> float:
        return self.seconds([Job(prompt=self._prompt(PROMPT), output_len=1)])

    def offline_tokens_per_s(self) -> float:
        jobs = mixed_jobs(64, input_len=512, output_len=128, vocab_size=self.cost.config.vocab_size, seed=1)
        return sum(job.output_len for job in jobs) / self.seconds(jobs)

    def _prompt(self, length: int) -> tuple[int, ...]:
        return random_ids(random.Random(length), length, self.cost.config.vocab_size)


def best_of(work: Callable[[], object], seconds: float = 0.25) -> float:
    """Seconds of the median call, within some time, after one that is not counted."""
    work()
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < deadline:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


class Limits:
    """Measured where forwards run."""

    def __init__(self, cost: Cost) -> None:
        self._read = torch.ones(READ_BYTES // 4)
        self._square = torch.randn(SQUARE, SQUARE).to(cost.dtype)
        self._cost = cost

    @torch.inference_mode()
    def memory(self) -> float:
        """Bytes per second."""
        return READ_BYTES / best_of(self._read.sum)

    @torch.inference_mode()
    def gemm(self) -> float:
        """Operations per second."""
        return 2 * SQUARE**3 / best_of(lambda: self._square @ self._square)

    @torch.inference_mode()
    def shapes(self) -> float:
        """The same at the shapes of a prompt's projections."""
        operations = seconds = 0.0
        for outputs, inputs in self._cost.projection_shapes:
            multiply = projection(torch.randn(outputs, inputs).to(self._cost.dtype))
            x = torch.randn(PROMPT, inputs).to(self._cost.dtype)
            seconds += best_of(lambda multiply=multiply, x=x: multiply(x))  # type: ignore[misc]
            operations += 2 * PROMPT * outputs * inputs
        return operations / seconds


def measure(subject: Subject, limits: Limits, only: set[str], *, offline: bool) -> dict[str, float]:
    """Of one round."""
    cost, run = subject.cost, subject.on_forward_thread
    figures: dict[str, float] = {}
    if "decode" in only:
        memory = run(limits.memory)
        taken = subject.decode_seconds()
        memory = statistics.mean((memory, run(limits.memory)))
        least = cost.decode_bytes(STREAM_IN + STREAM_OUT / 2) / memory
        figures |= {"memory_gb_per_s": memory / 1e9, "decode_ms": taken * 1e3, "decode_share": least / taken}
    if "prefill" in only:
        gemm = run(limits.gemm)
        taken = subject.prefill_seconds()
        gemm = statistics.mean((gemm, run(limits.gemm)))
        least = cost.prefill_operations(PROMPT) / gemm
        figures |= {
            "gemm_gflop_per_s": gemm / 1e9,
            "shapes": run(limits.shapes) / gemm,
            "prefill_tokens_per_s": PROMPT / taken,
            "prefill_share": least / taken,
        }
    if offline:
        figures["offline_tokens_per_s"] = subject.offline_tokens_per_s()
    return figures


@dataclass(kw_only=True, slots=True)
class Timers:
    """Seconds by name of operation."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self.timed(name):
                return function(*arguments)

        return call


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedNorm:
    """Implements `Norm`."""

    norm: Norm
    timers: Timers
    name: str = "norms"

    def __call__(self, x: Tensor) -> Tensor:
        with self.timers.timed(self.name):
            return self.norm(x)

    def of_sum(self, hidden: Tensor, delta: Tensor) -> Tensor:
        with self.timers.timed(self.name):
            return self.norm.of_sum(hidden, delta)


def timed_model(model: Decoder, timers: Timers) -> Decoder:
    """The same layers, one by one, each under its name."""

    def block(each: Block) -> Block:
        attention, feed_forward = each.attention, each.feed_forward
        assert isinstance(feed_forward, FeedForward), f"{type(feed_forward).__name__} in a model without experts"
        return replace(
            each,
            attention=replace(
                attention,
                norm=TimedNorm(norm=attention.norm, timers=timers),
                qkv=timers.around("qkv", attention.qkv),
                qk_norm=attention.qk_norm and TimedNorm(norm=attention.qk_norm, timers=timers, name="norms of heads"),
                output=timers.around("output", attention.output),
            ),
            feed_forward=replace(
                feed_forward,
                norm=TimedNorm(norm=feed_forward.norm, timers=timers),
                gate_up=timers.around("gate_up", feed_forward.gate_up),
                activation=timers.around("activation", feed_forward.activation),
                down=timers.around("down", feed_forward.down),
            ),
        )

    return replace(
        model,
        fused=None,
        blocks=tuple(block(each) for each in model.blocks),
        lm_head=timers.around("head", model.lm_head),
    )


def profile(subject: Subject) -> None:
    """Where the time of the layers goes; what is in no operation of its own is `rest`: attention, rotation, sums."""
    timers = Timers()
    loaded = LoadedModel(
        config=subject.config,
        model=timed_model(subject.model, timers),
        dtype=subject.cost.dtype,
        threads=subject.config.threads,
        text=None,
    )
    subject.engine.close()
    subject.engine = Engine.build(loaded, subject.config)
    subject.prefill_seconds()
    for name, run, steps in (("prefill", subject.prefill_seconds, 1), ("decode", subject.decode_seconds, 1)):
        timers.seconds.clear()
        total = run()
        count = STREAM_OUT + 1 if name == "decode" else steps
        parts = {part: seconds / count for part, seconds in timers.seconds.items()}
        parts["rest"] = total - sum(parts.values())
        shown = {part: round(seconds * 1e3, 3) for part, seconds in sorted(parts.items(), key=lambda item: -item[1])}
        print(json.dumps({"profile": name, "total_ms": round(total * 1e3, 3), **shown}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="sizes, comma-separated (default all)")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="decode,prefill", help="decode, prefill or both")
    parser.add_argument("--offline", action="store_true", help="64 mixed requests too; minutes at 500M")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--small-pages", action="store_true", help="leave weights in pages of 4 KiB")
    parser.add_argument("--quantization", choices=("dtype", "int8"), default="dtype", help="how projections are held")
    args = parser.parse_args()
    for name in args.models.split(","):
        for dtype in args.dtypes.split(","):
            subject = Subject(
                MODELS[name],
                getattr(torch, dtype),
                args.threads,
                requests=64 if args.offline else 1,
                holding=Holding(args.quantization),
                huge_pages=not args.small_pages,
            )
            if args.profile:
                print(json.dumps({"model": name, "dtype": dtype, "threads": args.threads}))
                profile(subject)
            else:
                report(subject, name, dtype, args)
            subject.engine.close()


def report(subject: Subject, name: str, dtype: str, args: argparse.Namespace) -> None:
    limits, only = Limits(subject.cost), set(args.only.split(","))
    subject.decode_seconds(), subject.prefill_seconds()
    rounds = [measure(subject, limits, only, offline=args.offline) for _ in range(args.rounds)]
    figures = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    shown = {key: round(value, 3) for key, value in figures.items()}
    facts = {"model": name, "dtype": dtype, "quantization": args.quantization, "threads": args.threads}
    print(json.dumps(facts | {"rounds": len(rounds)} | shown), flush=True)


if __name__ == "__main__":
    main()
