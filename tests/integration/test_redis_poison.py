"""Every field of every key of the registry overwritten with something else: one heartbeat of its owner mends it.

The matrix runs against a real Redis with a real router. Leases last, so nothing heals because time passes.
"""

import struct
from collections.abc import Iterable

import pytest
import redis

from tandem_engine.config import Role
from tandem_services.router.cost import Demand
from tandem_services.router.decision import Source
from tandem_services.router.deployment import Deployment
from tandem_services.router.index import Applied, IndexUpdate, UpdateKind
from tandem_services.router.keys import MAX_WORKERS
from tandem_services.router.registry import LeaseStatus, WorkerRecord
from tandem_testing.router_builders import (
    LASTING,
    MODEL,
    PAGE,
    Fleet,
    chain_of,
    make_query,
    make_record,
    patient_router,
)

OURS = Deployment(b"o" * 40)
THEIRS = Deployment(b"t" * 40)
PROMPT = tuple(range(10 * PAGE))
RECORDS = (make_record("p", Role.PREFILL), make_record("d1", Role.DECODE), make_record("d2", Role.DECODE))
NEWER = "d1@99999999999999999999"
VALUES = {
    "text": "garbage",
    "empty": "",
    "negative": "-7",
    "fraction": "3.5",
    "huge": "9" * 400,
    "max int64": "9223372036854775807",
    "exponent": "1e300",
    "not a number": "nan",
    "infinite": "inf",
    "bytes": b"\xff\x00" * 60,
    "long": "x" * 100_000,
    "far future": "99999999999999",
    "unsigned claim": f"{NEWER} {'0' * 32}",
    "claim of strangers": THEIRS.claim(NEWER),
    "claim of another worker": OURS.claim("d2@1"),
    "live row": struct.pack("<dd", 1e300, 1e300) + bytes(90),
}
TYPES = {
    "string": ("SET", "garbage"),
    "list": ("RPUSH", "a", "b"),
    "set": ("SADD", "a", "b"),
    "zset": ("ZADD", "9e99", "a"),
    "hash": ("HSET", "a", "b"),
    "stream": ("XADD", "*", "a", "b"),
}
META = (
    "epoch",
    "generation",
    "last_call",
    "swept_at",
    "grace_until",
    "ranked_at",
    "unpublished",
    "missed_at",
    "missed",
)
OWN_KEYS = ("blocks", "host", "cursor", "links", "fenced")


@pytest.fixture
def raw(server):
    """Redis as an attacker that poisons it sees it."""
    with redis.Redis(port=server.port) as client:
        yield client


@pytest.fixture
async def fleet(server):
    async with Fleet.of(server, deployment=OURS, **LASTING, SWEEP_EVERY_MS=0) as workers:
        yield workers


@pytest.fixture
async def router(server, fleet):
    gateway = patient_router(server, deployment=OURS)
    await gateway.start()
    await fleet.join(gateway, *RECORDS)
    yield gateway
    await gateway.stop()


async def renewed(fleet: Fleet, record: WorkerRecord) -> set[str]:
    """Its heartbeats, as a worker sends them, until one was accepted: two are enough. Returns the members."""
    fleet.generation = -1
    reply = await fleet.beat(record)
    if reply.status is LeaseStatus.FENCED:
        assert not reply.by, f"{reply.by} has fenced {record.view.incarnation}"
        reply = await fleet.beat(record, forged=reply.forged)
    assert reply.status is LeaseStatus.RENEWED
    assert reply.generation > 0
    assert reply.cursor >= -1
    return set(reply.members)


async def check_sound(fleet, router, *, what: str) -> None:
    """After a heartbeat of each worker everything is as before the poison."""
    for record in RECORDS:
        await renewed(fleet, record)
    own = {record.view.incarnation for record in RECORDS}
    assert await renewed(fleet, RECORDS[0]) == own, what
    await router.refresh()
    assert {worker.incarnation for worker in router.workers()} == own, what
    snapshot = await fleet.snapshot()
    assert {record.view.incarnation: record for record in snapshot.workers} == {
        record.view.incarnation: record for record in RECORDS
    }, what
    assert (await fleet.snapshot()).malformed == 0, what
    choice = await router.choose(make_query(PROMPT))
    assert choice.source is Source.REDIS, what
    assert choice.decode.incarnation in own, what
    await router.release(choice)


async def serves(router) -> None:
    """While the poison works requests find workers."""
    await router.refresh()
    choice = await router.choose(make_query(PROMPT))
    assert choice.decode in [record.view for record in RECORDS]
    await router.release(choice)


async def overwrite(raw, fleet, router, key: str, fields: Iterable[bytes | str]) -> None:
    for field in fields:
        for name, value in VALUES.items():
            raw.hset(key, field, value)
            await serves(router)
            await check_sound(fleet, router, what=f"{name} in {field!r} of {key}")


@pytest.mark.parametrize("hash_name", ["fleet", "owner", "meta"])
async def test_field_of_the_registry_is_mended_by_heartbeats(raw, fleet, router, hash_name):
    key = fleet.keys.prefix + hash_name
    fields = list(META) if hash_name == "meta" else raw.hkeys(key)
    assert len(fields) >= 3
    await overwrite(raw, fleet, router, key, [*fields, "a field more"])


async def test_field_of_a_workers_row_is_mended_by_its_heartbeat(raw, fleet, router):
    key = fleet.keys.worker("d1")
    fields = raw.hkeys(key)
    assert {b"incarnation", b"request_endpoint", b"proof", b"links", b"queue_tokens"} <= set(fields)
    await overwrite(raw, fleet, router, key, fields)


