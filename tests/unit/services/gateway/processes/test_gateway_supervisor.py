"""The supervisor of several processes of a gateway: signals while one starts, and starts that fail."""

import asyncio
import signal
import sys

import pytest

from tandem_services.common.sockets import listen
from tandem_services.gateway.process_place import socket_of
from tandem_services.gateway.processes import supervisor
from tandem_services.gateway.processes.front import Front
from tandem_services.gateway.processes.supervisor import Supervisor
from tandem_testing.waiting import until

PATIENCE_S = 60.0
SERVES = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(1000)"


@pytest.fixture
def one(tmp_path):
    """A supervisor of one process, which has a socket at once and ends by a signal."""
    with listen("127.0.0.1", 0, shared=True) as listener:
        socket = socket_of(tmp_path, 0)
        command = [sys.executable, "-c", SERVES, str(socket)]
        child = supervisor._Child(number=0, command=command, listener=listener, socket=socket)
        yield Supervisor(children=[child], front=Front(folder=tmp_path, count=1))


@pytest.fixture
def starts(monkeypatch):
    """What is called with the number of each start, from 0, before it."""
    real, calls = asyncio.create_subprocess_exec, []

    async def create(*argv, **options):
        number, calls[0] = calls[0], calls[0] + 1
        calls[1](number)
        return await real(*argv, **options)

    monkeypatch.setattr(supervisor.asyncio, "create_subprocess_exec", create)
    calls.extend((0, lambda _: None))
    return calls


async def test_signal_during_a_start_reaches_the_process(one, starts):
    starts[1] = lambda _: one.end(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        await one.run()
    assert (starts[0], one.children[0].status) == (1, -signal.SIGTERM)


async def test_failed_start_of_a_successor_is_tried_again(one, starts, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)

    def before(number):
        if number == 1:
            raise BlockingIOError("no more processes")
        if number == 2:
            one.end(signal.SIGTERM)

    starts[1] = before
    running = asyncio.create_task(one.run())
    await until(one.children[0].socket.exists, PATIENCE_S, "it serves")
    async with asyncio.timeout(PATIENCE_S):
        one.children[0].send(signal.SIGKILL)
        await running
    assert starts[0] == 3


async def test_failed_first_start_ends_the_gateway(one, starts):
    def before(_):
        raise BlockingIOError("no more processes")

    starts[1] = before
    async with asyncio.timeout(PATIENCE_S):
        assert await one.run() == 1
