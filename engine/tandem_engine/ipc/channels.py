"""Typed ZMQ channels with CURVE authentication and size limits. Nothing outside this package imports zmq.

Topology
    request   gateway DEALER ──▶ engine ROUTER      EngineRequest down, EngineReply up
    peer      engine DEALER  ──▶ engine ROUTER      PeerMessage, one way per socket
    control   engine PAIR    ──▶ worker PAIR        EngineToWorker up, WorkerToEngine down (ipc://)

Engines are synchronous and poll; gateways and worker services use the asyncio versions (`async_channels`). All
sockets are non-blocking and bounded: a send that would block is dropped and reported by the return value, because
a peer that does not read must never stop the scheduler.

Authentication: every process of one deployment holds the same CURVE key pair (`keys.KeyPair`, from a Secret
or made by `tandem up`). A server accepts exactly that public key; without keys (`--insecure`) sockets
must be bound to loopback.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from tandem_engine.base.addresses import LOOPBACK, Address, AddressError, ip_of, is_ipv6, is_loopback
from tandem_engine.base.errors import ConfigError, WireError
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.codec import MAX_MESSAGE_BYTES, Codec

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 10_000
"""Messages queued per connection before a slow reader costs drops instead of memory."""

MAX_PER_RECEIVE = 1_000
"""Messages that one call of `receive` takes in, so that a flood of them cannot keep the scheduler from its step."""

HEARTBEAT_MS = 500

HEARTBEAT_TIMEOUT_MS = 2_000
"""A silent peer (SIGSTOP, cable pulled) is disconnected after this [silent-peer-dropped]."""

In = TypeVar("In")
Out = TypeVar("Out")


class _SharedKeyOnly:
    """CURVE credentials provider: a client must own the deployment's key pair."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self._public


class IpcContext:
    """One ZMQ context per process, with the authenticator when keys are used. Close it last."""

    def __init__(self, keys: KeyPair | None = None) -> None:
        self.keys = keys
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # 1,023 by default: 341 watched connections. Descriptors are the limit, which a process raises at its start.
        self.zmq.set(zmq.MAX_SOCKETS, self.zmq.get(zmq.SOCKET_LIMIT))
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self.zmq)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=_SharedKeyOnly(keys.public))

        self._asyncio: zmq.asyncio.Context = zmq.asyncio.Context(shadow=self.zmq)
        self._sockets: WeakSet[Any] = WeakSet()

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """A synchronous socket that `close` will not wait for."""
        socket = self.zmq.socket(kind)
        self._sockets.add(socket)
        return socket

    def async_socket(self, kind: int) -> zmq.asyncio.Socket:
        """An asyncio socket that `close` will not wait for."""
        socket = self._asyncio.socket(kind)
        self._sockets.add(socket)
        return socket

    def adopt(self, socket: "zmq.Socket[Any]") -> None:
        """Let `close` close a socket that ZMQ made, such as a monitor."""
        self._sockets.add(socket)

    def close(self) -> None:
        """Close what is still open and end the context. Terminating one with an open socket would hang."""
        for socket in list(self._sockets):
            socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self.zmq.destroy(linger=0)

    def require_keys_off_loopback(self, host: str) -> None:
        """Raise `ConfigError` when others could connect to `host` and nothing would keep them out."""
        if self.keys is None and not is_loopback(host):
            raise ConfigError(
                f"cannot listen on {host} without keys, because any process could connect: "
                f"give every process of the deployment the same --curve-keys file, or use {LOOPBACK}"
            )

    def secure_server(self, socket: "zmq.Socket[Any]") -> None:
        if self.keys is not None:
            socket.curve_secretkey = self.keys.secret
            socket.curve_publickey = self.keys.public
            socket.curve_server = True

    def secure_client(self, socket: "zmq.Socket[Any]") -> None:
        if self.keys is not None:
            socket.curve_secretkey = self.keys.secret
            socket.curve_publickey = self.keys.public
            socket.curve_serverkey = self.keys.public


def configure(socket: "zmq.Socket[Any]") -> None:
    """Bounds and heartbeats of every socket."""
    socket.linger = 0
    socket.sndhwm = HIGH_WATER_MARK
    socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def bind(socket: "zmq.Socket[bytes]", host: str, port: int = 0) -> str:
    """Bind to tcp `host:port`, a free port when 0, and return the endpoint. Raises `ConfigError` when taken."""
    try:
        address = Address(host, port)
    except AddressError as error:
        socket.close()
        raise ConfigError(f"cannot listen: {error}. Choose another port or address") from error
    try:
        _choose_family(socket, address.host)
        socket.bind(address.endpoint)
        bound = Address.of_endpoint(str(socket.getsockopt_string(zmq.LAST_ENDPOINT)))
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot listen on {address}: {error}. Choose another port or address") from error
    return Address(address.host, bound.port).endpoint


def connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Connect to a tcp endpoint, which came in a message or from the registry. Raises `WireError` when it is none."""
    try:
        _choose_family(socket, Address.of_endpoint(endpoint).host)
        socket.connect(endpoint)
    except (zmq.ZMQError, AddressError) as error:
        raise WireError(f"cannot connect to {endpoint[:200]!r}: {error}") from error


def _choose_family(socket: "zmq.Socket[bytes]", host: str) -> None:
    """Let the socket speak IPv6, unless `host` is an IPv4 address: a name may have addresses of either family.

    ZMQ goes back to IPv4 by itself where the kernel has no IPv6.
    """
    socket.ipv6 = is_ipv6(host) or ip_of(host) is None


class RouterChannel(Generic[In, Out]):
    """Server end: receives `In` from identified clients, sends `Out` back by identity."""

    def __init__(self, context: IpcContext, host: str, port: int, *, inbound: object, outbound: object) -> None:
        context.require_keys_off_loopback(host)
        self._inbound: Codec[In] = Codec(inbound)
        self._outbound: Codec[Out] = Codec(outbound)
        self.socket = context.socket(zmq.ROUTER)
        configure(self.socket)
        # An unroutable reply raises instead of vanishing, so that a dead gateway's requests are noticed.
        self.socket.router_mandatory = True
        self.socket.router_handover = True
        context.secure_server(self.socket)
        self.endpoint = bind(self.socket, host, port)
        self.refused = 0
        """Messages that did not decode since start."""

    def receive(self) -> Iterator[tuple[bytes, In]]:
        """Messages that are there now, with the sender's identity. Undecodable ones are counted and dropped."""
        for _ in range(MAX_PER_RECEIVE):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise WireError(f"{len(frames)} frames instead of 2")
                yield frames[0], self._inbound.decode(frames[1])
            except WireError:
                self.refused += 1

    def send(self, identity: bytes, message: Out) -> bool:
        """False when the client is gone or does not read."""
        try:
            self.socket.send_multipart((identity, self._outbound.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def drain(self, seconds: float) -> None:
        """Close, letting queued messages leave for up to `seconds`: for the final messages of a process."""
        self.socket.close(linger=int(seconds * 1000))

    def close(self) -> None:
        self.socket.close()


class DealerChannel(Generic[Out]):
    """Synchronous client end for one-way messages (engine → peer engine).

    Raises `WireError` for an endpoint that cannot be one: it came in a message.
    """

    def __init__(self, context: IpcContext, endpoint: str, *, outbound: object) -> None:
        self._outbound: Codec[Out] = Codec(outbound)
        self.socket = context.socket(zmq.DEALER)
        configure(self.socket)
        context.secure_client(self.socket)
        self.endpoint = endpoint
        try:
            connect(self.socket, endpoint)
        except WireError:
            self.socket.close()
            raise

    def send(self, message: Out) -> bool:
        """False when the queue to the peer is full. Messages to a peer that never answers are lost by design."""
        try:
            self.socket.send(self._outbound.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class PairChannel(Generic[In, Out]):
    """Synchronous PAIR over ipc:// or inproc://; the engine's end of the control channel."""

    def __init__(self, context: IpcContext, endpoint: str, *, inbound: object, outbound: object) -> None:
        self._inbound: Codec[In] = Codec(inbound)
        self._outbound: Codec[Out] = Codec(outbound)
        self.socket = context.socket(zmq.PAIR)
        configure(self.socket)
        self.socket.connect(endpoint)
        self.refused = 0
        """Messages that did not decode since start."""

    def receive(self) -> Iterator[In]:
        """All messages that are there now. Undecodable ones are counted, logged and dropped."""
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield self._inbound.decode(data)
            except WireError as error:
                self.refused += 1
                logger.error("dropped a message on the control channel: %s", error)

    def send(self, message: Out) -> bool:
        try:
            self.socket.send(self._outbound.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def drain(self, seconds: float) -> None:
        """Close, letting queued messages leave for up to `seconds`: for the final messages of a process."""
        self.socket.close(linger=int(seconds * 1000))

    def close(self) -> None:
        self.socket.close()


class Poller:
    """Waits on ZMQ sockets and plain file descriptors together."""

    def __init__(self, sockets: "Iterable[zmq.Socket[bytes]]", descriptors: Iterable[int] = ()) -> None:
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        for descriptor in descriptors:
            self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """True when something became readable within `seconds`."""
        return bool(self._poller.poll(int(seconds * 1000)))


class CallChannel(Generic[In, Out]):
    """Sends `Out` and receives `In`. Reconnects by itself; what was on its way then is lost, so callers ask again.

    One thread at a time. Raises `WireError` for an endpoint that cannot be one.
    """

    def __init__(self, context: IpcContext, endpoint: str, *, inbound: object, outbound: object) -> None:
        self._out: DealerChannel[Out] = DealerChannel(context, endpoint, outbound=outbound)
        self._inbound: Codec[In] = Codec(inbound)
        self._poller = Poller([self._out.socket])
        self.refused = 0
        """Messages that did not decode since start."""

    def send(self, message: Out) -> bool:
        """False when the queue is full, because the peer has not replied for long."""
        return self._out.send(message)

    def receive(self, timeout_s: float) -> In | None:
        """The next message, or None when there is none within `timeout_s`. Undecodable ones are counted."""
        while self._poller.wait(timeout_s):
            try:
                return self._inbound.decode(self._out.socket.recv())
            except WireError:
                self.refused += 1
        return None

    def close(self) -> None:
        self._out.close()
