"""Connections that a process has no descriptor for wait; they are not reset."""

import asyncio
import resource
import subprocess
import sys

import pytest

from tandem_services.gateway.http.accepting import most_descriptors, needs_acceptor

PATIENT_S = 60.0
CLIENTS = 200
ECHO = """
import asyncio, resource, socket, sys
import uvloop
from tandem_services.gateway.http.accepting import Acceptor

answered = []

class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(data)
        answered.append(self.transport)

def end_idle():
    if answered:
        answered.pop(0).close()
        return True
    return False

async def serve():
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    acceptor = Acceptor([listener], Echo{end_idle})
    acceptor.start()
    print(listener.getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(acceptor.pauses, flush=True)

{run}(serve())
"""


@pytest.mark.parametrize("run", ["asyncio.run", "uvloop.run"])
@pytest.mark.parametrize("idle", [False, True], ids=["clients leave", "clients stay idle"])
async def test_connections_beyond_the_descriptors_are_not_reset(run, idle):
    code = ECHO.format(run=run, end_idle=", end_idle=end_idle" if idle else "")
    server = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    opened: list[asyncio.StreamWriter] = []
    try:
        assert server.stdout is not None
        port = int(await asyncio.to_thread(server.stdout.readline))

        async def exchange(number: int) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"%03d" % number)
            answer = await reader.readexactly(3)
            if idle:
                opened.append(writer)
            else:
                writer.close()
            return answer

        async with asyncio.timeout(PATIENT_S):
            answers = await asyncio.gather(*map(exchange, range(CLIENTS)))
        assert answers == [b"%03d" % number for number in range(CLIENTS)]
        pauses, _ = await asyncio.to_thread(server.communicate, "")
        assert int(pauses) > 0, "descriptors were never short"
    finally:
        for writer in opened:
            writer.close()
        server.kill()
        server.wait()


def test_quarter_of_few_descriptors_is_reserved(monkeypatch):
    for limit, most, needed in ((256, 192, True), (4096, 4032, True), (1_048_576, 1_048_512, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limit=limit: (limit, limit))
        assert (most_descriptors(), needs_acceptor()) == (most, needed)
