"""An engine process without an engine: speaks the control channel and does what a test tells it to.

    python -m tandem_testing.mock_engine_process --incarnation ID --control ipc://… --remote SOCKET [--fail TEXT]
        [--transport NAME]

A test holds the other end of `--remote` (`EngineRemote`): it sends instructions and reads the orders that the
worker service gave. Unknown flags are accepted, as the worker passes a real engine's flags.

    {"store": [hex…]} {"remove": [hex…]} {"skip": true} {"stats": {…}} {"freeze": true} {"exit": status}
    {"drain_wanted": reason}
    {"hang_up": true}, which is answered by {"type": "hung_up"}
"""

import argparse
import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tandem_engine.base.linux import die_with_parent
from tandem_engine.base.progress import START, Phase
from tandem_engine.ipc.channels import IpcContext, PairChannel
from tandem_engine.messages.control import (
    Audit,
    AuditReport,
    DecodeElsewhere,
    DrainWanted,
    EngineFailed,
    EngineReady,
    EngineToWorker,
    KvGeometry,
    OrderDone,
    ReplayCache,
    Shutdown,
    WorkerToEngine,
)
from tandem_engine.messages.kv_events import AllCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from tandem_engine.messages.stats import EngineStats

STATS_PERIOD_S = 0.05
LAST_WORDS_S = 30.0
"""Ten times as often as a real engine, so that tests need not wait for it."""


def idle_stats(**changes: Any) -> EngineStats:
    """Statistics of an engine that has done nothing."""
    absent = dict.fromkeys(("speculation", "state_anchors", "step_fit"))
    flat = [field for field in msgspec.structs.fields(EngineStats) if field.name not in absent]
    fields: dict[str, Any] = {field.name: field.type() for field in flat} | absent
    fields |= {"free_pages": 99, "total_pages": 100, "prefill_tokens_per_s": 1000.0}
    return EngineStats(**fields | changes)


def ready_message(incarnation: str, *, transport: str = "none") -> EngineReady:
    geometry = KvGeometry(
        fingerprint="f",
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        page_size=16,
        dtype="float32",
        layout_version=1,
        tp_size=1,
    )
    return EngineReady(
        incarnation=incarnation,
        request_endpoint="tcp://127.0.0.1:1",
        peer_endpoint="tcp://127.0.0.1:2",
        geometry=geometry,
        compat_hash="mock",
        context_length=4096,
        max_running_requests=8,
        total_pages=100,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.004,
        transport=transport,
    )


