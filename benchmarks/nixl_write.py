"""Bytes per second of `NixlTransport` against one raw NIXL WRITE of the same pages, between two processes.

    python benchmarks/nixl_write.py [--pages 512] [--page-kib 256] [--rounds 9] [--push-mib 4] [--contiguous]

The sender takes turns: a raw WRITE (one transfer, one descriptor per page, the caller spinning on its
state), then the transport (pushes of up to `--push-mib` from its own thread, both the page digests and the
notifications of a real handoff included). Prints one JSON object. `ratio` is transport over raw, from the
medians of the same run; `best_ratio` from the fastest rounds, which says more on a noisy machine. Pages are
in shuffled order on both sides unless `--contiguous`.
"""

import argparse
import json
import multiprocessing
import random
import select
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from tandem_engine import environment
from tandem_engine.clock import MonotonicClock
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl.transport import NixlTransport
from tandem_engine.disaggregation.prefill import PUSH_BYTES
from tandem_engine.disaggregation.transport import Arrived, Push, PushDone, PushKey
from tandem_engine.memory.pool import KvPool
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import Hello
from tandem_engine.names import PageId


class RawTarget(msgspec.Struct, frozen=True):
    """What the raw writer needs of the receiver."""

    metadata: bytes
    address: int


def make_pool(pages: int, page_bytes: int) -> KvPool:
    """`pages` usable pages of the bundled model's shape, 16 KiB a layer. Filled: memory backs them from the start."""
    pool = KvPool(
        num_pages=pages + 1,
        num_layers=page_bytes >> 14,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
        device="cpu",
    )
    assert pool.page_bytes == page_bytes, f"page of {pool.page_bytes} bytes, wanted {page_bytes}"
    pool.data.fill_(1.0)
    return pool


def make_transport(name: str, pool: KvPool) -> NixlTransport:
    me = Peer(worker_id=name, incarnation=f"{name}@1", endpoint="", compat_hash="")
    return NixlTransport(me=me, pool=pool, clock=MonotonicClock())


def make_raw_agent(name: str, pool: KvPool) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    agent.register_memory([(pool.address, pool.total_bytes, 0, "")], "DRAM")
    return agent


def receive(parent: Connection, pages: int, page_bytes: int) -> None:
    """The receiving process: lets writes of both kinds progress until told to stop."""
    pool = make_pool(pages, page_bytes)
    transport = make_transport("receiver", pool)
    raw = make_raw_agent("raw-receiver", pool)
    transport.expect(1)
    parent.send_bytes(msgspec.msgpack.encode(transport.hello()))
    parent.send_bytes(msgspec.msgpack.encode(RawTarget(raw.get_agent_metadata(), pool.address)))
    arrived = 0
    while not parent.poll(0.001):
        raw.get_new_notifs()
        arrived += sum(event.key.count for event in transport.poll() if isinstance(event, Arrived))
    arrived += sum(event.key.count for event in transport.poll() if isinstance(event, Arrived))
    parent.send(arrived)
    transport.close()


class RawWriter:
    """One WRITE of all pages, spun to its end."""

    def __init__(self, pool: KvPool, target: RawTarget) -> None:
        self._pool = pool
        self._target = target
        self._agent = make_raw_agent("raw-sender", pool)
        self._agent.add_remote_agent(target.metadata)

    def write(self, source: list[PageId], goal: list[PageId]) -> float:
        """Seconds."""
        size = self._pool.page_bytes
        start = time.perf_counter()
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs([(self._pool.address + page * size, size, 0) for page in source], "DRAM"),
            self._agent.get_xfer_descs([(self._target.address + page * size, size, 0) for page in goal], "DRAM"),
            "raw-receiver",
            b"raw",
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start
        assert state == "DONE", state
        self._agent.release_xfer_handle(handle)
        return seconds


class TransportWriter:
    """The same pages through the transport."""

    def __init__(self, pool: KvPool, hello: Hello, push_bytes: int) -> None:
        self._pool = pool
        self._push_bytes = push_bytes
        self._peer = hello.sender.incarnation
        self._room = 0
        self.transport = make_transport("sender", pool)
        self.transport.connect(hello)

    def write(self, source: list[PageId], goal: list[PageId]) -> float:
        """Seconds until the last push is reported done."""
        self._room += 1
        step = max(1, self._push_bytes // self._pool.page_bytes)
        start = time.perf_counter()
        for first in range(0, len(source), step):
            pages = tuple(source[first : first + step])
            key = PushKey(room=f"room-{self._room}", generation=1, first=first, count=len(pages))
            self.transport.push(Push(key=key, peer=self._peer, source=pages, target=tuple(goal[first : first + step])))
        done = 0
        while done < len(source):
            select.select([self.transport.fileno()], [], [])
            for event in self.transport.poll():
                assert isinstance(event, PushDone), event
                done += event.key.count
        return time.perf_counter() - start


def digest_seconds(pool: KvPool, pages: list[PageId]) -> float:
    start = time.perf_counter()
    PageDigester(pool).digest(pages, room="room", generation=1, first=0)
    return time.perf_counter() - start


def measure(args: argparse.Namespace, parent: Connection) -> dict[str, object]:
    page_bytes = args.page_kib * 1024
    pool = make_pool(args.pages, page_bytes)
    hello = msgspec.msgpack.decode(parent.recv_bytes(), type=Hello)
    target = msgspec.msgpack.decode(parent.recv_bytes(), type=RawTarget)
    raw, ours = RawWriter(pool, target), TransportWriter(pool, hello, args.push_mib << 20)
    source = [PageId(page) for page in range(1, args.pages + 1)]
    goal = [*source]
    if not args.contiguous:
        random.Random(0).shuffle(source)
        random.Random(1).shuffle(goal)
    raw.write(source, goal), ours.write(source, goal)
    times = [(raw.write(source, goal), ours.write(source, goal)) for _ in range(args.rounds)]
    digests = statistics.median(digest_seconds(pool, source) for _ in range(3))
    ours.transport.close()
    return summary(args.pages * page_bytes, times, digests) | {
        "pages": args.pages,
        "page_kib": args.page_kib,
        "push_mib": args.push_mib,
        "contiguous": args.contiguous,
    }


def summary(size: int, times: list[tuple[float, float]], digests: float) -> dict[str, object]:
    raw, ours = (statistics.median(column) for column in zip(*times, strict=True))
    best_raw, best_ours = (min(column) for column in zip(*times, strict=True))
    return {
        "benchmark": "nixl_write",
        "raw_gb_per_s": round(size / raw / 1e9, 2),
        "transport_gb_per_s": round(size / ours / 1e9, 2),
        "ratio": round(raw / ours, 3),
        "best_ratio": round(best_raw / best_ours, 3),
        "digest_gb_per_s": round(size / digests / 1e9, 2),
        "ratio_less_digests": round(raw / max(ours - digests, 1e-9), 3),
        "rounds": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--page-kib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--push-mib", type=int, default=PUSH_BYTES >> 20)
    parser.add_argument("--contiguous", action="store_true")
    args = parser.parse_args()
    environment.set_default("UCX_LOG_LEVEL", "fatal")
    environment.set_default("NIXL_LOG_LEVEL", "FATAL")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    receiver = context.Process(target=receive, args=(there, args.pages, args.page_kib * 1024), daemon=True)
    receiver.start()
    try:
        report = measure(args, here)
        here.send(None)
        expected = args.pages * (args.rounds + 1)
        arrived = here.recv()
        assert arrived == expected, f"{arrived} of {expected} pages arrived"
    finally:
        receiver.kill()
        receiver.join()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
