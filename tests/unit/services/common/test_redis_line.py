"""One connection for all commands: order of replies, and what happens to queued commands when it breaks."""

import asyncio

import pytest
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from tandem_engine.base.addresses import Address
from tandem_services.common.redis_line import RedisLine
from tandem_services.common.redis_places import Places, Wire
from tandem_testing.loop_time import set_forward
from tandem_testing.waiting import until

PATIENT_S = 60.0


class ScriptedWire:
    """Answers when the test calls for it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.replies: asyncio.Queue[object] = asyncio.Queue()
        self.opens = asyncio.Event()
        self.opens.set()
        self.refuses: Exception | None = None
        self.disconnected = False

    async def connect(self) -> None:
        await self.opens.wait()
        if self.refuses is not None:
            raise self.refuses

    def pack_command(self, *args: object) -> list[bytes]:
        return [" ".join(map(str, args)).encode()]

    async def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None:
        self.sent += command

    async def read_response(self) -> object:
        reply = await self.replies.get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def disconnect(self, nowait: bool = False) -> None:
        self.disconnected = True

    async def has_sent(self, count: int) -> None:
        await until(lambda: len(self.sent) >= count, PATIENT_S, f"{count} commands are sent")


class Wires(Places):
    """Those that were opened, in order."""

    def __init__(self) -> None:
        self.all: list[ScriptedWire] = []
        self.next = ScriptedWire()
        self.times_left = 0

    def wire(self) -> ScriptedWire:
        wire, self.next = self.next, ScriptedWire()
        self.all.append(wire)
        return wire

    def left(self) -> None:
        self.times_left += 1


class ClusterWires(Wires):
    """Those to nodes of a cluster; where each one leads is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: Address | None = None
        self.leads_to: list[Address | None] = []

    def wire(self) -> ScriptedWire:
        self.leads_to.append(self.owner)
        return super().wire()

    def named(self, redirection: AskError, by: Wire) -> Address:
        return Address(redirection.host, redirection.port)

    def wire_to(self, address: Address) -> ScriptedWire:
        self.leads_to.append(address)
        return super().wire()

    def moved(self, owner: Address) -> None:
        self.owner = owner


@pytest.fixture
def wires():
    return Wires()


@pytest.fixture
async def line(wires):
    line = RedisLine(wires)
    yield line
    await line.close()
    assert all(wire.disconnected for wire in wires.all)


def ask(line: RedisLine, *args: object, within_s: float = PATIENT_S) -> "asyncio.Task[object]":
    return asyncio.create_task(line.command(*args, within_s=within_s))


async def answered(line: RedisLine, wire: ScriptedWire, name: object) -> object:
    """What the next command gets when `wire` answers its name."""
    asked, before = ask(line, "GET", name), len(wire.sent)
    await wire.has_sent(before + 1)
    assert wire.sent[-1] == f"GET {name}".encode()
    wire.replies.put_nowait(name)
    return await asked


async def test_commands_share_a_connection_and_keep_reply_order(line, wires):
    wire = wires.next
    asked = [ask(line, "GET", number) for number in range(50)]
    await wire.has_sent(50)
    assert wire.sent == [f"GET {number}".encode() for number in range(50)]
    for number in range(50):
        wire.replies.put_nowait(number)
    assert await asyncio.gather(*asked) == [*range(50)]
    assert wires.all == [wire]


async def test_reply_of_cancelled_command_is_discarded(line, wires):
    wire = wires.next
    first, second, third = (ask(line, "GET", number) for number in range(3))
    await wire.has_sent(3)
    second.cancel()
    for reply in (b"0", b"1", b"2"):
        wire.replies.put_nowait(reply)
    assert [await first, await third] == [b"0", b"2"]
    with pytest.raises(asyncio.CancelledError):
        await second
    assert len(wires.all) == 1


