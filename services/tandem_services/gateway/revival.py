"""Asks workers whose connection was lost whether they live after all: a network may fail where no worker does.

    1. lost       `ask`: over a connection of its own, which is opened again for as long as it is refused
    2. asking     a ping every `ask_every_s`, for `ask_for_s`; a process that hangs may still wake up
    3. answered   by the incarnation that was asked: it is told at once, and the worker may be chosen again
       or not     then the registry decides (`router.membership`)

A worker whose line breaks again soon after an answer is asked after a pause that doubles each time, so that requests
are not sent again and again over a line that does not hold.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_engine.ipc.channels import IpcContext
from tandem_services.common.engine_ping import ASK_EVERY_S, answers
from tandem_services.router.choice import WorkerView

logger = logging.getLogger(__name__)

STEADY_S = 10.0
"""A line that has held for this long after an answer is as good as one that never broke."""
FIRST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Answered:
    """The last answer of a worker that had been lost."""

    at: float
    pause_s: float
    """How long it had not been asked before."""


@dataclass(kw_only=True, slots=True)
class Revival:
    """One per model service. Belongs to one event loop."""

    context: IpcContext
    clock: Clock
    on_alive: Callable[[str], None]
    """Told the incarnation of every worker that has answered."""
    ask_every_s: float = ASK_EVERY_S
    ask_for_s: float = 10.0
    _asking: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    _answered: dict[str, _Answered] = field(default_factory=dict)

    @property
    def asking(self) -> frozenset[str]:
        """Incarnations that have not answered yet."""
        return frozenset(name for name, task in self._asking.items() if not task.done())

    def ask(self, worker: WorkerView) -> None:
        """`worker` was lost: listen for a sign of life. Harmless when it is being asked already."""
        if worker.incarnation in self.asking:
            return
        self._asking = {name: task for name, task in self._asking.items() if not task.done()}
        self._asking[worker.incarnation] = asyncio.create_task(self._ask(worker))

    def pause_s(self, incarnation: str) -> float:
        """How long to wait before this worker is asked; nothing, unless its line broke soon after an answer."""
        now = self.clock.now()
        self._answered = {name: answer for name, answer in self._answered.items() if now - answer.at < STEADY_S}
        answer = self._answered.get(incarnation)
        return 0.0 if answer is None else min(max(FIRST_PAUSE_S, 2 * answer.pause_s), STEADY_S)

    def close(self) -> None:
        """Ask nobody any longer. Idempotent."""
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, worker: WorkerView) -> None:
        incarnation, pause_s = worker.incarnation, self.pause_s(worker.incarnation)
        await asyncio.sleep(pause_s)
        if await answers(
            self.context,
            worker.request_endpoint,
            incarnation,
            within_s=self.ask_for_s,
            ask_every_s=self.ask_every_s,
        ):
            self._answered[incarnation] = _Answered(self.clock.now(), pause_s)
            logger.info("worker answers again", extra={"fields": {"worker": incarnation}})
            self.on_alive(incarnation)
