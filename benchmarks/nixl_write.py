"""A handoff's transfer against a raw NIXL WRITE of the same pages, between two processes on one machine.

    python benchmarks/nixl_write.py [--page-tokens 16,64] [--prompts 512,1024,...,32768] [--rounds 9]
        [--layers 6 --heads 2 --head-dim 64 --dtype float32] [--contiguous]

For the KV of Qwen3-0.6B, 32k tokens of which are 3.5 GiB in each of the two processes:

    python benchmarks/nixl_write.py --layers 28 --heads 8 --head-dim 128 --dtype bfloat16

For each prompt every round moves the same pages in four ways, in random order, each process on a core of its own:

    bare      one WRITE with one descriptor per page, the sender spinning on its state; the receiver is not notified
    raw       the same with NIXL's notification, the receiver spinning, too: until the receiver has been notified
    sampled   our transport and control channel, both sides asleep until woken: pushes, digests of the sender, the
              handoff record by ZMQ, digests of the receiver: until it has found all pages to be what was sent
    full      the same with digests of every byte

and times the digests of both sides alone, of pages that have just been written. Prints one JSON object; milliseconds
and ratios are medians of the rounds. `ratio` is raw over sampled, `ratio_best` that of the fastest rounds, `of_bare`
bare over sampled, `digest_share` the digests of both sides over the bare WRITE. `phases` divide the time of `sampled`
(`handoff_spans`), `counts` are what it costs the host. Pages are in shuffled order unless `--contiguous`, and of the
bundled model's shape unless other flags say so.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from handoff_spans import PROVED, RECEIVED, RECORD, Marks, counts, medians, phases

from tandem_engine.base import environment
from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl.transport import NixlTransport, region_of
from tandem_engine.disaggregation.peers import PeerChannels, PeerInbound
from tandem_engine.disaggregation.prefill import portions_of
from tandem_engine.disaggregation.transport import DigestOrder, Digests, Push, PushDone, PushKey
from tandem_engine.ipc.channels import IpcContext, Poller
from tandem_engine.memory.pool import KvPool
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import HandoffRecord, Hello, PeerMessage

TIMEOUT_S = 30.0
NOTIFIED = b"raw"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Shape(NamedTuple):
    """Of a pool, the same on both sides."""

    pages: int
    page_tokens: int
    layers: int
    heads: int
    head_dim: int
    dtype: str
    device: str

    def pool(self) -> KvPool:
        """Filled, so that memory backs it from the start."""
        pool = KvPool(
            num_pages=self.pages + 1,
            num_layers=self.layers,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            page_size=self.page_tokens,
            dtype=DTYPES[self.dtype],
            device=self.device,
        )
        pool.data.copy_(torch.arange(pool.data[0].numel()).view(pool.data[0].shape))
        return pool


class Turn(NamedTuple):
    """What the receiver shall take part in."""

    way: str
    room: str
    target: tuple[PageId, ...]


@dataclass(kw_only=True)
class End:
    """One process: a pool, our transport and control channel, and a raw agent."""

    pool: KvPool
    transport: NixlTransport
    peers: PeerChannels
    poller: Poller
    raw: Any
    bare: Any
    """Another agent: a notification would keep the next WRITE waiting."""
    digester: PageDigester
    marks: Marks

    @classmethod
    def build(cls, name: str, shape: Shape) -> "End":
        pool, context, marks = shape.pool(), IpcContext(), Marks()
        marks.watch_transport()
        inbound: PeerInbound = PeerInbound(context, "127.0.0.1", 0, inbound=PeerMessage, outbound=PeerMessage)
        me = Peer(worker_id=name, incarnation=f"{name}@1", endpoint=inbound.endpoint, compat_hash="")
        transport = NixlTransport(me=me, pool=pool, clock=MonotonicClock())
        return cls(
            pool=pool,
            transport=transport,
            peers=PeerChannels(context=context, inbound=inbound, me=me),
            poller=Poller([inbound.socket], [transport.fileno()]),
            raw=make_raw_agent(f"raw-{name}", pool),
            bare=make_raw_agent(f"bare-{name}", pool),
            digester=PageDigester(pool),
            marks=marks,
        )

    def digest_seconds(self, pages: Sequence[PageId], kind: DigestKind) -> float:
        began = time.perf_counter()
        self.digester.begin(pages, room="room", generation=1, first=0, kind=kind).take()
        return time.perf_counter() - began


def make_raw_agent(name: str, pool: KvPool) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    region = region_of(pool)
    agent.register_memory([(pool.address, pool.total_bytes, region.device_id, "")], region.device)
    return agent


def keep_to_core(number: int) -> None:
    """One core for each process: two that spin on one would wait for each other's time slices."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


