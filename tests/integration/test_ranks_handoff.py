"""Engines of one and of two processes hand requests to each other, and lose a rank in the middle of it.

Real processes, gloo and NIXL. Every wait is for an event, under a bound that only a hang would reach.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tandem_engine.messages.control import (
    PeerEnded,
)
from tandem_engine.messages.outputs import FinishReason
from tandem_testing.engine_processes import PATIENCE_S, Engine, hand_over, serving
from tandem_testing.scheduler_builders import make_message
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow

SOON_S = 3.0
"""A lease that is to run out; none of what comes before it depends on its length."""

PROMPTS = [tuple(range(5, 25)), (40, 41, 42), tuple(i % 200 + 5 for i in range(300))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@asynccontextmanager
async def pair(
    checkpoint: Path, folder: Path, senders: int, receivers: int, *flags: str
) -> AsyncIterator[tuple[Engine, Engine]]:
    """`flags`: of the receiver."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(serving(checkpoint, folder, "p", senders))
        decode = await stack.enter_async_context(serving(checkpoint, folder, "d", receivers, *flags))
        yield prefill, decode


@pytest.mark.timeout(600)  # starts four engines
async def test_handed_off_output_equals_output_of_one_worker(checkpoint, tmp_path):
    """From one rank to two, from two to one, and from two to two: no two ways have a prefix in common."""
    async with AsyncExitStack() as stack:
        one, two, to_one, to_two = [
            await stack.enter_async_context(serving(checkpoint, tmp_path, name, ranks))
            for name, ranks in (("p1", 1), ("p2", 2), ("d1", 1), ("d2", 2))
        ]
        assert len({engine.ready.compat_hash for engine in (one, two, to_one, to_two)}) == 1
        for way, (prefill, decode) in enumerate(((one, to_two), (two, to_one), (two, to_two))):
            for number, prompt in enumerate((90 + way, *prompt) for prompt in PROMPTS):
                alone = f"alone-{way}-{number}"
                prefill.client.send(make_message(alone, prompt, max_tokens=8))
                expected = (await prefill.until(alone)).tokens
                rid = f"r-{way}-{number}"
                hand_over(rid, prompt, prefill, decode, max_tokens=8)
                first = await prefill.until(rid, tokens=1)
                assert (first.tokens, first.finish) == (expected[:1], None)
                received = await decode.until(rid)
                assert (received.tokens, received.finish.reason) == (expected, FinishReason.LENGTH)
        for engine in (one, two, to_one, to_two):
            assert await engine.is_clean()


async def test_receiver_that_loses_a_rank_costs_the_writer_nothing(checkpoint, tmp_path):
    async with pair(checkpoint, tmp_path, 1, 2) as (prefill, decode):
        rank = decode.further_rank
        hand_over("r", PROMPTS[2], prefill, decode, max_tokens=8)
        await prefill.until("r", tokens=1)
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await decode.process.wait() == 3
        await prefill.control.send(PeerEnded(incarnation="d@1"))
        assert await prefill.is_clean()
        prefill.client.send(make_message("after", PROMPTS[0], max_tokens=4))
        assert len((await prefill.until("after")).tokens) == 4


async def test_writer_that_loses_a_rank_leaves_no_page_behind(checkpoint, tmp_path):
    """Rank 0 may have written its heads when rank 1 is killed; nothing of the prompt is taken for whole."""
    async with pair(checkpoint, tmp_path, 2, 1) as (prefill, decode):
        rank = prefill.further_rank
        hand_over("r", PROMPTS[2], prefill, decode, max_tokens=8)
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await prefill.process.wait() == 3
        await decode.control.send(PeerEnded(incarnation="p@1"))
        received = await decode.until("r")
        if received.finish.reason is FinishReason.ERROR:
            assert (received.tokens, received.finish.retryable) == ([], True)
        assert await decode.is_clean()
        decode.client.send(make_message("after", PROMPTS[2], max_tokens=4))
        assert len((await decode.until("after")).tokens) == 4


@pytest.mark.parametrize("receivers", [1, 2])
async def test_writer_with_stalled_rank_fails_at_lease_expiry(checkpoint, tmp_path, receivers):
    """Nobody is dead, so nobody is fenced: the lease runs out, and the pages wait until the writer is gone."""
    async with pair(checkpoint, tmp_path, 2, receivers, "--grant-timeout", str(SOON_S)) as (prefill, decode):
        rank = prefill.further_rank
        os.kill(rank, signal.SIGSTOP)
        hand_over("r", PROMPTS[2], prefill, decode, max_tokens=8)
        finish = (await decode.until("r")).finish
        assert (finish.reason, finish.retryable) == (FinishReason.ERROR, True)
        assert (await decode.audit()).held_pages > 0
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await prefill.process.wait() == 3
        await decode.control.send(PeerEnded(incarnation="p@1"))
        assert await decode.is_clean()
