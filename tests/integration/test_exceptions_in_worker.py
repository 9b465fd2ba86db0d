"""An exception in any function of a worker's service: it serves on, or it ends with an error and is restarted.

Never half of it: alive, and its heartbeats or events gone. Each function that runs while a worker serves raises once
(`tandem_testing.raised_anywhere`). A part of them is tried; all with TANDEM_EVERY_FUNCTION=1.
"""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import CodeType

import httpx
import pytest

import tandem_services
from tandem_testing.mock_engine_process import EngineRemote
from tandem_testing.raised_anywhere import Fault, Planted, name_of, raising, recorded
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import PAGE, Fleet, chain_of
from tandem_testing.running_worker import Running, config_for, find, running, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(tandem_services.__file__).parent
SEED, TRIED = 1, 12
SERVES_S = 1.5
"""For functions that run once a second."""
ENDS_S = 60.0
EXIT_FAILED = 1


@pytest.fixture(autouse=True)
def importable_mock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / p) for p in ("engine", "tests/support")))


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Records of errors would keep tracebacks, and with them coroutines, until the end of all tests."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    process = RedisServer.start()
    yield process
    process.stop()


async def serve(worker: Running, number: int) -> None:
    """What a worker does: probes, statistics, events."""
    worker.remote.send(store=[each.hex() for each in chain_of(tuple(range(number, number + 4 * PAGE)))])
    worker.remote.send(stats={"running": number % 7, "waiting_tokens": number})
    for path in ("/live", "/ready", "/metrics", "/audit"):
        try:
            await worker.get(path)
        except httpx.TransportError:
            if not worker.exit.done() and "audit" not in path:
                continue


async def functions_of(server: RedisServer, folder: Path) -> list[CodeType]:
    remote = EngineRemote(folder)
    async with running(config_for(server, remote), remote, folder) as worker:
        await until(worker.ready)
        with recorded(FOLDER) as seen:
            await serve(worker, 1)
            await asyncio.sleep(SERVES_S)
    remote.close()
    return sorted(seen, key=name_of)


async def fault_of(worker: Running, fleet: Fleet, number: int) -> str | None:
    """What is wrong with a worker in which a function has raised; nothing where it serves, or ended with an error."""

    async def reported() -> bool:
        if worker.exit.done():
            return True
        await serve(worker, number)
        record = await find(fleet)
        return record is not None and record.load.queue_tokens == number and await worker.ready()

    try:
        await until(reported, seconds=ENDS_S)
    except AssertionError:
        return "neither serves nor ends"
    if worker.exit.done():
        failed = worker.exit.exception() or worker.exit.result()
        return None if failed == EXIT_FAILED or isinstance(failed, Planted) else f"ends with {failed!r}"
    return None


@pytest.mark.usefixtures("unlogged")
@pytest.mark.timeout(3600 if os.environ.get("TANDEM_EVERY_FUNCTION") else 300)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_exception_in_a_service_ends_it_or_nothing(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "learn").mkdir()
    functions = await functions_of(server, tmp_path / "learn")
    assert len(functions) > 100
    tried = functions if os.environ.get("TANDEM_EVERY_FUNCTION") else Random(SEED).sample(functions, TRIED)
    wrong, fell, number = [], 0, 1000
    async with Fleet.of(server) as fleet:
        left = [*tried]
        while left:
            folder = tmp_path / str(len(left))
            folder.mkdir()
            remote = EngineRemote(folder)
            async with running(config_for(server, remote), remote, folder) as worker:
                await until(worker.ready)
                # The next worker is needed only once this one has ended.
                while left and not worker.exit.done():
                    code, number = left.pop(), number + 1
                    with raising(Fault(code=code)) as planted:
                        await serve(worker, number)
                        await asyncio.sleep(SERVES_S)
                    fell += planted.fell
                    if planted.fell and (fault := await fault_of(worker, fleet, number)):
                        wrong.append(f"{name_of(code)}: {fault}")
            remote.close()
    assert not wrong, "\n".join(wrong)
    assert fell >= len(tried) // 2