# The receiver


def receive(parent: Connection, shape: Shape) -> None:
    """Takes part in one turn after the other; answers each with when it was over."""
    torch.set_num_threads(1)
    keep_to_core(1)
    end = End.build("receiver", shape)
    metadata = [agent.get_agent_metadata() for agent in (end.raw, end.bare)]
    parent.send((end.transport.hello(), metadata, end.pool.address))
    while (turn := parent.recv()) is not None:
        match turn.way:
            case "bare":
                parent.send(None)
                while not parent.poll(0.0005):  # until the sender is done; over TCP it needs this side's progress
                    end.bare.get_new_notifs()
                parent.recv()
                parent.send([end.digest_seconds(turn.target, kind) for kind in DigestKind])
            case "raw":
                parent.send(None)
                while not end.raw.get_new_notifs():
                    pass
                parent.send(time.perf_counter())
            case way:
                end.transport.expect(1)
                parent.send(None)
                end.marks.taken()
                parent.send((verified(end, turn, DigestKind(way)), end.marks.taken()))
                end.transport.expect(0)
    end.transport.close()


def verified(end: End, turn: Turn, kind: DigestKind) -> float:
    """When all pages were found to be what the handoff record says."""
    sent: tuple[int, ...] = ()
    while True:
        for message in end.peers.receive():
            assert isinstance(message, HandoffRecord)
            sent = message.digests
            end.marks.note(RECORD)
            end.transport.digest(DigestOrder(room=turn.room, generation=1, pages=turn.target, kind=kind, tail=0))
        for event in end.transport.poll():
            assert isinstance(event, Digests)
            end.marks.note(PROVED)
            assert event.digests == sent, "a page arrived wrong"
            return time.perf_counter()
        end.poller.wait(TIMEOUT_S)


# The sender


