"""An engine of two processes loses one while an adapter is loaded for a request: nothing half loaded is served.

Real processes. A lease on the adapter's file holds its readers up in `open`, so the load is in progress on both ranks
when one of them is killed.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from tandem_engine.messages.outputs import FinishReason, OutputBatch
from tandem_engine.messages.requests import AdapterRef
from tandem_engine.model.adapters.checkpoint import open_adapter
from tandem_engine.model.adapters.weights import load_adapter
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.parallel.group import SingleRank
from tandem_testing.adapters import write_adapter
from tandem_testing.engine_processes import PATIENCE_S, Engine, serving
from tandem_testing.held_files import readers_held_up
from tandem_testing.scheduler_builders import make_message
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow

PROMPT = tuple(range(5, 25))
LOADS = "--allow-runtime-lora-updating"
BESIDE = 24
"""Requests of the model alone, more than run at once in the time of the test."""
BEGINS_S = 0.2
"""All ranks begin a load in the same turn; so long after the first one has, the others have, too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = write_tiny_checkpoint("qwen3", folder / "model")
    write_adapter(folder / "adapters" / "one", checkpoint, seed=1)
    return folder


@pytest.fixture(scope="module")
def ref(folder) -> AdapterRef:
    base = read_model_config(folder / "model")
    found = open_adapter(folder / "adapters" / "one", base, max_rank=64)
    weights = load_adapter(found, base, dtype=torch.float32, group=SingleRank(rank=0, size=1))
    return AdapterRef(name="one", digest=weights.digest, source="one")


@asynccontextmanager
async def engine_of(folder: Path, sockets: Path, name: str, ranks: int) -> AsyncIterator[Engine]:
    flags = (LOADS, "--lora-dir", str(folder / "adapters"))
    async with serving(folder / "model", sockets, name, ranks, *flags) as engine:
        yield engine


async def tokens_of(engine: Engine, rid: str, adapter: AdapterRef | None) -> list[int]:
    engine.client.send(make_message(rid, PROMPT, max_tokens=8, adapter=adapter))
    received = await engine.until(rid)
    assert received.finish.reason is FinishReason.LENGTH, received.finish
    return received.tokens


async def ends(engine: Engine, rids: set[str]) -> dict[str, tuple[FinishReason, bool]]:
    """How requests have ended of which an engine that dies still tells."""
    found = {}
    while rids - found.keys():
        reply = await engine.client.receive()
        for output in reply.outputs if isinstance(reply, OutputBatch) else ():
            if output.finish is not None:
                found[output.rid] = output.finish.reason, output.finish.retryable
    return found


@pytest.mark.timeout(600)  # starts three engines
async def test_rank_that_dies_in_a_load_ends_the_group_in_time(folder, ref, tmp_path):
    """Rank 0 tells the requests that another attempt is worth it, and an engine in its place loads the adapter."""
    async with AsyncExitStack() as stack:
        alone = await stack.enter_async_context(engine_of(folder, tmp_path, "alone", 1))
        expected = await tokens_of(alone, "one", ref), await tokens_of(alone, "base", None)
        assert expected[0] != expected[1]
    async with engine_of(folder, tmp_path, "w", 2) as engine:
        assert await tokens_of(engine, "base", None) == expected[1]
        rank = engine.further_rank
        async with readers_held_up(folder / "adapters" / "one" / "adapter_model.safetensors") as waits:
            asked = {"adapted": ref, **{f"beside-{number}": None for number in range(BESIDE)}}
            for rid, adapter in asked.items():
                engine.client.send(make_message(rid, PROMPT, max_tokens=400, adapter=adapter))
            async with asyncio.timeout(PATIENCE_S):
                await waits.wait()
            await asyncio.sleep(BEGINS_S)
            os.kill(rank, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                ended = await ends(engine, {*asked})
                assert await engine.process.wait() == 3
        broken = {rid for rid, end in ended.items() if end == (FinishReason.ERROR, True)}
        assert "adapted" in broken
        assert {rid: end for rid, end in ended.items() if rid not in broken and end[0] is not FinishReason.LENGTH} == {}
    async with engine_of(folder, tmp_path, "again", 2) as engine:
        assert await tokens_of(engine, "one", ref) == expected[0]
        assert await tokens_of(engine, "base", None) == expected[1]
        assert await engine.is_clean()
