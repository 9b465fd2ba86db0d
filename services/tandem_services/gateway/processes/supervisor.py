"""Several processes that are one gateway: `tandem gateway --processes N` uses N cores.

    sockets     one per process for the same port (SO_REUSEPORT), which stay open here: connections that wait at a
                process that has died are taken by its successor
    processes   `command` with its place, each a whole gateway: own view of the fleet, own connections to workers. What
                gateways of several pods share they share as well, through Redis
    signals     go to all of them, which drain as a single gateway does
    a death     restarts the process after FIRST_PAUSE_S, doubled up to MAX_PAUSE_S. MAX_DEATHS within DEATHS_S end
                all of them, with status 1; so does one that ends before it has ever served
    this port   `front` serves the administrators' routes

Processes are started, not forked: sockets of ZeroMQ and threads do not survive a fork.
"""

import asyncio
import logging
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import uvloop

from tandem_engine.base.linux import die_with_parent
from tandem_engine.base.logs import configure_logging
from tandem_services.common.errors import StartupError
from tandem_services.common.sockets import listen
from tandem_services.common.tasks import ending_signals
from tandem_services.gateway.config import GatewayConfig
from tandem_services.gateway.process_place import PlaceFile, socket_of, write_place
from tandem_services.gateway.processes.front import Front

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
STABLE_S = 60.0
"""A process that served so long starts again with the first pause."""

MAX_DEATHS, DEATHS_S = 5, 60.0


class FrontServer(Protocol):
    """The HTTP server of the administrators' port."""

    should_exit: bool

    async def serve(self, sockets: list[socket.socket] | None = None) -> None: ...


@dataclass(kw_only=True)
class _Child:
    number: int
    command: Sequence[str]
    listener: socket.socket
    socket: Path
    """Of its administrators' routes: there while it serves, or has."""
    process: asyncio.subprocess.Process | None = None
    has_served: bool = False
    pause_s: float = FIRST_PAUSE_S
    status: int | None = None
    """Of its last end."""
    _unsent: signal.Signals | None = None
    """For the process that is being started."""

    async def run_once(self) -> float:
        """Until it ends. Returns for how many seconds it ran. One that cannot be started has ended with status 1."""
        self.socket.unlink(missing_ok=True)
        began = time.monotonic()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                pass_fds=(self.listener.fileno(),),
                # A Ctrl-C of the terminal comes through the supervisor.
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except (OSError, subprocess.SubprocessError) as error:
            # Memory, processes or descriptors are short, maybe for a moment: the others serve.
            logger.error("process %d of the gateway cannot be started: %s", self.number, error)
            self.status = 1
            return 0.0
        if self._unsent is not None:
            self.process.send_signal(self._unsent)
        self.status = await self.process.wait()
        self.has_served = self.has_served or self.socket.exists()
        return time.monotonic() - began

    def send(self, number: signal.Signals) -> None:
        """To the process that runs, or else to the one that is being started, if there is one."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)
        else:
            self._unsent = number


@dataclass(kw_only=True)
class Supervisor:
    """Belongs to one event loop."""

    children: list[_Child]
    front: Front
    _ending: asyncio.Event = field(default_factory=asyncio.Event)
    """None is restarted from now on."""
    _deaths: deque[float] = field(default_factory=deque)
    _failure: int | None = None
    """Exit status for which all were ended."""

    async def run(self) -> int:
        """Until all have ended. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self.end, number)
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._keep(child))
        if self._failure is not None:
            return self._failure
        return 0 if all(child.status == 0 for child in self.children) else 1

    def end(self, number: signal.Signals) -> None:
        self._ending.set()
        for child in self.children:
            child.send(number)

    def drained(self, notified: Collection[int]) -> None:
        """The processes of these numbers drain. The others, which did not serve, drain on a signal."""
        self._ending.set()
        for child in self.children:
            if child.number not in notified:
                child.send(signal.SIGTERM)

    async def _keep(self, child: _Child) -> None:
        while not self._ending.is_set():
            ran_s = await child.run_once()
            self.front.sums.ended(child.number)
            if self._ending.is_set():
                return
            logger.error(
                "process of the gateway ended", extra={"fields": {"process": child.number, "status": child.status}}
            )
            if not child.has_served:
                self._fail(child.status or 1)
                return
            self._note_death()
            child.pause_s = FIRST_PAUSE_S if ran_s >= STABLE_S else child.pause_s
            await self._pause(child.pause_s)
            child.pause_s = min(2 * child.pause_s, MAX_PAUSE_S)

    def _note_death(self) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > DEATHS_S:
            self._deaths.popleft()
        if len(self._deaths) >= MAX_DEATHS:
            logger.error("%d processes of the gateway have died within %g s: ending all", len(self._deaths), DEATHS_S)
            self._fail(1)

    def _fail(self, status: int) -> None:
        self._failure = self._failure or max(1, status)
        self.end(signal.SIGTERM)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        except TimeoutError:
            return


def listeners_of(config: GatewayConfig, count: int) -> list[socket.socket]:
    """For one port. Raises `StartupError` when it is taken, by another gateway of this user as well."""
    with listen(config.host, config.port) as alone:
        port = alone.getsockname()[1]
    return [listen(config.host, port, shared=True) for _ in range(count)]


def supervise(config: GatewayConfig, count: int, command: Sequence[str], serve_front: "ServeFront") -> int:
    """Run `count` processes of `command`, which gets `--process-place FILE`, until they end. Returns the exit status.

    Raises `StartupError` for a port that is taken.
    """
    configure_logging(config.log_format, level=config.log_level, shared=True)
    if config.admin_port is None:
        raise StartupError("several processes need a port for administrators: add --admin-port")
    with ExitStack() as held:
        listeners = [held.enter_context(each) for each in listeners_of(config, count)]
        flags = "--admin-host or --admin-port"
        admin = held.enter_context(listen(config.admin_host, config.admin_port, flags=flags))
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="tandem-gateway-")))
        token = secrets.token_hex(32)
        children = []
        for number, listener in enumerate(listeners):
            place = PlaceFile(number=number, count=count, listener=listener.fileno(), token=token)
            argv = [*command, "--process-place", str(write_place(folder, place))]
            children.append(_Child(number=number, command=argv, listener=listener, socket=socket_of(folder, number)))
        return uvloop.run(_run(children, folder, admin, serve_front))


class ServeFront(Protocol):
    """Makes the server of an application."""

    def __call__(self, app: Front) -> FrontServer: ...


async def _run(children: list[_Child], folder: Path, admin: socket.socket, serve_front: ServeFront) -> int:
    front = Front(folder=folder, count=len(children))
    supervisor = Supervisor(children=children, front=front)
    front.on_drain = supervisor.drained
    server = serve_front(front)
    serving = asyncio.create_task(server.serve(sockets=[admin]), name="admin")
    try:
        return await supervisor.run()
    finally:
        server.should_exit = True
        await serving