@dataclass(kw_only=True)
class Sender:
    """The other process, and what it knows of the receiver."""

    end: End
    receiver: Connection
    hello: Hello
    raw_target: int
    """Address of the receiver's pool."""
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    phases: list[dict[str, float]] = field(default_factory=list)
    """Of each handoff with sampled digests."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of the last one."""
    _rooms: int = 0

    @classmethod
    def connect(cls, receiver: Connection, shape: Shape) -> "Sender":
        end = End.build("sender", shape)
        hello, metadata, address = receiver.recv()
        end.transport.connect(hello)
        for agent, theirs in zip((end.raw, end.bare), metadata, strict=True):
            agent.add_remote_agent(theirs)
        return cls(end=end, receiver=receiver, hello=hello, raw_target=address)

    def move(self, way: str, source: tuple[PageId, ...], target: tuple[PageId, ...]) -> tuple[float, list[float]]:
        """Seconds of one transfer; for a bare one, those of the digests of each kind after it, too."""
        self._rooms += 1
        room = f"room-{self._rooms}"
        self.receiver.send(Turn(way, room, target))
        self.receiver.recv()
        began = time.perf_counter()
        if way == "bare":
            self._write_raw(self.end.bare, "bare-receiver", source, target, b"")
            seconds = time.perf_counter() - began
            here = [self.end.digest_seconds(source, kind) for kind in DigestKind]
            self.receiver.send(None)
            return seconds, [mine + theirs for mine, theirs in zip(here, self.receiver.recv(), strict=True)]
        if way == "raw":
            self._write_raw(self.end.raw, "raw-receiver", source, target, NOTIFIED)
            return self.receiver.recv() - began, []
        self.end.marks.taken()
        self._hand_over(room, source, target, DigestKind(way))
        ended, theirs = self.receiver.recv()
        if way == DigestKind.SAMPLED:
            ours = self.end.marks.taken()
            self.phases.append(phases(ours, theirs, began))
            self.counts = counts(ours)
        return ended - began, []

    def _write_raw(
        self, agent: Any, peer: str, source: tuple[PageId, ...], target: tuple[PageId, ...], notification: bytes
    ) -> None:
        size, here = self.end.pool.page_bytes, region_of(self.end.pool)
        kind, device = here.device, here.device_id  # as they are there
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(self.end.pool.address + page * size, size, device) for page in source], kind),
            agent.get_xfer_descs([(self.raw_target + page * size, size, device) for page in target], kind),
            peer,
            notification,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)

    def _hand_over(self, room: str, source: tuple[PageId, ...], target: tuple[PageId, ...], kind: DigestKind) -> None:
        portions = portions_of(region_of(self.end.pool).device)
        step = max(1, portions.push_bytes // self.end.pool.page_bytes)
        for first in range(0, len(source), step):
            pages = source[first : first + step]
            key = PushKey(room=room, generation=1, first=first, count=len(pages))
            goal = target[first : first + step]
            push = Push(key=key, peer=self.hello.sender.incarnation, source=pages, target=goal, digest=kind)
            self.end.transport.push(push)
        digests: dict[int, tuple[int, ...]] = {}
        while sum(map(len, digests.values())) < len(source):
            self.end.poller.wait(TIMEOUT_S)
            for event in self.end.transport.poll():
                assert isinstance(event, PushDone), event
                digests[event.key.first] = event.digests
                self.end.marks.note(RECEIVED)
        record = HandoffRecord(
            room=room,
            generation=1,
            sender=self.end.peers.me,
            first_token=0,
            pages=len(source),
            digests=tuple(digest for first in sorted(digests) for digest in digests[first]),
            output_ids=(1,),
            logprobs=None,
            cached_tokens=0,
        )
        assert self.end.peers.send(self.hello.sender, record)


WAYS = ("bare", "raw", *DigestKind)


def measure(sender: Sender, shape: Shape, prompt: int, args: argparse.Namespace) -> dict[str, object]:
    """All rounds of one prompt."""
    count = -(-prompt // shape.page_tokens)
    source = [PageId(page) for page in range(1, shape.pages + 1)]
    target = [*source]
    if not args.contiguous:
        sender.dice.shuffle(source)
        sender.dice.shuffle(target)
    sender.phases.clear()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    digests: list[list[float]] = []
    for turn in range(args.rounds + 1):
        for way in sender.dice.sample(WAYS, len(WAYS)):
            seconds, alone = sender.move(way, tuple(source[:count]), tuple(target[:count]))
            if turn > 0:
                times[way].append(seconds)
                digests += [alone] if alone else []
    found = summary(prompt, count * sender.end.pool.page_bytes, times, digests)
    return found | {"phases": medians(sender.phases[1:]), "counts": sender.counts}


def summary(prompt: int, size: int, times: dict[str, list[float]], digests: list[list[float]]) -> dict[str, object]:
    bare, raw, sampled, full = (statistics.median(times[way]) for way in WAYS)
    of_digests = [statistics.median(column) for column in zip(*digests, strict=True)]
    return {
        "prompt": prompt,
        "mib": round(size / (1 << 20), 1),
        **{f"{way}_ms": round(1e3 * statistics.median(times[way]), 3) for way in WAYS},
        "raw_gb_per_s": round(size / raw / 1e9, 2),
        "ratio": round(raw / sampled, 3),
        "ratio_best": round(min(times["raw"]) / min(times["sampled"]), 3),
        "of_bare": round(bare / sampled, 3),
        "ratio_full": round(raw / full, 3),
        **{
            f"digest_share{name}": round(seconds / bare, 4)
            for name, seconds in zip(("", "_full"), of_digests, strict=True)
        },
    }


def with_pages(page_tokens: int, args: argparse.Namespace) -> list[dict[str, object]]:
    """Every prompt in pages of one size."""
    pages = -(-max(args.prompts) // page_tokens)
    shape = Shape(pages, page_tokens, args.layers, args.heads, args.head_dim, args.dtype, args.device)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    receiver = context.Process(target=receive, args=(there, shape), daemon=True)
    cores = os.sched_getaffinity(0)
    receiver.start()
    there.close()  # so that the end of the receiver is the end of its answers
    try:
        keep_to_core(0)
        sender = Sender.connect(here, shape)
        rows = [{"page_tokens": page_tokens} | measure(sender, shape, prompt, args) for prompt in args.prompts]
        here.send(None)
        sender.end.transport.close()
    finally:
        receiver.join(TIMEOUT_S)
        receiver.kill()
        os.sched_setaffinity(0, cores)
    return rows


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-tokens", type=numbers, default=[16, 64])
    parser.add_argument("--prompts", type=numbers, default=[512 << power for power in range(7)])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu", help="of both pools: cpu (default) or cuda")
    parser.add_argument("--contiguous", action="store_true")
    args = parser.parse_args()
    environment.set_default("UCX_LOG_LEVEL", "fatal")
    environment.set_default("NIXL_LOG_LEVEL", "FATAL")
    torch.set_num_threads(1)
    rows = [row for page_tokens in args.page_tokens for row in with_pages(page_tokens, args)]
    print(json.dumps({"benchmark": "nixl_write", "rounds": args.rounds, "transfers": rows}))


if __name__ == "__main__":
    main()