@dataclass(kw_only=True)
class MockEngine:
    """The state of the process: what it caches, what it reports."""

    channel: "PairChannel[WorkerToEngine, EngineToWorker]"
    remote: socket.socket
    stats: EngineStats = field(default_factory=idle_stats)
    blocks: dict[bytes, None] = field(default_factory=dict)
    sequence: int = 0
    frozen: bool = False
    hung_up: bool = False
    """It lives, and its end of the control channel is closed: it is on its way out."""
    exit_status: int | None = None

    def obey(self, order: WorkerToEngine) -> None:
        self.remote.send(msgspec.json.encode(order))
        match order:
            case ReplayCache():
                self.publish(AllCleared(), BlockStored(hashes=tuple(self.blocks)))
            case Audit(nonce=nonce):
                pages = len(self.blocks)
                self.channel.send(
                    AuditReport(
                        nonce=nonce,
                        problems=(),
                        idle=True,
                        free_pages=99 - pages,
                        tree_pages=pages,
                        private_pages=0,
                        held_pages=0,
                    )
                )
            case DecodeElsewhere(nonce=nonce):
                self.channel.send(OrderDone(nonce=nonce, message="so be it", figures={"leaving": self.stats.running}))
            case Shutdown():
                self.exit_status = 0

    def follow(self, instruction: dict[str, Any]) -> None:
        if "store" in instruction:
            hashes = tuple(bytes.fromhex(text) for text in instruction["store"])
            self.blocks |= dict.fromkeys(hashes)
            self.publish(BlockStored(hashes=hashes))
        if "remove" in instruction:
            hashes = tuple(bytes.fromhex(text) for text in instruction["remove"])
            for each in hashes:
                self.blocks.pop(each, None)
            self.publish(BlockRemoved(hashes=hashes))
        if "drain_wanted" in instruction:
            self.channel.send(DrainWanted(reason=instruction["drain_wanted"]))
        if instruction.get("skip"):
            self.sequence += 1
        if "stats" in instruction:
            self.stats = msgspec.structs.replace(self.stats, **instruction["stats"])
        self.frozen = instruction.get("freeze", self.frozen)
        self.hung_up = instruction.get("hang_up", self.hung_up)
        if self.hung_up:
            self.channel.close()
            self.remote.send(json.dumps({"type": "hung_up"}).encode())
        self.exit_status = instruction.get("exit", self.exit_status)

    def publish(self, *events: KvEvent) -> None:
        self.sequence += 1
        self.channel.send(KvEventBatch(sequence=self.sequence, events=events))

    def report(self) -> None:
        if not self.frozen:
            self.stats = msgspec.structs.replace(self.stats, loop_count=self.stats.loop_count + 1)
        self.channel.send(self.stats)

    def run(self) -> int:
        report_at = 0.0
        while self.exit_status is None:
            for order in () if self.hung_up else self.channel.receive():
                self.obey(order)
            with contextlib.suppress(BlockingIOError):
                self.follow(json.loads(self.remote.recv(1 << 20)))
            if time.monotonic() >= report_at and not self.hung_up:
                self.report()
                report_at = time.monotonic() + STATS_PERIOD_S
            time.sleep(0.002)
        return self.exit_status


class EngineRemote:
    """The test's end: instructions to the mock, and the orders that it received."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "remote"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(self.path))
        self._socket.listen(1)
        self._connection: socket.socket | None = None
        self.orders: list[dict[str, Any]] = []
        self.pid = 0

    def accept(self) -> None:
        """Wait until the mock engine has started."""
        self._socket.settimeout(120)
        self._connection, _ = self._socket.accept()
        self.pid = int(json.loads(self._connection.recv(1 << 20))["pid"])
        self._connection.setblocking(False)

    def send(self, **instruction: Any) -> None:
        assert self._connection is not None, "accept() first"
        self._connection.send(json.dumps(instruction).encode())

    def orders_of(self, kind: str) -> list[dict[str, Any]]:
        """Orders of one type that have arrived so far."""
        with contextlib.suppress(BlockingIOError):
            while self._connection is not None and (data := self._connection.recv(1 << 20)):
                self.orders.append(json.loads(data))
        return [order for order in self.orders if order["type"] == kind]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._socket.close()


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--incarnation", "--control", "--remote"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--fail")
    parser.add_argument("--loading", action="store_true", help="report weights and never become ready")
    parser.add_argument("--progress-file", type=Path)
    parser.add_argument("--transport", default="none")
    flags, _ = parser.parse_known_args()
    remote = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    remote.connect(flags.remote)
    remote.send(json.dumps({"pid": os.getpid()}).encode())
    remote.setblocking(False)
    context = IpcContext()
    channel: PairChannel[WorkerToEngine, EngineToWorker] = PairChannel(
        context, flags.control, inbound=WorkerToEngine, outbound=EngineToWorker
    )
    try:
        if flags.fail:
            channel.send(EngineFailed(message=flags.fail, code="checkpoint_error"))
            channel.drain(LAST_WORDS_S)
            return 3
        if flags.loading:
            START.report_to(flags.progress_file)
            START.report(Phase.WEIGHTS, done=1 << 30, total=4 << 30, unit="bytes")
        else:
            channel.send(ready_message(flags.incarnation, transport=flags.transport))
        return MockEngine(channel=channel, remote=remote).run()
    finally:
        channel.close()
        context.close()


if __name__ == "__main__":
    raise SystemExit(main())
