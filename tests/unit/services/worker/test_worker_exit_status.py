"""A worker has one reason to end, however many things go wrong on the way."""

import signal
from asyncio.subprocess import Process
from dataclasses import dataclass
from typing import cast

import pytest

from tandem_services.worker import engine_process
from tandem_services.worker.engine_process import SIZES, EngineChild
from tandem_services.worker.service import EXIT_FAILED, EXIT_OK, Ending, FirstEnding


@dataclass
class EndedProcess:
    status: int

    async def wait(self) -> int:
        return self.status


async def test_first_reason_to_end_counts():
    ending = FirstEnding()
    ending.say(EXIT_FAILED, "the engine process exited with status 70")
    ending.say(EXIT_OK, "drained")
    assert await ending.wait() == Ending(EXIT_FAILED, "the engine process exited with status 70")


@pytest.mark.parametrize(
    ("status", "kills", "sentence"),
    [
        (
            -signal.SIGKILL,
            3,
            f"the kernel killed the engine because memory was short: provide more memory, or lower {SIZES}",
        ),
        (-signal.SIGKILL, 2, "the engine process exited with status -9"),
        (70, 3, "the engine process exited with status 70"),
    ],
)
async def test_engine_killed_for_memory_is_named(monkeypatch, status, kills, sentence):
    monkeypatch.setattr(engine_process, "memory_kills", lambda: kills)
    monkeypatch.setattr(engine_process, "memory_shortage", lambda: "memory was short")
    child = EngineChild(cast(Process, EndedProcess(status)), memory_kills=2)
    assert await child.wait() == status
    assert child.how_ended(status) == sentence
    assert child.killed_for_memory == ("kernel" in sentence)