async def test_rejected_command_affects_no_other(line, wires):
    wire = wires.next
    asked = [ask(line, "GET", number) for number in range(3)]
    await wire.has_sent(3)
    for reply in (b"0", ResponseError("NOPERM"), b"2"):
        wire.replies.put_nowait(reply)
    first, second, third = await asyncio.gather(*asked, return_exceptions=True)
    assert (first, third) == (b"0", b"2")
    assert isinstance(second, ResponseError)
    assert len(wires.all) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        ReadOnlyError("You can't write against a read only replica."),
        MasterDownError("Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
        ClusterDownError("The cluster is down"),
        MovedError("3999 127.0.0.1:6381"),
        AskError("3999 127.0.0.1:6381"),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
async def test_server_that_is_not_the_primary_is_left(line, wires, refusal):
    former = wires.next
    asked = [ask(line, "GET", number) for number in range(3)]
    await former.has_sent(3)
    former.replies.put_nowait(refusal)
    with pytest.raises(type(refusal)):
        await asked[0]
    assert await answered(line, wires.next, "later") == "later"
    for reply in (b"1", b"2"):
        former.replies.put_nowait(reply)
    assert await asyncio.gather(*asked[1:]) == [b"1", b"2"], "commands in flight are answered"
    assert (len(wires.all), wires.times_left) == (2, 1)


FIRST, SECOND = "10.0.0.1:6379", "10.0.0.2:6379"


@pytest.fixture
async def cluster():
    wires = ClusterWires()
    yield wires
    assert all(wire.disconnected for wire in wires.all)


@pytest.fixture
async def cluster_line(cluster):
    line = RedisLine(cluster)
    yield line
    await line.close()


async def test_commands_follow_a_slot_that_has_moved(cluster_line, cluster):
    former = cluster.next
    asked = [ask(cluster_line, "GET", number) for number in range(3)]
    await former.has_sent(3)
    owner = cluster.next
    for _ in asked:
        former.replies.put_nowait(MovedError(f"3999 {FIRST}"))
    await owner.has_sent(3)
    for number in range(3):
        owner.replies.put_nowait(number)
    assert await asyncio.gather(*asked) == [0, 1, 2]
    assert cluster.leads_to == [None, Address.parse(FIRST)], "one connection for all that were redirected"
    assert (await answered(cluster_line, owner, "later"), len(cluster.all)) == ("later", 2)


async def test_slot_that_moves_in_circles_ends_in_an_error(cluster_line, cluster):
    asked = ask(cluster_line, "GET", "x")
    for number in range(5):
        await until(lambda: len(cluster.all) > number, PATIENT_S, "a connection")  # noqa: B023
        wire = cluster.all[-1]
        await wire.has_sent(1)
        wire.replies.put_nowait(MovedError(f"3999 {FIRST if number % 2 else SECOND}"))
    with pytest.raises(MovedError):
        await asked


async def redirected_to_a_taker(
    line: RedisLine, cluster: ClusterWires
) -> tuple[ScriptedWire, ScriptedWire, "asyncio.Task[object]"]:
    """The owner of the slot, the node that takes it over, and a command that the owner has sent there."""
    owner = cluster.next
    asked = ask(line, "GET", "gone")
    await owner.has_sent(1)
    taker = cluster.next
    owner.replies.put_nowait(AskError(f"3999 {SECOND}"))
    await taker.has_sent(2)
    return owner, taker, asked


async def test_migrated_key_of_moving_slot_is_read_from_target_node(cluster_line, cluster):
    owner, taker, asked = await redirected_to_a_taker(cluster_line, cluster)
    assert taker.sent == [b"ASKING", b"GET gone"]
    taker.replies.put_nowait(b"OK")
    taker.replies.put_nowait(b"found")
    assert await asked == b"found"
    assert await answered(cluster_line, owner, "here") == "here"


async def test_functions_are_loaded_on_both_ends_of_a_moving_slot(cluster_line, cluster):
    owner, taker, asked = await redirected_to_a_taker(cluster_line, cluster)
    taker.replies.put_nowait(b"OK")
    taker.replies.put_nowait(ResponseError("Function not found"))
    with pytest.raises(ResponseError):
        await asked
    loaded = ask(cluster_line, "FUNCTION", "LOAD", "source")
    await owner.has_sent(2)
    owner.replies.put_nowait(b"name")
    await taker.has_sent(3)
    taker.replies.put_nowait(b"name")
    assert await loaded == b"name"
    assert owner.sent[-1] == taker.sent[-1] == b"FUNCTION LOAD source"


async def test_broken_connection_to_a_taker_fails_no_load(cluster_line, cluster):
    owner, taker, asked = await redirected_to_a_taker(cluster_line, cluster)
    taker.replies.put_nowait(ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError):
        await asked
    loaded = ask(cluster_line, "FUNCTION", "LOAD", "source")
    await owner.has_sent(2)
    owner.replies.put_nowait(b"name")
    assert await loaded == b"name"


async def test_connection_to_a_taker_becomes_that_to_the_owner(cluster_line, cluster):
    owner, taker, asked = await redirected_to_a_taker(cluster_line, cluster)
    taker.replies.put_nowait(b"OK")
    taker.replies.put_nowait(b"found")
    await asked
    asked = ask(cluster_line, "GET", "all")
    await owner.has_sent(2)
    owner.replies.put_nowait(MovedError(f"3999 {SECOND}"))
    await taker.has_sent(3)
    taker.replies.put_nowait(b"moved")
    assert (await asked, taker.sent[-1], len(cluster.all)) == (b"moved", b"GET all", 2)


async def test_slot_between_two_nodes_keeps_its_connection(cluster_line, cluster):
    owner = cluster.next
    asked = ask(cluster_line, "FCALL", "f")
    await owner.has_sent(1)
    owner.replies.put_nowait(TryAgainError("Multiple keys request during rehashing of slot"))
    with pytest.raises(TryAgainError):
        await asked
    assert (await answered(cluster_line, owner, "later"), len(cluster.all)) == ("later", 1)


async def test_server_that_loads_its_data_is_left(line, wires):
    loading = wires.next
    asked = ask(line, "GET", 0)
    await loading.has_sent(1)
    loading.replies.put_nowait(BusyLoadingError("Redis is loading the dataset in memory"))
    with pytest.raises(BusyLoadingError):
        await asked
    assert await answered(line, wires.next, "later") == "later"


async def test_broken_connection_fails_pending_and_next_reconnects(line, wires):
    wire = wires.next
    asked = [ask(line, "GET", number) for number in range(3)]
    await wire.has_sent(3)
    wire.replies.put_nowait(b"0")
    wire.replies.put_nowait(ConnectionResetError("gone"))
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert first == b"0"
    assert [type(other) for other in others] == [ConnectionResetError] * 2
    assert await answered(line, wires.next, 3) == 3
    assert wire.sent == [f"GET {number}".encode() for number in range(3)], "nothing is sent twice"


async def test_idle_connection_that_breaks_costs_no_command(line, wires):
    wire = wires.next
    assert await answered(line, wire, 0) == 0
    wire.replies.put_nowait(ConnectionResetError("idle for too long"))
    await until(lambda: wire.disconnected, PATIENT_S, "the connection has ended")
    assert await answered(line, wires.next, 1) == 1


async def test_command_after_a_timeout_uses_a_new_connection(line, wires):
    slow = wires.next
    patient = ask(line, "GET", "patient")
    await slow.has_sent(1)
    with pytest.raises(TimeoutError):
        await line.command("GET", "hasty", within_s=0.01)
    assert await answered(line, wires.next, "later") == "later"
    with pytest.raises(ConnectionError):
        await patient  # the old one is given up as well, once no command with the shorter timeout waits for it
    assert len(wires.all) == 2


async def test_reply_received_in_time_is_read_despite_late_event_loop(line, wires):
    """A busy loop finds its timers run out before it has read what came in time."""
    wire = wires.next
    assert await answered(line, wire, 0) == 0

    async def send_and_be_answered(command: list[bytes], check_health: bool = True) -> None:
        wire.replies.put_nowait(b"in time")

    wire.send_packed_command = send_and_be_answered
    assert await line.command("GET", 1, within_s=0) == b"in time"
    assert wires.all == [wire]


async def test_late_timeouts_of_old_connection_keep_the_new_one(line, wires):
    slow = wires.next
    asked = [ask(line, "GET", number, within_s=15.0) for number in range(3)]
    await slow.has_sent(3)
    hasty = ask(line, "GET", "hasty", within_s=10.0)
    await slow.has_sent(4)
    set_forward(10.0)
    with pytest.raises(TimeoutError):
        await hasty
    fast = wires.next
    assert await answered(line, fast, "new") == "new"
    set_forward(5.0)
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TimeoutError] * 3
    assert await answered(line, fast, "still") == "still"
    assert len(wires.all) == 2


