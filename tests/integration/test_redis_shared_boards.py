"""What gateways share in Redis next to the registry, overwritten: limits, fairness, quarantine, sessions, tickets,
and names of adapters."""

import pytest
import redis

from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.control import ServedAdapter
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import MAX_REGISTERED
from tandem_services.router.registered_adapters import AdapterBoard, RegisteredAdapters
from tandem_services.router.shared_state import (
    MAX_QUARANTINE_S,
    Charge,
    FairBoard,
    QuarantineBoard,
    Report,
    SessionBindings,
    SessionName,
    UsageBoard,
)
from tandem_services.router.tickets import TicketBoard, new_ticket_id
from tandem_services.router.usage_counters import Ask, Refused, UsageLimits
from tandem_testing.router_builders import Fleet

VALUES = ("garbage", "", "-7", "3.5", "9" * 400, "9223372036854775807", "1e300", "nan", "inf", b"\xff\x00" * 60)
TYPES = (("SET", "x"), ("RPUSH", "x"), ("SADD", "x"), ("ZADD", "inf", "x"), ("HSET", "x", "inf"))
LIMITS = UsageLimits(requests=100, tokens=1000, concurrency=4)
ASK = Ask(requests=1, tokens=9, lease="r")


@pytest.fixture
def raw(server):
    with redis.Redis(port=server.port) as client:
        yield client


@pytest.fixture
async def fleet(server):
    async with Fleet.of(server) as workers:
        yield workers


async def test_usage_that_is_no_number_locks_no_tenant_out(raw, fleet):
    usage = UsageBoard(library=fleet.registry.library, keys=fleet.keys)
    counts, leases = fleet.keys.usage_of("t")
    taken = await usage.take("t", LIMITS, ASK)
    for field in (f"r{taken.second}", f"t{taken.second}", f"t{taken.second + 10**9}", "t-1", "x"):
        for value in VALUES:
            raw.delete(counts, leases)
            raw.hset(counts, field, value)
            again = await usage.take("t", LIMITS, ASK)
            assert again.refused is Refused.NOTHING, (field, value)
            assert again.requests <= 2 + 7
            await usage.settle("t", second=again.second, tokens=-9, lease="r")
    for kind in TYPES:
        for key in (counts, leases):
            raw.delete(counts, leases)
            raw.execute_command(kind[0], key, *kind[1:])
            assert (await usage.take("t", LIMITS, ASK)).refused is Refused.NOTHING, kind
    raw.zadd(leases, {f"ghost-{number}": "inf" for number in range(9)})
    assert (await usage.take("t", LIMITS, Ask(requests=1, tokens=1, lease="s"))).refused is Refused.NOTHING
    raw.hset(counts, mapping={f"t{number}": 1 for number in range(5000)})
    assert (await usage.take("t", LIMITS, ASK)).refused is Refused.NOTHING


async def test_counters_that_are_no_numbers_begin_at_the_floor(raw, fleet):
    board = FairBoard(library=fleet.registry.library, keys=fleet.keys)
    fair, *others = fleet.keys.fairness
    for field in (":", "a"):
        for value in VALUES:
            raw.delete(fair, *others)
            raw.hset(fair, field, value)
            charges = [Charge(tenant="a", cost=5.0, waits=True), Charge(tenant="b", cost=5.0, waits=True)]
            standing = await board.sync(Report(gateway="g", charges=charges))
            # Text that is a small number is one, and a tenant may have it.
            assert abs(standing.values["a"] - standing.values["b"]) <= 12.0, (field, value)
    for kind in TYPES:
        for key in (fair, *others):
            raw.delete(fair, *others)
            raw.execute_command(kind[0], key, *kind[1:])
            standing = await board.sync(Report(gateway="g", charges=[Charge(tenant="a", cost=5.0, waits=True)]))
            assert standing.values == {"a": 5.0}, (kind, key)


