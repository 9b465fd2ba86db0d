"""Where the connections of a client lead: each kind of Redis URL finds the server of the next one in its own way.

    one server    its address, whose name is resolved again for each connection
    cluster       the owner that a MOVED has named; at first, or when that one does not answer, any node in turn
    Sentinels     the primary that one of them names, each in turn

A connection that is open begins with HELLO, which needs no rights and returns mode and role of the server. A node of a
cluster then lists the other nodes (CLUSTER SLOTS), so that one address is enough to survive its loss.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AskError, AuthenticationError, RedisError, ResponseError

from tandem_engine.base.addresses import Address, AddressError
from tandem_services.common.redis_url import NO_DATABASES, Kind, RedisUrl

SENTINEL_S = 0.25
"""A Sentinel that has not answered by then is passed over: three fit into the opening of a connection."""

SAME_HOST = frozenset({"", "?"})
"""How a node names a host that it does not know: the one at which it was reached."""


class Wire(Protocol):
    """What is used of redis-py's connections, which know TLS, passwords and the protocol."""

    async def connect(self) -> None: ...

    def pack_command(self, *args: Any) -> list[bytes]: ...

    async def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None:
        """Writes before it waits for anything."""
        ...

    async def read_response(self) -> Any: ...

    async def disconnect(self, nowait: bool = False) -> None: ...