async def test_slow_connect_is_reused_after_commands_time_out(line, wires):
    wire = wires.next
    wire.opens.clear()
    for number in range(3):
        with pytest.raises(TimeoutError):
            await line.command("GET", number, within_s=0.01)
    wire.opens.set()
    assert await answered(line, wire, "later") == "later"
    assert len(wires.all) == 1


async def test_unexpected_reply_closes_the_connection(line, wires):
    wire = wires.next
    assert await answered(line, wire, 0) == 0
    wire.replies.put_nowait(b"nobody's")
    await until(lambda: wire.disconnected, PATIENT_S, "the connection has ended")
    assert await answered(line, wires.next, 2) == 2


async def test_connection_waiter_gets_the_connection_error(line, wires):
    wires.next.refuses = ConnectionRefusedError("nobody listens")
    wire = wires.next
    wire.opens.clear()
    asked = [ask(line, "GET", number) for number in range(3)]
    await asyncio.sleep(0)
    wire.opens.set()
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(outcome, ConnectionRefusedError)
    assert not wire.sent


async def test_close_fails_pending_commands(wires):
    line = RedisLine(wires)
    wire, asked = wires.next, ask(line, "GET", 0)
    await wire.has_sent(1)
    await line.close()
    await line.close()
    with pytest.raises(ConnectionError):
        await asked
