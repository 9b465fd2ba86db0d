"""Keeps the adapters of one service as its spec and its ModelAdapters have them, by commands to a gateway.

    each poll ─▶ what the gateway has registered ─▶ `next_command` ─▶ a task, one at a time
                                    └─▶ `Reading`, which reconciles write into statuses

Names that the next worker is to load are announced to the gateway before: their requests wait, and start a worker of a
service at zero.

A command may take minutes, so polls do not wait for it. One that fails is repeated, after a longer pause each time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import httpx

from tandem_operator.builders.served import Served
from tandem_operator.controller.observations import Subject
from tandem_operator.controller.store import generation_of
from tandem_operator.planning.adapters import (
    Accepted,
    Command,
    Failure,
    HeldAdapter,
    Load,
    Reading,
    WantedAdapter,
    accepted,
    next_command,
    to_announce,
)
from tandem_operator.planning.status import VALID
from tandem_operator.telemetry.adapter_orders import (
    CommandResult,
    announce,
    registered_adapters,
    send_command,
)
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.worker_control import OrderFailedError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 15.0
MAX_PAUSE_S = 300.0


@dataclass(slots=True)
class _Tried:
    """A name whose last command has failed."""

    failure: Failure
    pause_s: float
    again_at: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """A command in flight."""

    command: Command
    workers: frozenset[str]
    """Those that were ready."""
    task: "asyncio.Task[CommandResult]"


@dataclass(slots=True)
class AdapterSync:
    """Of one service, while this operator leads."""

    client: httpx.AsyncClient
    token: Callable[[Served], Awaitable[str]]
    """The control token of the service, or of its ModelGateway. Raises `OrderFailedError` while there is none."""
    clock: Callable[[], float] = time.monotonic
    expecting: bool = False
    """The next poll should be soon."""
    _held: Mapping[str, HeldAdapter] | None = None
    _announced: frozenset[str] = frozenset()
    _tried: dict[str, _Tried] = field(default_factory=dict)
    _pinned_on: dict[str, frozenset[str]] = field(default_factory=dict)
    _sent: "_Sent | None" = None

    async def step(self, subject: Subject) -> Reading:
        """Sends the next command, if one is due."""
        found = accepted(subject.wanted, subject.adapter_requests)
        listed = {one.name: one.pinned for one in subject.status.adapters}
        self._take_result()
        if not found.wanted and not listed:
            self._forget(found, listed)
            self.expecting = False
            return Reading()
        gateway = next((pod for pod in subject.pods if pod.role == "gateway" and pod.usable), None)
        if gateway is None:
            return self._reading("no gateway pod is ready")
        try:
            token = await self.token(subject.gateway or subject.wanted)
            there = await registered_adapters(self.client, gateway, token, model=subject.model)
            self._held, self._announced = there.held, there.announced or frozenset()
            self._forget(found, listed)
            if there.announced is not None and _is_current(subject):
                await self._announce(subject, found, listed, gateway, token)
        except OrderFailedError as error:
            return self._reading(str(error))
        if self._sent is None and _is_current(subject):
            self._send(subject, found, listed, gateway, token)
        self.expecting = self._sent is not None or any(one.name not in listed for one in found.wanted)
        return self._reading()

    async def _announce(
        self, subject: Subject, found: Accepted, listed: Iterable[str], gateway: PodSeen, token: str
    ) -> None:
        names = to_announce(found.wanted, listed, self._reading())
        if names != self._announced:
            await announce(self.client, gateway, token, names, model=subject.model)
            self._announced = names

    def close(self) -> None:
        """Stop waiting for the command in flight."""
        if self._sent is not None:
            self._sent.task.cancel()

    def _send(self, subject: Subject, found: Accepted, listed: dict[str, bool], gateway: PodSeen, token: str) -> None:
        wanted = {one.name: one for one in found.wanted}
        held_back = [
            name
            for name, tried in self._tried.items()
            # Another spec is tried at once.
            if self.clock() < tried.again_at and tried.failure.wanted == wanted.get(name)
        ]
        workers = subject.parts.ready_workers()
        command = next_command(found.wanted, listed, self._reading(), workers, held_back)
        if command is not None:
            logger.info("%s: %s", subject.service.key, _shown(command))
            sending = send_command(self.client, gateway, token, command, model=subject.model)
            task = asyncio.create_task(sending)
            self._sent = _Sent(command, frozenset(workers), task)

    def _take_result(self) -> None:
        if self._sent is None or not self._sent.task.done():
            return
        sent, self._sent = self._sent, None
        command, result = sent.command, sent.task.result()
        name = _name_of(command)
        if result.done:
            self._tried.pop(name, None)
            if isinstance(command, Load):
                self._pinned_on[name] = sent.workers if command.wanted.pinned else frozenset()
            return
        before = self._tried.get(name)
        wanted: WantedAdapter | None = command.wanted if isinstance(command, Load) else None
        again = before is not None and before.failure.wanted == wanted
        pause_s = min(2 * before.pause_s, MAX_PAUSE_S) if again and before is not None else FIRST_PAUSE_S
        failure = Failure(wanted=wanted, message=result.message, workers=result.failed, failures=result.failures)
        self._tried[name] = _Tried(failure, pause_s, self.clock() + pause_s)

    def _forget(self, found: Accepted, listed: dict[str, bool]) -> None:
        names = {*listed, *(one.name for one in found.wanted)}
        self._tried = {name: tried for name, tried in self._tried.items() if name in names}
        self._pinned_on = {name: workers for name, workers in self._pinned_on.items() if name in names}

    def _reading(self, problem: str = "") -> Reading:
        return Reading(
            held=self._held,
            announced=self._announced,
            failures={name: tried.failure for name, tried in self._tried.items()},
            pinned_on=dict(self._pinned_on),
            problem=problem,
        )


def _is_current(subject: Subject) -> bool:
    """Whether the spec is valid, and its pods are those of its status: a refused spec changes nothing."""
    valid = next((one for one in subject.status.conditions if one.type == VALID), None)
    current = subject.status.observed_generation == generation_of(subject.service)
    return current and valid is not None and valid.status == "True"


def _name_of(command: Command) -> str:
    return command.wanted.name if isinstance(command, Load) else command.name


def _shown(command: Command) -> str:
    if isinstance(command, Load):
        return f"loading adapter {command.wanted.name} from {command.wanted.folder}"
    return f"unloading adapter {command.name}"
