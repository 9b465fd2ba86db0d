"""Typed channels: which keys may connect, what is refused, and that nothing blocks."""

import asyncio
import errno
import resource

import pytest
import zmq

from tandem_engine.base.errors import ConfigError, WireError
from tandem_engine.ipc import async_channels, channels
from tandem_engine.ipc.async_channels import AsyncDealerChannel, AsyncPairServer, SocketReadable
from tandem_engine.ipc.channels import (
    IpcContext,
    PairChannel,
    Poller,
    RouterChannel,
)
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.control import Drain, EngineFailed, EngineToWorker, WorkerToEngine
from tandem_engine.messages.outputs import EngineReply, Pong
from tandem_engine.messages.requests import EngineRequest, Ping
from tandem_testing.waiting import until

WAIT = 60.0


@pytest.fixture
def keys() -> KeyPair:
    return KeyPair.generate()


@pytest.fixture
def context(keys):
    context = IpcContext(keys)
    yield context
    context.close()


def open_router(context: IpcContext) -> RouterChannel[EngineRequest, EngineReply]:
    return RouterChannel(context, "127.0.0.1", 0, inbound=EngineRequest, outbound=EngineReply)


def open_dealer(context: IpcContext, endpoint: str) -> AsyncDealerChannel[EngineReply, EngineRequest]:
    return AsyncDealerChannel(context, endpoint, inbound=EngineReply, outbound=EngineRequest)


def received(router: RouterChannel[EngineRequest, EngineReply]) -> list[tuple[bytes, EngineRequest]]:
    Poller([router.socket]).wait(WAIT)
    return list(router.receive())


async def replied(
    context: IpcContext, count: int
) -> tuple[RouterChannel[EngineRequest, EngineReply], AsyncDealerChannel[EngineReply, EngineRequest], list[Pong]]:
    """A server, a client, and so many replies that the server has sent it."""
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    dealer.send(Ping(nonce=0))
    [(client, _)] = await asyncio.to_thread(received, router)
    pongs = [Pong(nonce=nonce, incarnation="w@1") for nonce in range(count)]
    for pong in pongs:
        assert router.send(client, pong)
    return router, dealer, pongs


async def test_request_is_sent_and_its_reply_received(context) -> None:
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    assert dealer.send(Ping(nonce=1))
    [(client, message)] = await asyncio.to_thread(received, router)
    assert message == Ping(nonce=1)
    assert router.send(client, Pong(nonce=1, incarnation="w@1"))
    assert await asyncio.wait_for(dealer.receive(), WAIT) == Pong(nonce=1, incarnation="w@1")
    dealer.close()
    router.close()


async def test_no_reply_is_missed_while_requests_are_sent(context) -> None:
    """A send may take away the word that something has arrived (zmq_getsockopt(3), ZMQ_FD)."""
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    count = 500

    def echo() -> None:
        for _ in range(count):
            [(client, message), *more] = received(router)
            for sender, ping in ((client, message), *more):
                router.send(sender, Pong(nonce=ping.nonce, incarnation="w@1"))
            if ping.nonce == count - 1:
                return

    echoing = asyncio.create_task(asyncio.to_thread(echo))

    async def read() -> list[EngineReply]:
        return [await dealer.receive() for _ in range(count)]

    reading = asyncio.create_task(read())
    for nonce in range(count):
        assert dealer.send(Ping(nonce=nonce))
        if nonce % 3 == 0:
            await asyncio.sleep(0)
    assert [reply.nonce for reply in await asyncio.wait_for(reading, WAIT)] == [*range(count)]
    await echoing
    dealer.close()
    router.close()


