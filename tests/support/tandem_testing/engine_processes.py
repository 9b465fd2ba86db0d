"""Engine processes, as their worker services and a gateway have them, with NIXL between them.

Every wait is for an event, under a bound that only a hang would reach.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.ipc.async_channels import AsyncDealerChannel, AsyncPairServer
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.control import Audit, AuditReport, EngineReady, EngineToWorker, WorkerToEngine
from tandem_engine.messages.outputs import EngineReply, Finish, OutputBatch
from tandem_engine.messages.requests import EngineRequest, Handoff, HandoffSide, Peer
from tandem_testing.scheduler_builders import make_message

PATIENCE_S = 60.0
START_S = 240.0
"""The first start of a checkout compiles."""
GRANT_S, HOLD_S = 10.0, 10.0
"""Longer than a machine with much else to do stands still."""


def only_child(pid: int) -> int:
    """Process id of the one process that `pid` has started."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@dataclass
class Received:
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


@dataclass
class Engine:
    """An engine process, as its worker service and a gateway have it."""

    name: str
    process: asyncio.subprocess.Process
    control: "AsyncPairServer[EngineToWorker, WorkerToEngine]"
    client: "AsyncDealerChannel[EngineReply, EngineRequest]"
    ready: EngineReady

    @property
    def peer(self) -> Peer:
        return Peer(
            worker_id=self.name,
            incarnation=f"{self.name}@1",
            endpoint=self.ready.peer_endpoint,
            compat_hash=self.ready.compat_hash,
        )

    @property
    def further_rank(self) -> int:
        """Process id of rank 1."""
        return only_child(self.process.pid)

    async def until(self, rid: str, *, tokens: int | None = None) -> Received:
        """What comes of `rid` until it ends, or has so many tokens. No other request may run at that time."""
        received = Received()
        async with asyncio.timeout(PATIENCE_S):
            while received.finish is None and (tokens is None or len(received.tokens) < tokens):
                reply = await self.client.receive()
                for output in reply.outputs if isinstance(reply, OutputBatch) else ():
                    assert output.rid == rid
                    received.tokens += output.token_ids
                    received.finish = output.finish
        return received

    async def audit(self) -> AuditReport:
        await self.control.send(Audit(nonce=1))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                report = await self.control.receive()
                if isinstance(report, AuditReport):
                    return report

    async def is_clean(self) -> bool:
        """Idle with nothing leaked, at last."""
        while True:
            report = await self.audit()
            assert report.problems == ()
            if report.idle and report.private_pages == report.held_pages == 0:
                return True


@asynccontextmanager
async def serving(
    checkpoint: Path, folder: Path, name: str, ranks: int, *flags: str, keys: Path | None = None
) -> AsyncIterator[Engine]:
    """An engine of so many ranks, with `flags` beside those that all have; `keys`: the key file they name."""
    context = IpcContext(None if keys is None else KeyPair.load(keys))
    endpoint = f"ipc://{folder}/{name}"
    control: AsyncPairServer[EngineToWorker, WorkerToEngine] = AsyncPairServer(
        context, endpoint, inbound=EngineToWorker, outbound=WorkerToEngine
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_engine.cli", "serve", "--model", str(checkpoint), "--dtype", "float32"),
        *("--worker-id", name, "--incarnation", f"{name}@1", "--control", endpoint, "--threads", "1"),
        *("--num-pages", "256", "--chunked-prefill-size", "32", "--tensor-parallel-size", str(ranks)),
        *("--grant-timeout", str(GRANT_S), "--hold-timeout", str(HOLD_S), "--dist-timeout", str(PATIENCE_S)),
        *flags,
    )
    try:
        async with asyncio.timeout(START_S):
            ready = await control.receive()
        assert isinstance(ready, EngineReady), ready
        client = AsyncDealerChannel(context, ready.request_endpoint, inbound=EngineReply, outbound=EngineRequest)
        yield Engine(name=name, process=process, control=control, client=client, ready=ready)
        client.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        control.close()
        context.close()


def hand_over(rid: str, prompt: tuple[int, ...], prefill: Engine, decode: Engine, **params: object) -> None:
    """Both ends of one request, as a gateway sends them."""
    for engine, other, side in ((decode, prefill, HandoffSide.RECEIVE), (prefill, decode, HandoffSide.SEND)):
        handoff = Handoff(side=side, room=rid, generation=1, peer=other.peer)
        engine.client.send(make_message(rid, prompt, handoff=handoff, **params))
