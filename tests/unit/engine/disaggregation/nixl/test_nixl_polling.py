"""How soon the transfer thread looks at NIXL again: at once while looks move bytes, else after a pause."""

import queue
from dataclasses import dataclass, field

import pytest

from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.disaggregation.nixl.queues import Expect, Outbox, Stop
from tandem_engine.disaggregation.nixl.thread import BUSY_LOOK, EXPECTING_PAUSE, IDLE_PAUSE, TransferThread
from tandem_testing.digest_pools import digest_pool
from tandem_testing.scheduler_builders import ManualClock


@dataclass(kw_only=True)
class ScriptedAgent:
    """NIXL whose polls take as long as `looks`."""

    clock: ManualClock
    looks: list[float]

    def attend(self) -> None:
        self.clock.time += self.looks.pop(0)

    def close(self) -> None:
        pass


@dataclass(kw_only=True)
class ScriptedInbox:
    """Hands out commands at once, and notes for how long it was waited for when there are none."""

    commands: list[object]
    turns: int
    waited: list[float] = field(default_factory=list)

    def get(self, timeout: float) -> object:
        if self.commands:
            return self.commands.pop(0)
        self.waited.append(timeout)
        if len(self.waited) == self.turns:
            return Stop()
        raise queue.Empty


def waits(looks: list[float], *commands: object) -> list[float]:
    """Seconds that the thread was willing to wait after each of the looks."""
    clock = ManualClock()
    inbox = ScriptedInbox(commands=[*commands], turns=len(looks) - len(commands))
    outbox = Outbox()
    pool = digest_pool()
    TransferThread(
        agent=ScriptedAgent(clock=clock, looks=[*looks]),
        digester=PageDigester(pool),
        region=Region(pool.address, pool.page_bytes, pool.num_pages, "DRAM", 0),
        clock=clock,
        inbox=inbox,
        outbox=outbox,
    ).run()
    outbox.close()
    return inbox.waited


QUICK, LONG = BUSY_LOOK / 10, BUSY_LOOK * 10


@pytest.mark.parametrize(("expected", "pause"), [(0, IDLE_PAUSE), (1, EXPECTING_PAUSE)])
def test_nothing_moves_so_it_pauses(expected, pause):
    assert waits([QUICK, QUICK, QUICK], Expect(expected)) == [pause, pause]


def test_bytes_move_so_it_looks_again_at_once_until_they_do_not():
    assert waits([QUICK, LONG, LONG, QUICK, QUICK], Expect(1)) == [EXPECTING_PAUSE, 0.0, 0.0, EXPECTING_PAUSE]