async def test_unread_messages_do_not_spin_the_event_loop(context, monkeypatch) -> None:
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    assert dealer.send(Ping(nonce=0))
    [(client, _)] = await asyncio.to_thread(received, router)
    assert router.send(client, Pong(nonce=0, incarnation="w@1"))
    await asyncio.wait_for(dealer.receive(), WAIT)
    waiting = asyncio.create_task(dealer.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    reported: list[SocketReadable] = []

    def note(readable: SocketReadable) -> None:
        reported.append(readable)

    monkeypatch.setattr(SocketReadable, "_wake", note)
    assert router.send(client, Pong(nonce=1, incarnation="w@1"))
    await until(lambda: bool(reported), WAIT, "the loop is notified")
    before = len(reported)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(reported) <= before + 1
    assert await asyncio.wait_for(dealer.receive(), WAIT) == Pong(nonce=1, incarnation="w@1")
    dealer.close()
    router.close()


async def test_send_wakes_a_reader_only_for_what_is_there(context) -> None:
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    assert dealer.send(Ping(nonce=0))
    [(client, _)] = await asyncio.to_thread(received, router)
    waiting = asyncio.create_task(dealer.readable())
    await asyncio.sleep(0)
    assert dealer.send(Ping(nonce=1))
    await asyncio.sleep(0)
    assert not waiting.done(), "nothing has come"
    assert router.send(client, Pong(nonce=0, incarnation="w@1"))
    Poller([dealer.socket]).wait(WAIT)
    # The send consumes the descriptor's event before the event loop has seen it.
    assert dealer.send(Ping(nonce=2))
    await asyncio.wait_for(waiting, WAIT)
    assert [*dealer.waiting()] == [Pong(nonce=0, incarnation="w@1")]
    dealer.close()
    router.close()


class FullSocket:
    """It takes no message, and has been used all the same."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def send(self, *_: object) -> None:
        self._socket.get(zmq.EVENTS)
        raise zmq.Again


async def test_send_without_room_wakes_a_reader_too(context) -> None:
    router, dealer, pongs = await replied(context, 1)
    waiting = asyncio.create_task(dealer.readable())
    await asyncio.sleep(0)
    socket = dealer.socket
    Poller([socket]).wait(WAIT)
    dealer.socket = FullSocket(socket)
    assert not dealer.send(Ping(nonce=1))
    dealer.socket = socket
    await asyncio.wait_for(waiting, WAIT)
    assert [*dealer.waiting()] == pongs
    dealer.close()
    router.close()


async def test_closing_a_channel_cancels_pending_receives(context) -> None:
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    waiting = asyncio.create_task(dealer.receive())
    await asyncio.sleep(0)
    dealer.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    router.close()


async def test_client_with_other_keys_is_rejected(context) -> None:
    router = open_router(context)
    foreign_context = IpcContext(KeyPair.generate())
    foreign = open_dealer(foreign_context, router.endpoint)
    friend = open_dealer(context, router.endpoint)
    foreign.send(Ping(nonce=666))
    await asyncio.wait_for(foreign.disconnected(), WAIT)
    friend.send(Ping(nonce=1))
    messages = await asyncio.to_thread(received, router)
    assert [message for _, message in messages] == [Ping(nonce=1)]
    foreign.close()
    foreign_context.close()
    friend.close()
    router.close()


async def test_client_without_keys_is_rejected(context) -> None:
    router = open_router(context)
    plain_context = IpcContext()
    plain = open_dealer(plain_context, router.endpoint)
    plain.send(Ping(nonce=666))
    friend = open_dealer(context, router.endpoint)
    friend.send(Ping(nonce=1))
    messages = await asyncio.to_thread(received, router)
    assert [message for _, message in messages] == [Ping(nonce=1)]
    plain.close()
    plain_context.close()
    friend.close()
    router.close()


async def test_end_of_the_server_is_noticed_at_once(context) -> None:
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    dealer.send(Ping(nonce=1))
    await asyncio.to_thread(received, router)
    router.close()
    await asyncio.wait_for(dealer.disconnected(), WAIT)
    dealer.close()


async def test_messages_before_server_end_are_still_received(context) -> None:
    """A client that is notified of the end first must not lose what came before it."""
    router, dealer, pongs = await replied(context, 9)
    assert await asyncio.wait_for(dealer.receive(), WAIT) == pongs[0]
    router.drain(WAIT)
    await asyncio.wait_for(dealer.disconnected(), WAIT)
    assert list(dealer.waiting()) == pongs[1:]
    assert list(dealer.waiting()) == []
    dealer.close()


async def test_yielding_receiver_holds_no_message(context, monkeypatch) -> None:
    """It was missing among those that are `waiting`, which came without it."""
    monkeypatch.setattr(async_channels, "MAX_PER_RECEIVE", 1)
    router, dealer, pongs = await replied(context, 3)
    router.drain(WAIT)
    await asyncio.wait_for(dealer.disconnected(), WAIT)
    assert await asyncio.wait_for(dealer.receive(), WAIT) == pongs[0]
    receiving = asyncio.create_task(dealer.receive())
    await asyncio.sleep(0)
    assert list(dealer.waiting()) == pongs[1:]
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    dealer.close()


async def test_dealer_detects_closed_endpoint_immediately(context) -> None:
    router = open_router(context)
    router.close()
    dealer = open_dealer(context, router.endpoint)
    await asyncio.wait_for(dealer.disconnected(), WAIT)
    dealer.close()


def test_reply_to_ended_client_is_reported_not_raised(context) -> None:
    router = open_router(context)
    assert router.send(b"nobody", Pong(nonce=1, incarnation="w@1")) is False
    router.close()


async def test_undecodable_messages_are_counted_and_dropped(context) -> None:
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    raw = dealer.socket
    raw.send(b"\x80\x04rubbish")
    raw.send_multipart([b"two", b"frames"])
    dealer.send(Ping(nonce=1))
    messages: list[tuple[bytes, EngineRequest]] = []
    while not messages:
        messages = await asyncio.to_thread(received, router)
    assert [message for _, message in messages] == [Ping(nonce=1)]
    assert router.refused == 2
    dealer.close()
    router.close()


def test_taken_port_is_a_clear_error(context) -> None:
    first = open_router(context)
    port = int(first.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        RouterChannel(context, "127.0.0.1", port, inbound=EngineRequest, outbound=EngineReply)
    first.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "example.org", "::"])
def test_without_keys_only_loopback_is_served(host) -> None:  # [private-channels]
    context = IpcContext()
    with pytest.raises(ConfigError, match="--curve-keys"):
        RouterChannel(context, host, 0, inbound=EngineRequest, outbound=EngineReply)
    RouterChannel(context, "127.0.0.1", 0, inbound=EngineRequest, outbound=EngineReply).close()
    context.close()


async def test_control_channel_carries_both_directions(tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    service_context, engine_context = IpcContext(), IpcContext()
    service: AsyncPairServer[EngineToWorker, WorkerToEngine] = AsyncPairServer(
        service_context, endpoint, inbound=EngineToWorker, outbound=WorkerToEngine
    )
    engine: PairChannel[WorkerToEngine, EngineToWorker] = PairChannel(
        engine_context, endpoint, inbound=WorkerToEngine, outbound=EngineToWorker
    )
    failed = EngineFailed(message="no", code="config_error")
    assert engine.send(failed)
    assert await asyncio.wait_for(service.receive(), WAIT) == failed
    await service.send(Drain())
    await asyncio.to_thread(Poller([engine.socket]).wait, WAIT)
    assert list(engine.receive()) == [Drain()]
    engine.close()
    service.close()
    engine_context.close()
    service_context.close()


def test_keys_survive_a_file_that_only_the_owner_can_read(tmp_path, keys) -> None:
    path = tmp_path / "keys.json"
    keys.save(path)
    assert KeyPair.load(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{}", '{"public": "x", "secret": "y"}', '{"public": 1, "secret": 2}', "[]"])
def test_file_that_holds_no_keys_is_a_clear_error(tmp_path, text) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--curve-keys"):
        KeyPair.load(path)


def test_curve_library_is_there() -> None:
    assert zmq.has("curve")


async def test_undecodable_control_message_is_dropped_and_counted(tmp_path, keys) -> None:  # [wire-refused]
    context = IpcContext(keys)
    endpoint = f"ipc://{tmp_path}/control"
    service: AsyncPairServer[EngineToWorker, WorkerToEngine] = AsyncPairServer(
        context, endpoint, inbound=EngineToWorker, outbound=WorkerToEngine
    )
    engine: PairChannel[WorkerToEngine, EngineToWorker] = PairChannel(
        context, endpoint, inbound=WorkerToEngine, outbound=EngineToWorker
    )
    await service.socket.send(b"\x01rubbish")
    await service.send(Drain())
    orders: list[WorkerToEngine] = []
    while not orders:
        assert await asyncio.to_thread(Poller([engine.socket]).wait, WAIT)
        orders += engine.receive()
    assert orders == [Drain()]
    assert engine.refused == 1
    engine.close()
    service.close()
    context.close()


async def test_flood_of_messages_is_taken_in_by_portions(monkeypatch, context) -> None:
    monkeypatch.setattr(channels, "MAX_PER_RECEIVE", 3)
    router = open_router(context)
    dealer = open_dealer(context, router.endpoint)
    for nonce in range(8):
        assert dealer.send(Ping(nonce=nonce))
    nonces: list[int] = []
    while len(nonces) < 8:
        portion = await asyncio.to_thread(received, router)
        assert 1 <= len(portion) <= 3
        nonces += [message.nonce for _, message in portion]
    assert nonces == [*range(8)]
    dealer.close()
    router.close()


def test_key_file_is_private_even_where_another_was_not(tmp_path, caplog):  # [key-file-refused]
    path = tmp_path / "keys.json"
    path.touch(mode=0o644)
    KeyPair.generate().save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    KeyPair.load(path)
    assert not caplog.records
    path.chmod(0o644)
    KeyPair.load(path)
    assert f"{path} is world-readable" in caplog.text


async def test_gateway_connects_to_a_thousand_workers():
    """libzmq allows 1,023 sockets unless told otherwise, and each connection takes three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, descriptors = 1024, 8192
    if hard < descriptors:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, descriptors), hard))
    context = IpcContext()
    try:
        dealers = [open_dealer(context, "tcp://127.0.0.1:9") for _ in range(wanted)]
        assert len(dealers) == wanted
    finally:
        context.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_socket_without_descriptors_names_the_limit(context, monkeypatch):
    def refuse(kind: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(context, "socket", refuse)
    with pytest.raises(WireError, match="ulimit -Hn"):
        open_dealer(context, "tcp://127.0.0.1:9")
