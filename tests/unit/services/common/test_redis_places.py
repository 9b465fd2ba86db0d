"""Which server the next connection of a client leads to, by what servers and Sentinels answer."""

import asyncio
from collections.abc import Mapping

import pytest
from redis.exceptions import AskError, AuthenticationError, MovedError, ResponseError

from tandem_engine.base.addresses import Address
from tandem_services.common.redis_places import FoundWire, Nodes, Places, Sentinels
from tandem_services.common.redis_url import RedisUrl

A, B, C, D = (Address(f"10.0.0.{number}", 6379) for number in range(1, 5))
S1, S2, S3 = (Address(f"10.0.1.{number}", 26379) for number in range(1, 4))
LISTED = [[0, 9000, [b"10.0.0.1", 6379, b"id"], [b"", 6380]], [9001, 16383, [b"10.0.0.3", 6379, b"id"]]]
URL = RedisUrl.parse(f"redis+sentinel://{S1},{S2},{S3}/main")


def hello(**fields: str) -> list[object]:
    return [b"proto", 2, *(part.encode() for field in fields.items() for part in field)]


class Server:
    """Answers commands by their first word."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.asked = ""
        self.open = 0

    async def connect(self) -> None:
        if "refused" in self.answers:
            raise ConnectionRefusedError("the port is closed")
        self.open += 1

    def pack_command(self, *args: object) -> list[bytes]:
        return [str(args[0]).encode()]

    async def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None:
        self.asked = command[0].decode()

    async def read_response(self) -> object:
        answer = self.answers.get(self.asked, ResponseError("unknown command"))
        if answer is HANGS:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def disconnect(self, nowait: bool = False) -> None:
        self.open = 0


HANGS = object()
Servers = Mapping[Address, Server]


def nodes(servers: Servers, *given: Address) -> Nodes:
    return Nodes(lambda address: servers[address], given)


async def opened(places: Places) -> Address:
    wire = places.wire()
    assert isinstance(wire, FoundWire)
    await wire.connect()
    assert wire.address is not None
    return wire.address


async def test_server_without_hello_is_used_as_it_is():
    places = nodes({A: Server()}, A)
    assert [await opened(places) for _ in range(2)] == [A, A]


async def test_server_that_requires_a_password_first_is_opened():
    """So that its refusal of the first command, which names the password, is what the log has."""
    assert await opened(nodes({A: Server(HELLO=AuthenticationError("HELLO must be called later"))}, A)) == A


@pytest.mark.parametrize(
    "answers", [{"HELLO": [7, b"x"]}, {"HELLO": hello(mode="cluster"), "CLUSTER": [[0, 1, [7, 8]]]}]
)
async def test_reply_without_texts_ends_the_opening_by_name(answers):
    with pytest.raises(ValueError, match="int instead of a text"):
        await opened(nodes({A: Server(**answers)}, A))


async def test_slot_owner_is_kept_until_it_fails():
    servers = {A: Server(), B: Server(), C: Server()}
    places = nodes(servers, A, B)
    assert await opened(places) == A
    places.moved(C)
    assert [await opened(places) for _ in range(3)] == [C, C, C]
    servers[C].answers["refused"] = True
    with pytest.raises(ConnectionRefusedError):
        await opened(places)
    assert [await opened(places) for _ in range(3)] == [B, A, B]
    places.moved(B)
    places.left()
    assert await opened(places) == A


async def test_nodes_that_a_cluster_lists_are_tried_after_the_given():
    other = Address("10.0.0.1", 6380)
    cluster = Server(HELLO=hello(mode="cluster"), CLUSTER=LISTED)
    servers = {A: cluster, C: Server(), other: Server()}
    places = nodes(servers, A)
    assert await opened(places) == A
    cluster.answers["refused"] = True
    assert [await opened(places) for _ in range(2)] == [other, C]
    assert cluster.open == 1, "a connection that was found stays open"


async def test_cluster_without_permission_uses_given_node():
    places = nodes({A: Server(HELLO=hello(mode="cluster"), CLUSTER=ResponseError("NOPERM"))}, A)
    assert [await opened(places) for _ in range(2)] == [A, A]


@pytest.mark.parametrize(("named", "meant"), [(":7", "10.0.0.1:7"), ("?:7", "10.0.0.1:7"), ("::1:7", "[::1]:7")])
async def test_redirection_without_a_host_means_the_same_one(named, meant):
    places = nodes({A: Server()}, B, A)
    wire = places.wire_to(A)
    await wire.connect()
    for redirection in (MovedError(f"1 {named}"), AskError(f"1 {named}")):
        assert places.named(redirection, wire) == Address.parse(meant)


async def test_redirection_to_no_host_is_not_followed():
    places = nodes({A: Server()}, A)
    assert places.named(MovedError("1 a/b:7"), places.wire()) is None


def sentinel(address: Address) -> Server:
    return Server(SENTINEL=[address.host.encode(), str(address.port).encode()])


async def test_hanging_or_missing_sentinels_are_skipped():
    sentinels = {S1: Server(SENTINEL=HANGS), S2: Server(refused=True), S3: sentinel(A)}
    places = Sentinels({A: Server(HELLO=hello(role="master"))}.__getitem__, sentinels.__getitem__, URL)
    assert await opened(places) == A
    assert [server.open for server in sentinels.values()] == [0, 0, 0], "no connection to a Sentinel stays"


async def test_replica_that_a_sentinel_names_is_not_used():
    replica, primary = Server(HELLO=hello(role="slave")), Server(HELLO=hello(role="master"))
    sentinels = {S1: sentinel(A), S2: sentinel(B), S3: sentinel(A)}
    places = Sentinels({A: replica, B: primary}.__getitem__, sentinels.__getitem__, URL)
    assert await opened(places) == B
    assert replica.open == 0


async def test_each_search_begins_at_another_sentinel():
    servers = {address: Server() for address in (A, B, C)}
    sentinels = {S1: sentinel(A), S2: sentinel(B), S3: sentinel(C)}
    places = Sentinels(servers.__getitem__, sentinels.__getitem__, URL)
    assert [await opened(places) for _ in range(4)] == [A, B, C, A]


async def test_sentinels_without_a_primary_are_all_named():
    sentinels = {S1: Server(SENTINEL=None), S2: Server(refused=True), S3: Server(SENTINEL=ResponseError("NOAUTH"))}
    places = Sentinels({}.__getitem__, sentinels.__getitem__, URL)
    with pytest.raises(ConnectionError) as caught:
        await opened(places)
    assert all(str(address) in str(caught.value) for address in sentinels)
    assert "it has no service 'main'" in str(caught.value)
