"""An engine whose two ranks are process trees of their own, on two addresses, with the deployment's keys between them.

It generates what one process does, hands requests over and takes them, and comes to its end as a whole. Real processes,
gloo over TCP and NIXL. Every wait is for an event, under a bound that only a hang would reach.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_engine.base.addresses import Address
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.control import DrainWanted, Shutdown
from tandem_engine.messages.outputs import FinishReason
from tandem_services.common.sockets import free_port
from tandem_testing.engine_processes import GRANT_S, HOLD_S, PATIENCE_S, Engine, hand_over, only_child, serving
from tandem_testing.scheduler_builders import make_message
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow

PROMPTS = [tuple(range(5, 25)), (40, 41, 42), tuple(i % 200 + 5 for i in range(300))]
LEADER, NODE = "127.0.0.1", "127.0.0.2"


@dataclass
class TwoNodes:
    """The engine as node 0 has it, and the process that has the other node's rank."""

    engine: Engine
    node: asyncio.subprocess.Process

    async def ended(self) -> tuple[int, int]:
        """Exit statuses of both nodes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.engine.process.wait(), await self.node.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4000}))
    return path


@asynccontextmanager
async def two_nodes(
    checkpoint: Path, folder: Path, keys: Path, leader: str = LEADER, node_host: str = NODE
) -> AsyncIterator[TwoNodes]:
    together = ("--nnodes", "2", "--dist-init-addr", str(Address(leader, free_port(leader))), "--curve-keys", str(keys))
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_engine.cli", "follow", "--model", str(checkpoint), "--dtype", "float32"),
        *("--threads", "1", "--num-pages", "256", "--chunked-prefill-size", "32", "--tensor-parallel-size", "2"),
        *("--grant-timeout", str(GRANT_S), "--hold-timeout", str(HOLD_S), "--dist-timeout", str(PATIENCE_S)),
        *("--host", node_host, "--node-rank", "1", *together),
    )
    try:
        async with serving(checkpoint, folder, "n", 2, "--host", leader, *together, keys=keys) as engine:
            yield TwoNodes(engine=engine, node=node)
    finally:
        if node.returncode is None:
            node.kill()
            await node.wait()


def key_file(folder: Path) -> Path:
    path = folder / "keys.json"
    KeyPair.generate().save(path)
    return path


async def test_two_nodes_serve_hand_off_both_ways_and_drain(checkpoint, tmp_path):
    keys = key_file(tmp_path)
    async with AsyncExitStack() as stack:
        single = await stack.enter_async_context(
            serving(checkpoint, tmp_path, "s", 1, "--curve-keys", str(keys), keys=keys)
        )
        both = await stack.enter_async_context(two_nodes(checkpoint, tmp_path, keys))
        engine = both.engine
        assert (engine.ready.geometry.tp_size, engine.ready.compat_hash) == (2, single.ready.compat_hash)
        for number, prompt in enumerate(PROMPTS):
            expected = await alone(single, f"one-{number}", prompt)
            assert await alone(engine, f"two-{number}", prompt) == expected
            for way, (sender, receiver) in enumerate(((engine, single), (single, engine))):
                rid = f"r{number}-{way}"
                hand_over(rid, prompt, sender, receiver, max_tokens=8)
                assert (await sender.until(rid, tokens=1)).tokens == expected[:1]
                received = await receiver.until(rid)
                assert (received.tokens, received.finish.reason) == (expected, FinishReason.LENGTH)
        assert await engine.is_clean()
        assert await single.is_clean()
        both.node.terminate()
        assert (await report_of(engine, DrainWanted)).reason == "node 1 is to leave"
        assert await alone(engine, "meanwhile", PROMPTS[1]) == await alone(single, "still", PROMPTS[1])
        await engine.control.send(Shutdown())
        assert await both.ended() == (0, 0)


async def test_two_nodes_on_ipv6_addresses_serve_and_hand_over(checkpoint, tmp_path):
    keys = key_file(tmp_path)
    async with (
        serving(checkpoint, tmp_path, "s", 1, "--host", "::1", "--curve-keys", str(keys), keys=keys) as single,
        two_nodes(checkpoint, tmp_path, keys, "::1", "::1") as both,
    ):
        assert both.engine.ready.peer_endpoint.startswith("tcp://[::1]:")
        expected = await alone(single, "one", PROMPTS[0])
        assert await alone(both.engine, "two", PROMPTS[0]) == expected
        hand_over("r", PROMPTS[0], both.engine, single, max_tokens=8)
        assert (await single.until("r")).tokens == expected
        both.node.terminate()
        assert await report_of(both.engine, DrainWanted)
        await both.engine.control.send(Shutdown())
        assert await both.ended() == (0, 0)


async def test_rank_lost_on_the_other_node_ends_both(checkpoint, tmp_path):
    async with two_nodes(checkpoint, tmp_path, key_file(tmp_path)) as both:
        rank = only_child(both.node.pid)
        # As many as there are positions for: it still runs when the rank is killed, however long that takes.
        both.engine.client.send(make_message("during", PROMPTS[1], max_tokens=3900))
        await both.engine.until("during", tokens=1)
        os.kill(rank, signal.SIGKILL)
        finish = (await both.engine.until("during")).finish
        assert (finish.reason, finish.retryable) == (FinishReason.ERROR, True)
        assert await both.ended() == (3, 3)


async def alone(engine: Engine, rid: str, prompt: tuple[int, ...]) -> list[int]:
    engine.client.send(make_message(rid, prompt, max_tokens=8))
    return (await engine.until(rid)).tokens


async def report_of(engine: Engine, kind: type[DrainWanted]) -> DrainWanted:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            report = await engine.control.receive()
            if isinstance(report, kind):
                return report
