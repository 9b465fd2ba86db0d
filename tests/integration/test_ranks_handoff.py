"""Engines of one and of two processes hand requests to each other, and lose a rank in the middle of it.

Real processes, gloo and NIXL. Every wait is for an event, under a bound that only a hang would reach. An engine that a
test leaves running serves the next one: a start costs seconds of CPU for each rank.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from tandem_engine.messages.control import PeerEnded
from tandem_engine.messages.outputs import FinishReason
from tandem_testing.engine_processes import PATIENCE_S, Engine, hand_over, serving
from tandem_testing.long_tests import long_except
from tandem_testing.scheduler_builders import make_message
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SOON_S = 3.0
"""A lease that is to run out; none of what comes before it depends on its length."""

PROMPTS = [tuple(range(5, 25)), (40, 41, 42), tuple(i % 200 + 5 for i in range(300))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


Kind = tuple[str, ...]


@dataclass(kw_only=True)
class Engines:
    """Running engines of the module that no test uses. A test that fails gives none back."""

    checkpoint: Path
    folder: Path
    stack: AsyncExitStack
    idle: dict[Kind, Engine] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Of each engine that was started, by its name."""

    async def take(self, role: str, ranks: int, *flags: str) -> Engine:
        """`role`: "p" sends and "d" receives."""
        kind = (role, str(ranks), *flags)
        if kind in self.idle:
            return self.idle.pop(kind)
        name = f"{role}{len(self.kinds)}"
        self.kinds[name] = kind
        return await self.stack.enter_async_context(serving(self.checkpoint, self.folder, name, ranks, *flags))

    def give_back(self, *engines: Engine) -> None:
        """They are clean, and have no reply left unread."""
        self.idle |= {self.kinds[engine.name]: engine for engine in engines}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(checkpoint, tmp_path_factory) -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        yield Engines(checkpoint=checkpoint, folder=tmp_path_factory.mktemp("engines"), stack=stack)


def ended(engine: Engine) -> PeerEnded:
    """What workers tell their engines of one that has ended."""
    return PeerEnded(incarnation=engine.peer.incarnation)


WAYS = (("p", 1), ("p", 2), ("d", 1), ("d", 2))
"""Role and ranks of engines between which `check_ways` hands over."""


async def check_ways(one: Engine, two: Engine, to_one: Engine, to_two: Engine) -> None:
    """From one rank to two, from two to one, and from two to two: no two ways have a prefix in common."""
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


@pytest.mark.timeout(600)  # starts four engines
async def test_handed_off_output_equals_output_of_one_worker(engines):
    taken = [await engines.take(role, ranks) for role, ranks in WAYS]
    await check_ways(*taken)
    engines.give_back(*taken)


@pytest.mark.long("ranks hand over states in threads of one process (test_exactness_matrix, test_ranked_states)")
@pytest.mark.timeout(600)  # starts four engines
async def test_handed_off_states_give_the_output_of_one_worker(tmp_path):
    """Each rank gets its heads of the state, from projections that are joined. The exactness matrix has the others."""
    checkpoint = write_tiny_checkpoint("qwen3-next", tmp_path / "model")
    async with AsyncExitStack() as stack:
        starting = [serving(checkpoint, tmp_path, f"{role}{ranks}", ranks) for role, ranks in WAYS]
        await check_ways(*[await stack.enter_async_context(each) for each in starting])


async def test_receiver_that_loses_a_rank_costs_the_writer_nothing(engines):
    prefill, decode = await engines.take("p", 1), await engines.take("d", 2)
    rank, prompt = decode.further_rank, (80, *PROMPTS[2])
    hand_over("lost-receiver", prompt, prefill, decode, max_tokens=8)
    await prefill.until("lost-receiver", tokens=1)
    os.kill(rank, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        assert await decode.process.wait() == 3
    await prefill.control.send(ended(decode))
    assert await prefill.is_clean()
    prefill.client.send(make_message("after-receiver", PROMPTS[0], max_tokens=4))
    assert len((await prefill.until("after-receiver")).tokens) == 4
    engines.give_back(prefill)


async def test_writer_that_loses_a_rank_leaks_no_page(engines):
    """Rank 0 may have written its heads when rank 1 is killed; nothing of the prompt is taken for whole."""
    prefill, decode = await engines.take("p", 2), await engines.take("d", 1)
    rank, prompt = prefill.further_rank, (81, *PROMPTS[2])
    hand_over("lost-writer", prompt, prefill, decode, max_tokens=8)
    os.kill(rank, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        assert await prefill.process.wait() == 3
    await decode.control.send(ended(prefill))
    received = await decode.until("lost-writer")
    if received.finish.reason is FinishReason.ERROR:
        assert (received.tokens, received.finish.retryable) == ([], True)
    assert await decode.is_clean()
    decode.client.send(make_message("after-writer", prompt, max_tokens=4))
    assert len((await decode.until("after-writer")).tokens) == 4
    engines.give_back(decode)


@pytest.mark.parametrize(
    "receivers", long_except((1, 2), {2}, why="the lease of each rank of a receiver runs out as that of a single one")
)
async def test_writer_with_stalled_rank_fails_at_lease_expiry(engines, receivers):
    """No peer is dead, so none is fenced: the lease runs out, and the pages wait until the writer has exited."""
    prefill = await engines.take("p", 2)
    decode = await engines.take("d", receivers, "--grant-timeout", str(SOON_S))
    rank = prefill.further_rank
    os.kill(rank, signal.SIGSTOP)
    hand_over("stalled", (82, *PROMPTS[2]), prefill, decode, max_tokens=8)
    finish = (await decode.until("stalled")).finish
    assert (finish.reason, finish.retryable) == (FinishReason.ERROR, True)
    assert (await decode.audit()).held_pages > 0
    os.kill(rank, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        assert await prefill.process.wait() == 3
    await decode.control.send(ended(prefill))
    assert await decode.is_clean()