class Places(ABC):
    """Of one client. Belongs to one event loop. Only nodes of a cluster redirect: the others follow nothing."""

    @abstractmethod
    def wire(self) -> Wire:
        """The next connection, not open yet."""

    def left(self) -> None:  # noqa: B027  most find the server of each connection
        """The server of the last connection is not the one that takes commands."""

    def named(self, redirection: AskError, by: Wire) -> Address | None:  # noqa: B027
        """The server that a MOVED or ASK of the connection `by` names; None where none is followed."""

    def wire_to(self, address: Address) -> Wire:
        """A connection to a node that `named` has returned."""
        raise NotImplementedError

    def moved(self, owner: Address) -> None:
        """The next connections lead to this node, which `named` has returned, until it does not answer."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePassword(CredentialProvider):
    """Reads the password at every connect, so that a rotated Secret needs no restart."""

    username: str | None
    path: Path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self.path.read_text("utf-8").strip()
        return (self.username, password) if self.username else (password,)


def places_of(url: RedisUrl, password_file: Path | None) -> Places:
    """`password_file` takes the place of a password in the URL."""
    login: dict[str, Any] = {"username": url.username, "password": url.password}
    if password_file is not None:
        login = {"credential_provider": FilePassword(username=url.username, path=password_file)}
    if url.kind is Kind.SOCKET:
        return Socket(
            lambda: cast("Wire", UnixDomainSocketConnection(path=url.path, db=url.database, **login, **PLAIN))
        )
    dial = _dialer(url, {"db": url.database, **login})
    if url.kind is Kind.SENTINEL:
        user, secret = url.options.get("sentinel_username"), url.files.get("sentinel_password_file")
        asking = {} if secret is None else {"credential_provider": FilePassword(username=user, path=secret)}
        return Sentinels(dial, _dialer(url, asking), url)
    return Nodes(dial, url.addresses)


Dial = Callable[[Address], Wire]

PLAIN: dict[str, Any] = {
    # RESP2 needs no handshake; replies are the same bytes for every server version.
    "protocol": 2,
    # One attempt: the deadline of the whole command is ours, and so is the next try.
    "retry": Retry(NoBackoff(), 0),
    "socket_timeout": None,
    "socket_connect_timeout": None,
    # The server need not know the name of a library, and a user with few rights may not set it.
    "driver_info": None,
}


def _dialer(url: RedisUrl, login: dict[str, Any]) -> Dial:
    made = {**PLAIN, **login, "socket_keepalive": True}
    if not url.tls:
        return lambda address: cast("Wire", Connection(host=address.host, port=address.port, **made))
    tls: dict[str, Any] = {name: value for name, value in url.options.items() if name.startswith("ssl_")}
    # A name can be checked only of a certificate that is required.
    checked = tls.get("ssl_cert_reqs") != "none" and tls.get("ssl_check_hostname") != "false"
    made |= {**tls, "ssl_check_hostname": checked}
    return lambda address: cast("Wire", SSLConnection(host=address.host, port=address.port, **made))


class FoundWire:
    """A connection whose server is looked for while it opens."""

    def __init__(self, find: Callable[[], Awaitable[tuple[Address, Wire]]]) -> None:
        self._find = find
        self._wire: Wire | None = None
        self.address: Address | None = None
        """Of the server, once it is open."""

    async def connect(self) -> None:
        self.address, self._wire = await self._find()

    def pack_command(self, *args: Any) -> list[bytes]:
        return self._open.pack_command(*args)

    async def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None:
        await self._open.send_packed_command(command, check_health=check_health)

    async def read_response(self) -> Any:
        return await self._open.read_response()

    async def disconnect(self, nowait: bool = False) -> None:
        if self._wire is not None:
            await self._wire.disconnect(nowait=nowait)

    @property
    def _open(self) -> Wire:
        assert self._wire is not None, "connect() comes first"
        return self._wire


class Socket(Places):
    """A server of this machine."""

    def __init__(self, dial: Callable[[], Wire]) -> None:
        self._dial = dial

    def wire(self) -> Wire:
        return self._dial()


class Nodes(Places):
    """One server, or the nodes of a cluster, of which one owns the slot of all keys of a client."""

    def __init__(self, dial: Dial, given: tuple[Address, ...]) -> None:
        self._dial = dial
        self._given = given
        self._listed: tuple[Address, ...] = ()
        self._owner: Address | None = None
        self._turn = 0

    def wire(self) -> Wire:
        return FoundWire(self._find)

    def wire_to(self, address: Address) -> Wire:
        async def find() -> tuple[Address, Wire]:
            async with connected(self._dial(address)) as wire:
                return address, wire

        return FoundWire(find)

    def named(self, redirection: AskError, by: Wire) -> Address | None:
        host = redirection.host
        if host in SAME_HOST:
            host = by.address.host if isinstance(by, FoundWire) and by.address is not None else self._given[0].host
        try:
            return Address(host, redirection.port)
        except AddressError:
            return None

    def moved(self, owner: Address) -> None:
        self._owner = owner

    def left(self) -> None:
        self._owner = None

    async def _find(self) -> tuple[Address, Wire]:
        owner, self._owner = self._owner, None
        address = owner or self._next()
        async with connected(self._dial(address)) as wire:
            if (await hello_of(wire)).get("mode") == "cluster":
                self._listed = await nodes_listed(wire, address.host) or self._listed
            # It answers, so that it stays the owner until a MOVED names another one.
            self._owner = owner
            return address, wire

    def _next(self) -> Address:
        every = tuple(dict.fromkeys((*self._given, *self._listed)))
        self._turn += 1
        return every[(self._turn - 1) % len(every)]


class Sentinels(Places):
    """The primary of a service. Each search begins at another Sentinel."""

    def __init__(self, dial: Dial, dial_sentinel: Dial, url: RedisUrl) -> None:
        self._dial = dial
        self._dial_sentinel = dial_sentinel
        self._sentinels = url.addresses
        self._service = url.service
        self._turn = 0

    def wire(self) -> Wire:
        return FoundWire(self._find)

    async def _find(self) -> tuple[Address, Wire]:
        self._turn += 1
        errors = []
        for number in range(len(self._sentinels)):
            sentinel = self._sentinels[(self._turn + number - 1) % len(self._sentinels)]
            try:
                primary = await self._named_by(sentinel)
                return primary, await self._primary_at(primary)
            except (RedisError, OSError, ValueError, IndexError, TypeError) as error:
                errors.append(f"Sentinel {sentinel}: {type(error).__name__}: {error}".rstrip(": "))
        raise ConnectionError("; ".join(errors))

    async def _named_by(self, sentinel: Address) -> Address:
        async with asyncio.timeout(SENTINEL_S), connected(self._dial_sentinel(sentinel)) as wire:
            named = await reply_of(wire, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            await wire.disconnect(nowait=True)
        if named is None:
            raise ValueError(f"it has no service {self._service!r}; correct the path of --redis-url")
        host, port = named
        return Address(text_of(host), int(port))

    async def _primary_at(self, address: Address) -> Wire:
        async with connected(self._dial(address)) as wire:
            if (role := (await hello_of(wire)).get("role", "master")) != "master":
                raise ConnectionError(f"{address} is a {role}")
            return wire


@contextlib.asynccontextmanager
async def connected(wire: Wire) -> AsyncIterator[Wire]:
    """Opens it; closes it again if that, or the block, ends early."""
    try:
        await wire.connect()
        yield wire
    except ResponseError as error:
        await wire.disconnect(nowait=True)
        if "SELECT is not allowed in cluster mode" in str(error):
            raise ResponseError(NO_DATABASES) from error
        raise
    except BaseException:
        await wire.disconnect(nowait=True)
        raise


async def reply_of(wire: Wire, *command: str) -> Any:
    """The answer to the only command in flight."""
    await wire.send_packed_command(wire.pack_command(*command), check_health=False)
    return await wire.read_response()


def text_of(value: object) -> str:
    """Raises `ValueError` for a part of a reply that is no text."""
    if not isinstance(value, bytes):
        raise ValueError(f"a reply has {type(value).__name__} instead of a text")
    return value.decode()


async def hello_of(wire: Wire) -> dict[str, str]:
    """Mode, role and more of a server; nothing if it, or a proxy before it, has no HELLO or requires a password first.

    A password that is missing is named better by the refusal of the first command.
    """
    try:
        reply = await reply_of(wire, "HELLO")
    except (ResponseError, AuthenticationError):
        return {}
    pairs = zip(reply[::2], reply[1::2], strict=True)
    return {text_of(name): value.decode() for name, value in pairs if isinstance(value, bytes)}


async def nodes_listed(wire: Wire, host: str) -> tuple[Address, ...]:
    """Primaries and replicas of a cluster, as the node at `host` lists them; none if the user lacks the right."""
    try:
        ranges = await reply_of(wire, "CLUSTER", "SLOTS")
    except ResponseError:
        return ()
    return tuple(dict.fromkeys(_nodes(ranges, host)))


def _nodes(ranges: list[Any], host: str) -> Iterator[Address]:
    """Each range of slots is its first, its last, and nodes: host, port, and more."""
    for node in chain.from_iterable(entry[2:] for entry in ranges):
        name = text_of(node[0] or b"")
        yield Address(host if name in SAME_HOST else name, int(node[1]))
