"""An engine of two processes: it serves, and neither outlives the other.

Every wait is for an event, under a bound that only a hang would reach.
"""

import asyncio
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_engine.config import EngineConfig, ParallelConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.launch import launched_engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.ipc.async_channels import AsyncDealerChannel, AsyncPairServer
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.control import EngineFailed, EngineReady, EngineToWorker, WorkerToEngine
from tandem_engine.messages.outputs import EngineReply, Finish, FinishReason, OutputBatch, Taken, TokenOutput
from tandem_engine.messages.requests import EngineRequest
from tandem_testing.scheduler_builders import make_message
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow

START_S = 240.0
END_S = 60.0
MANY = 16
PROMPTS = [range(5, 25), range(40, 43), range(5, 60)]


@dataclass
class Served:
    """An engine process with its further rank, and a client."""

    process: asyncio.subprocess.Process
    rank: "RankOne"
    client: "AsyncDealerChannel[EngineReply, EngineRequest]"

    async def outputs(self) -> AsyncIterator[TokenOutput]:
        while True:
            async with asyncio.timeout(START_S):
                reply = await self.client.receive()
            if isinstance(reply, OutputBatch):
                for output in reply.outputs:
                    yield output

    async def first(self) -> TokenOutput:
        return await anext(self.outputs())

    async def last(self) -> TokenOutput:
        async for output in self.outputs():
            if output.finish is not None:
                return output
        raise AssertionError("outputs do not end by themselves")

    def ask_much(self, name: str) -> None:
        """One long request after the other: something runs for as long as a test looks at it."""
        for number in range(MANY):
            self.client.send(make_message(f"{name}-{number}", PROMPTS[1], max_tokens=400))

    async def broken_off(self) -> Finish:
        """How the first request ended that did not come to its own end."""
        while True:
            finish = (await self.last()).finish
            if finish.reason is not FinishReason.LENGTH:
                return finish

    async def ended(self) -> int:
        """Exit status of rank 0, once rank 1 has ended too."""
        async with asyncio.timeout(END_S):
            status = await self.process.wait()
            await asyncio.to_thread(select.select, [self.rank.descriptor], [], [], END_S)
        assert self.rank.ended, "rank 1 outlived rank 0"
        return status


class RankOne:
    """The one child of an engine process."""

    def __init__(self, parent: int) -> None:
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        self.descriptor = os.pidfd_open(int(child))

    @property
    def ended(self) -> bool:
        return bool(select.select([self.descriptor], [], [], 0.0)[0])

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.descriptor, number)

    def close(self) -> None:
        os.close(self.descriptor)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@asynccontextmanager
async def engine_process(
    checkpoint: Path, control: str, *flags: str, temporary: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_engine.cli", "serve", "--model", str(checkpoint), "--dtype", "float32"),
        *("--worker-id", "w", "--incarnation", "w@1", "--control", control, "--transport", "none", "--threads", "2"),
        *flags,
        env={**os.environ, **({} if temporary is None else {"TMPDIR": str(temporary)})},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def serving(checkpoint: Path, folder: Path) -> AsyncIterator[Served]:
    context = IpcContext()
    endpoint = f"ipc://{folder}/control"
    control: AsyncPairServer[EngineToWorker, WorkerToEngine] = AsyncPairServer(
        context, endpoint, inbound=EngineToWorker, outbound=WorkerToEngine
    )
    try:
        (folder / "tmp").mkdir()
        flags = ("--tensor-parallel-size", "2", "--max-running-requests", "1")
        async with engine_process(checkpoint, endpoint, *flags, temporary=folder / "tmp") as process:
            ready = await first_report(control)
            assert isinstance(ready, EngineReady), ready
            assert (ready.geometry.tp_size, ready.geometry.num_kv_heads) == (2, 1)
            client = AsyncDealerChannel(context, ready.request_endpoint, inbound=EngineReply, outbound=EngineRequest)
            rank = RankOne(process.pid)
            yield Served(process=process, rank=rank, client=client)
            rank.close()
            client.close()
    finally:
        control.close()
        context.close()


async def first_report(control: "AsyncPairServer[EngineToWorker, WorkerToEngine]") -> EngineToWorker:
    async with asyncio.timeout(START_S):
        return await control.receive()


async def test_lost_rank_ends_the_engine_and_its_clients_may_try_again(checkpoint, tmp_path):
    async with serving(checkpoint, tmp_path) as served:
        served.client.send(make_message("before", PROMPTS[0]))
        before = await served.last()
        assert before.finish.reason is FinishReason.LENGTH
        served.ask_much("during")
        assert (await served.first()).rid == "during-0"
        served.rank.send(signal.SIGKILL)
        finish = await served.broken_off()
        assert (finish.reason, finish.retryable) == (FinishReason.ERROR, True)
        assert await served.ended() == 3


async def test_idle_engine_notices_a_lost_rank_too(checkpoint, tmp_path):
    async with serving(checkpoint, tmp_path) as served:
        served.rank.send(signal.SIGKILL)
        assert await served.ended() == 3


async def test_sigterm_ends_both_in_order_while_a_request_runs(checkpoint, tmp_path):
    async with serving(checkpoint, tmp_path) as served:
        served.ask_much("long")
        # Before a step is computed its requests are reported as the cause if it fails [poison-quarantined].
        assert await served.client.receive() == Taken(rid="long-0")
        await served.first()
        # A service manager may signal every process of the group; the further rank leaves with rank 0 all the same.
        served.rank.send(signal.SIGTERM)
        served.rank.send(signal.SIGINT)
        served.process.terminate()
        assert (await served.broken_off()).reason is FinishReason.ABORT
        assert await served.ended() == 0


async def test_other_rank_exits_and_cleans_up_when_rank_0_is_killed(checkpoint, tmp_path):
    async with serving(checkpoint, tmp_path) as served:
        served.process.kill()
        assert await served.ended() == -signal.SIGKILL
    assert not [*(tmp_path / "tmp").iterdir()]


async def test_invalid_tp_size_is_reported_to_the_worker(checkpoint, tmp_path):
    context = IpcContext()
    endpoint = f"ipc://{tmp_path}/control"
    control: AsyncPairServer[EngineToWorker, WorkerToEngine] = AsyncPairServer(
        context, endpoint, inbound=EngineToWorker, outbound=WorkerToEngine
    )
    async with engine_process(checkpoint, endpoint, "--tp", "3") as process:
        failed = await first_report(control)
        assert isinstance(failed, EngineFailed)
        assert "--tensor-parallel-size 3 does not fit this model" in failed.message
        assert await process.wait() == 3
    control.close()
    context.close()


def generate(engine: Engine) -> list[tuple[int, ...]]:
    messages = [make_message(f"r{i}", prompt, temperature=i % 2, seed=i) for i, prompt in enumerate(PROMPTS)]
    return [generation.token_ids for generation in engine.generate(messages, steps_between=2)]


def test_offline_two_ranks_equal_one_rank(checkpoint):
    config = EngineConfig(model_path=str(checkpoint), dtype="float32")
    loaded = load(config, progress=False)
    with Engine.build(loaded, loaded.config) as engine:
        expected = generate(engine)
    two = EngineConfig(model_path=str(checkpoint), dtype="float32", parallel=ParallelConfig(tp_size=2))
    with launched_engine(two, progress=False) as engine:
        assert generate(engine) == expected
        assert generate(engine) == expected  # from the prefix cache, which the ranks keep alike