async def test_quarantine_of_another_type_is_made_again(raw, fleet):
    board = QuarantineBoard(client=fleet.client, keys=fleet.keys)
    for kind in TYPES:
        raw.delete(fleet.keys.quarantine)
        raw.execute_command(kind[0], fleet.keys.quarantine, *kind[1:])
        await board.put("aa", ttl_s=60, capacity=8)
        assert "aa" in await board.digests(), kind
    raw.zadd(fleet.keys.quarantine, {"bb": "inf"})
    assert (await board.digests())["bb"] == MAX_QUARANTINE_S


async def test_malformed_session_and_ticket_entries_are_ignored(raw, fleet):
    sessions, tickets = (board(client=fleet.client, keys=fleet.keys) for board in (SessionBindings, TicketBoard))
    name, ticket = SessionName("s"), new_ticket_id()
    await sessions.open(name, ttl_s=60)
    (key,) = raw.keys("*session*")
    bad = [b'["w@1",-7,3]', b'["w@1",99999999999999999999,3]', b'["w@1",1,-3]', b'["w@1","x",3]', b"[1,1,1]"]
    for value in [*VALUES, *bad]:
        raw.set(key, value)
        assert await sessions.find(name) is None, value
    for value in VALUES:
        raw.set(fleet.keys.ticket(ticket), value)
        with pytest.raises(Exception, match="ticket"):
            await tickets.take(ticket)


async def test_overwritten_registered_names_are_restored(raw, fleet):
    deployment, key = fleet.registry.deployment, fleet.keys.adapters
    board = AdapterBoard(library=fleet.registry.library, keys=fleet.keys)
    one, other = (RegisteredAdapters(model="m", deployment=deployment, board=board) for _ in range(2))
    await one.register(ServedAdapter(name="sql", digest="1" * 32, rank=4, root="sql"), source="sql")
    [(field, text)] = raw.hgetall(key).items()

    async def require_known() -> None:
        await one.sync()
        await other.sync()
        assert raw.hget(key, field) == text
        assert other.all() == one.all() != {}

    for value in VALUES:
        raw.hset(key, mapping={field: value, b"m:\xff": value, "m:chat": value, "others": value})
        await require_known()
        assert not raw.hexists(key, "m:chat")
    for kind in TYPES:
        raw.delete(key)
        raw.execute_command(kind[0], key, *kind[1:])
        await require_known()
    raw.hset(key, mapping={f"x{number}": "" for number in range(MAX_REGISTERED + 1)})
    await require_known()
    assert raw.hlen(key) == 1
    assert await board.sync([("m:sql", "not what is there", "")]) == {"m:sql": text.decode()}


async def test_overwritten_reported_names_are_restored(raw, fleet):
    deployment, key = fleet.registry.deployment, fleet.keys.adapters
    board = AdapterBoard(library=fleet.registry.library, keys=fleet.keys)

    def gateway(of: Deployment = deployment) -> RegisteredAdapters:
        return RegisteredAdapters(model="m", deployment=of, board=board)

    names = {"sql": ServedAdapter(name="sql", digest="1" * 32, rank=4, root="sql")}
    one = gateway()
    one.note(names)
    await one.sync()
    [(field, text)] = raw.hgetall(key).items()
    assert field == b"m:\0:sql"

    async def require_known() -> None:
        await one.sync()
        assert raw.hget(key, field) == text
        later, foreign = gateway(), gateway(Deployment.of(KeyPair.generate()))
        await later.sync()
        await foreign.sync()
        assert (later.reported.all(), foreign.reported.all()) == (names, {})

    for value in VALUES:
        raw.hset(key, mapping={field: value, b"m:\0:\xff": value, b"m:\0:a": value, b"m:\0:": value})
        later = gateway()
        await later.sync()
        assert later.reported.all() == {}
        await require_known()
        assert not raw.hexists(key, b"m:\0:a")
    raw.hset(key, mapping={b"m:\0:a": text})
    await require_known()
    for kind in TYPES:
        raw.delete(key)
        raw.execute_command(kind[0], key, *kind[1:])
        await require_known()
    raw.hset(key, mapping={f"m:\0:x{number}": text for number in range(MAX_REGISTERED + 1)})
    await require_known()
    assert raw.hlen(key) == 1
    one.note({})
    await one.sync()
    assert not raw.exists(key), "the last worker that had them has been replaced by one without"
