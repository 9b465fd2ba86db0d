"""What a handoff costs beyond the prefill itself, with pages sent after their chunk or while it is computed.

    python tools/random_model.py 125M /tmp/random-125m
    python benchmarks/exposed_transfer.py [--model /tmp/random-125m] [--lens 512,1024,2048,4096,8192] [--rounds 5]
        [--device cuda --dtype bfloat16 --load-format dummy]

A prefill engine here and a decode engine in another process, NIXL between them. Every round sends one prompt of each
length in each mode, in random order, so that whatever else the machine does hits all modes alike:

    after       pages leave once their chunk is settled (`--kv-push-layers 0`)
    one shot    with the chunk, all layers after the last one
    auto        with the chunk, as many layers at once as are worth a write
    N layers    with the chunk, N layers at once

Prints one JSON object. `exposed_ms` is the time from the end of the prompt's last step to the handoff record, and
`share` that of the prefill time, from request to first token; medians of all rounds. `phases` divide the time from the
end of the prompt's last step until the decode engine has the request (`handoff_spans`), `counts` are of one handoff.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import NamedTuple

from handoff_spans import COMPUTED, Marks, counts, medians, phases

from tandem_engine.base import environment
from tandem_engine.base.names import RequestId
from tandem_engine.config import CacheConfig, DisaggConfig, EngineConfig, LoadFormat, SchedulerConfig
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.ipc.channels import IpcContext, Poller
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, Peer
from tandem_engine.messages.sampling import SamplingParams

POLL_S = 0.05
OUTPUT_TOKENS = 2


class Prompt(NamedTuple):
    """The decode process's part of a request."""

    rid: str
    tokens: tuple[int, ...]
    writer: Peer


class Measured(NamedTuple):
    prefill_s: float
    exposed_s: float
    phases: dict[str, float]
    counts: dict[str, int]


@dataclass(kw_only=True)
class Arrivals:
    """A sink: when the first token of each request came, and which requests have ended."""

    first: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def __call__(self, client: bytes, outputs: Sequence[TokenOutput]) -> None:
        del client
        for output in outputs:
            if output.token_ids:
                self.first.setdefault(output.rid, time.perf_counter())
            if output.finish is not None:
                assert output.finish.error is None, f"{output.rid}: {output.finish.error}"
                self.ended.add(output.rid)


@dataclass(kw_only=True)
class Writer:
    """A prefill engine in one mode."""

    engine: Engine
    arrivals: Arrivals
    poller: Poller
    marks: Marks

    @classmethod
    def build(cls, loaded: LoadedModel, config: EngineConfig, name: str, context: IpcContext, marks: Marks) -> "Writer":
        arrivals = Arrivals()
        port = EnginePort(worker_id=name, incarnation=f"{name}@1", context=context)
        engine = Engine.build(loaded, config, sink=arrivals, port=port)
        poller = Poller(engine.sockets(), engine.descriptors())
        return cls(engine=engine, arrivals=arrivals, poller=poller, marks=marks)

    def hand_over(self, prompt: Prompt, decode: Connection, receiver: Peer) -> Measured:
        """Compute a prompt and send it; returns once the receiver has its output."""
        self.marks.taken()
        before = self.engine.stats()
        began = time.perf_counter()
        self.engine.add(_request(prompt, HandoffSide.SEND, receiver))
        while (now := self.engine.stats()).handed_over_total == before.handed_over_total:
            assert now.transfer_failures_total == before.transfer_failures_total, f"{prompt.rid} was not handed over"
            if not self.engine.step():
                self.poller.wait(POLL_S)
        exposed = now.transfer_exposed_s - before.transfer_exposed_s
        rid, theirs = decode.recv()
        assert rid == prompt.rid
        ours = self.marks.taken()
        computed = max(mark.began for mark in ours if mark.label == COMPUTED)
        return Measured(self.arrivals.first[prompt.rid] - began, exposed, phases(ours, theirs, computed), counts(ours))


def _request(prompt: Prompt, side: HandoffSide, peer: Peer) -> GenerateRequest:
    return GenerateRequest(
        rid=RequestId(prompt.rid),
        input_ids=prompt.tokens,
        sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0),
        handoff=Handoff(side=side, room=prompt.rid, generation=1, peer=peer),
    )