@pytest.mark.parametrize("kind", TYPES)
async def test_key_of_another_type_is_mended_by_heartbeats(raw, fleet, router, kind):
    own = [f"{name}:d1@1" for name in OWN_KEYS]
    command, *arguments = TYPES[kind]
    for name in ("fleet", "owner", "meta", "changes", "worker:d1", *own):
        key = fleet.keys.prefix + name
        raw.delete(key)
        raw.execute_command(command, key, *arguments)
        await serves(router)
        # What is of the type that it should be, and empty of sense, is a wrong hint; see the index.
        await check_sound(fleet, router, what=f"{kind} at {key}")


@pytest.mark.parametrize("score", ["inf", "-inf", "7", "1.5"])
@pytest.mark.parametrize("member", [b"garbage", b"\xff@1", b"", b"d1@1", b"gone@1"])
async def test_foreign_entry_of_changes_hides_no_worker(raw, fleet, router, member, score):
    """The reader of the router has read before, and sees the workers of a reader that has not."""
    raw.zadd(fleet.keys.prefix + "changes", {member: score})
    await serves(router)
    await fleet.beat(make_record("d3", Role.DECODE))
    await fleet.registry.deregister("d3@1")
    await check_sound(fleet, router, what=f"{member!r} at {score}")


async def test_cursor_that_is_no_revision_is_a_gap(raw, fleet):
    record = RECORDS[0]
    for name, value in VALUES.items():
        await fleet.cache(record, chain_of(PROMPT))
        raw.set(fleet.keys.cursor(record.view.incarnation), value)
        reply = await fleet.beat(record)
        assert reply.status is LeaseStatus.RENEWED
        if name == "far future":
            continue  # a revision, though another one: the feed sees that it is not its own
        assert reply.cursor == -1, name
        update = [IndexUpdate(UpdateKind.STORED, tuple(chain_of(PROMPT)))]
        assert await fleet.index.apply("p@1", update, page_size=16, builds_on=3, revision=4) is Applied.GAP, name


async def test_verdict_without_a_signature_ends_no_worker(raw, fleet, router):
    for name, value in VALUES.items():
        raw.set(fleet.keys.fenced("d1@1"), value)
        await check_sound(fleet, router, what=f"verdict {name}")
        assert not raw.get(fleet.keys.fenced("d1@1")), name


async def test_forged_newer_incarnation_takes_no_name(raw, fleet, router):
    """It has an owner's entry and a live row, and no signature."""
    row = raw.hget(fleet.keys.shared[0], "d1@1")
    for claim in (f"{NEWER} {'0' * 32}", THEIRS.claim(NEWER)):
        raw.hset(fleet.keys.shared[0], NEWER, row)
        raw.hset(fleet.keys.shared[1], "d1", claim)
        assert (await fleet.beat(RECORDS[1])).status is LeaseStatus.FENCED
        await serves(router)
        await check_sound(fleet, router, what=claim)


async def test_registry_row_of_other_deployment_is_no_worker(server, fleet, router):
    """Written into our namespace by a deployment with another key."""
    intruder = Fleet(server, deployment=OURS, **LASTING)
    object.__setattr__(intruder.registry, "deployment", THEIRS)
    await intruder.beat(make_record("x", Role.DECODE))
    for _ in range(5):
        await router.refresh()
        choice = await router.choose(make_query(PROMPT))
        assert choice.decode.worker_id in {"d1", "d2"}
        await router.release(choice)
    assert {worker.worker_id for worker in router.workers()} == {"p", "d1", "d2"}
    assert set((await fleet.beat(RECORDS[0])).members) == {"p@1", "d1@1", "d2@1"}
    await intruder.close()


async def test_deployments_with_one_cluster_name_stay_separate(server, fleet, router):  # [clusters-apart]
    """Also after a wipe, whichever worker registers first."""
    other = Fleet(server, deployment=THEIRS, **LASTING)
    for _ in range(2):
        await other.beat(make_record("d1", Role.DECODE, number=2))
        await check_sound(fleet, router, what="a second deployment")
        assert {r.view.incarnation for r in (await other.snapshot()).workers} == {"d1@2"}
        server.wipe()
    await other.close()


async def test_oversized_registry_drops_malformed_fields(raw, fleet, router):
    for key in fleet.keys.shared:
        raw.hset(key, mapping={f"many-{number}@1": "x" for number in range(20_000)})
    await serves(router)
    await renewed(fleet, RECORDS[0])  # drops what is too much of the hashes, at any call
    await check_sound(fleet, router, what="20,000 fields more")
    assert [raw.hlen(key) for key in fleet.keys.shared[:2]] == [3, 3]


async def test_full_registry_rejects_one_more_and_keeps_the_rest(raw, fleet):
    """Whatever asks, and also where there are more than it takes."""
    key, _, _ = fleet.keys.shared
    await fleet.beat(RECORDS[1])
    row = raw.hget(key, "d1@1")
    raw.hset(key, mapping={f"w{number}@1": row for number in range(MAX_WORKERS - raw.hlen(key))})
    assert (await fleet.beat(make_record("late"))).status is LeaseStatus.FULL
    await fleet.snapshot()
    assert (await fleet.beat(RECORDS[1])).status is LeaseStatus.RENEWED
    assert raw.hlen(key) == MAX_WORKERS
    raw.hset(key, mapping={f"more-{number}@1": row for number in range(64)})
    assert (await fleet.beat(RECORDS[1])).status is LeaseStatus.RENEWED
    await fleet.snapshot()
    demand = Demand(prompt_tokens=10, output_tokens=1, local_prefill_tokens=16)
    chain = b"".join(chain_of(PROMPT))
    routed = await fleet.index.route(
        model=MODEL, demand=demand, page_size=PAGE, chain=chain, exclude=frozenset(), seed=1
    )
    assert routed is not None
    assert raw.hlen(key) == MAX_WORKERS + 64
