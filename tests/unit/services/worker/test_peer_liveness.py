"""Whether a fenced peer's process has ended: real sockets, a registry and a clock of the test's [late-write]."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field, replace

import pytest

from tandem_engine.messages.control import PeerEnded
from tandem_engine.messages.requests import Peer
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_services.worker import peers
from tandem_services.worker.peers import UNREACHABLE_S, PeerExits
from tandem_testing.router_builders import make_record
from tandem_testing.service_clock import ServiceClock
from tandem_testing.waiting import until

PATIENCE_S = 60.0


@dataclass
class Board:
    """A registry."""

    workers: list[WorkerRecord] = field(default_factory=list)
    away: bool = False
    asked: int = 0

    async def snapshot(self, missing=()) -> FleetSnapshot:
        self.asked += 1
        if self.away:
            raise RedisUnavailableError("away")
        return FleetSnapshot(epoch="e", workers=tuple(self.workers), malformed=0)


@dataclass
class Watched:
    """A worker that waits for the end of a peer."""

    peer_exits: PeerExits
    board: Board
    clock: ServiceClock
    ended: list[str]


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(peers, "PAUSE_S", 0.01)
    board, clock, ended = Board(), ServiceClock(), []

    async def order(message: PeerEnded) -> None:
        ended.append(message.incarnation)

    return Watched(PeerExits(fleet=board, order=order, clock=clock, recheck_s=0.02), board, clock, ended)


@contextlib.contextmanager
def stopped_process():
    """Its socket, on which the kernel continues to listen. No process accepts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def peer_at(port: int, number: int = 1) -> Peer:
    return Peer(worker_id="p", incarnation=f"p@{number}", endpoint=f"tcp://127.0.0.1:{port}", compat_hash="h")


def registered(name: str, port: int, number: int = 1) -> WorkerRecord:
    record = make_record(name, number=number)
    return replace(record, view=replace(record.view, peer_endpoint=f"tcp://127.0.0.1:{port}"))


@contextlib.asynccontextmanager
async def following(watched: Watched, peer: Peer):
    (unfollowed,) = watched.peer_exits.unfollowed([peer])
    task = asyncio.create_task(watched.peer_exits.follow(unfollowed))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_process_with_closed_socket_has_exited(watched):
    with stopped_process() as listener:
        port = listener.getsockname()[1]
    async with following(watched, peer_at(port)) as task:
        await asyncio.wait_for(task, PATIENCE_S)
    assert watched.ended == ["p@1"]


@pytest.mark.asyncio
async def test_stopped_process_counts_as_running_until_killed(watched):
    with stopped_process() as listener:
        peer = peer_at(listener.getsockname()[1])
        async with following(watched, peer) as task:
            await until(lambda: watched.board.asked > 20, PATIENCE_S, "it looks again and again")
            watched.clock.advance(3600.0)
            looks = watched.board.asked
            await until(lambda: watched.board.asked > looks + 5, PATIENCE_S, "and again")
            assert watched.ended == []
            assert watched.peer_exits.unfollowed([peer]) == []
            listener.close()
            await asyncio.wait_for(task, PATIENCE_S)
    assert watched.ended == ["p@1"]
    assert watched.peer_exits.unfollowed([peer]) == [peer]


@pytest.mark.asyncio
async def test_process_that_hangs_up_and_listens_on_lives(watched):
    """It has been woken, and its socket library closes connections without a greeting."""
    with stopped_process() as listener:
        async with following(watched, peer_at(listener.getsockname()[1])) as task:
            for _ in range(3):
                line, _ = await asyncio.to_thread(listener.accept)
                line.close()
            assert not task.done()


@pytest.mark.asyncio
async def test_machine_silent_for_the_timeout_is_ended(watched, monkeypatch):
    async def timed_out(host: str, port: int) -> None:
        raise TimeoutError(f"{host}:{port}")

    monkeypatch.setattr(asyncio, "open_connection", timed_out)
    async with following(watched, peer_at(1)) as task:
        await until(lambda: watched.board.asked > 5, PATIENCE_S, "it probes again and again")
        assert watched.ended == []
        watched.clock.advance(UNREACHABLE_S)
        await asyncio.wait_for(task, PATIENCE_S)
    assert watched.ended == ["p@1"]


@pytest.mark.asyncio
async def test_only_its_endpoint_proves_that_a_process_ended(watched):
    with stopped_process() as listener:
        port = listener.getsockname()[1]
        watched.board.workers = [registered("p", port), registered("p", port + 1, number=2)]
        async with following(watched, peer_at(port)) as task:
            await until(lambda: watched.board.asked > 5, PATIENCE_S, "it looks again and again")
            assert watched.ended == []
            watched.board.away = True
            await until(lambda: watched.board.asked > 10, PATIENCE_S, "also without Redis")
            watched.board.away = False
            watched.board.workers.append(registered("q", port, number=7))
            await asyncio.wait_for(task, PATIENCE_S)
    assert watched.ended == ["p@1"]


@pytest.mark.asyncio
async def test_peer_with_an_invalid_endpoint_is_treated_as_unreachable(watched):
    peer = Peer(worker_id="p", incarnation="p@1", endpoint="tcp://127.0.0.1:99999999", compat_hash="h")
    async with following(watched, peer) as task:
        await until(lambda: watched.board.asked > 2, PATIENCE_S, "it knocks")
        watched.clock.advance(UNREACHABLE_S)
        await asyncio.wait_for(task, PATIENCE_S)
    assert watched.ended == ["p@1"]