def _config(args: argparse.Namespace) -> EngineConfig:
    longest, chunk = max(args.lens) + 64, args.chunk
    return EngineConfig(
        model_path=args.model,
        load_format=LoadFormat(args.load_format),
        device=args.device,
        dtype=args.dtype,
        threads=1,
        context_length=longest + OUTPUT_TOKENS + 1,
        cache=CacheConfig(num_pages=2 + longest // 16 * 2, enable_prefix_cache=False),
        scheduler=SchedulerConfig(
            context_length=longest + OUTPUT_TOKENS + 1,
            chunked_prefill_size=chunk,
            max_prefill_tokens=chunk,
            # One at a time, so that each engine on a device has few graphs to capture.
            max_running_requests=2,
        ),
    )


def noting() -> Marks:
    """Of this process, from now on."""
    marks = Marks()
    marks.watch_transport()
    marks.watch_stages()
    return marks


def receive(parent: Connection, config: EngineConfig) -> None:
    """The decode process: takes prompts from `parent` and tells when each has its output."""
    arrivals, marks = Arrivals(), noting()
    port = EnginePort(worker_id="decode", incarnation="decode@1", context=IpcContext())
    engine = Engine.build(load(config, progress=False), config, sink=arrivals, port=port)
    poller = Poller(engine.sockets(), [*engine.descriptors(), parent.fileno()])
    parent.send(engine.me)
    while True:
        worked = engine.step()
        for rid in arrivals.ended:
            parent.send((rid, marks.taken()))
        arrivals.ended.clear()
        if parent.poll(0):
            prompt = parent.recv()
            engine.add(_request(prompt, HandoffSide.RECEIVE, prompt.writer))
        elif not worked:
            poller.wait(POLL_S)


def measure(args: argparse.Namespace, config: EngineConfig, decode: Connection) -> dict[str, object]:
    loaded = load(config, progress=False)
    receiver: Peer = decode.recv()
    layers = loaded.model_config.num_layers
    modes = {"after": 0, "one shot": layers, "auto": None} | {f"{n} layers": n for n in args.layers}
    context, marks = IpcContext(), noting()
    writers = {
        name: Writer.build(loaded, replace(config, disagg=DisaggConfig(kv_push_layers=pushed)), f"p{i}", context, marks)
        for i, (name, pushed) in enumerate(modes.items())
    }
    dice = random.Random(0)
    cases = [(name, length) for name in writers for length in args.lens]
    measured: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    for turn in range(args.rounds + 1):
        for name, length in dice.sample(cases, len(cases)):
            tokens = tuple(dice.randrange(1, loaded.model_config.vocab_size) for _ in range(length))
            prompt = Prompt(f"{name}-{length}-{turn}", tokens, writers[name].engine.me)
            decode.send(prompt)
            time.sleep(POLL_S)  # the grant shall be there, as it is wherever decode has memory
            result = writers[name].hand_over(prompt, decode, receiver)
            if turn > 0:
                measured[name, length].append(result)
    token_bytes = writers["after"].engine.geometry.page_bytes // writers["after"].engine.geometry.page_size
    for writer in writers.values():
        writer.engine.close()
    return {
        "benchmark": "exposed_transfer",
        "model": args.model,
        "layers": layers,
        "kv_bytes_per_token": token_bytes,
        "chunk": args.chunk,
        "rounds": args.rounds,
        "results": [_row(name, length, measured[name, length]) for length in args.lens for name in writers],
    }


def _row(mode: str, length: int, measured: list[Measured]) -> dict[str, object]:
    prefill = statistics.median(one.prefill_s for one in measured)
    exposed = statistics.median(one.exposed_s for one in measured)
    return {
        "tokens": length,
        "mode": mode,
        "prefill_ms": round(prefill * 1e3, 2),
        "exposed_ms": round(exposed * 1e3, 3),
        "share": round(statistics.median(one.exposed_s / one.prefill_s for one in measured), 4),
        "phases": medians([one.phases for one in measured]),
        "counts": measured[-1].counts,
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tandem-mini")
    parser.add_argument("--lens", type=_numbers, default=[512, 1024, 2048, 4000])
    parser.add_argument("--layers", type=_numbers, default=[1], help="modes with so many layers at once")
    parser.add_argument("--chunk", type=int, default=SchedulerConfig().chunked_prefill_size)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of both engines")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--load-format", choices=[kind.value for kind in LoadFormat], default="auto")
    args = parser.parse_args()
    environment.set_default("UCX_LOG_LEVEL", "fatal")
    environment.set_default("NIXL_LOG_LEVEL", "FATAL")
    config = _config(args)
    here, there = multiprocessing.get_context("spawn").Pipe()
    decode = multiprocessing.get_context("spawn").Process(target=receive, args=(there, config), daemon=True)
    decode.start()
    try:
        print(json.dumps(measure(args, config, here)))
    finally:
        decode.kill()
        decode.join()


if __name__ == "__main__":
    main()
