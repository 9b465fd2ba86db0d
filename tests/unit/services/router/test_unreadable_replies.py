"""Unreadable answers of Redis: the caller gets an error, and a log line names the command.

Callers continue without Redis for any reason (`RedisUnavailableError`), and most do not log it.
"""

import msgspec
import pytest
from redis.exceptions import ResponseError

from tandem_services.common.redis_client import (
    WARN_EVERY_S,
    CircuitBreaker,
    RedisAddress,
    RedisClient,
    RedisUnavailableError,
    UnreadableReplyError,
)
from tandem_services.router.cost import Demand
from tandem_services.router.index import BlockIndex, IndexUpdate, UpdateKind
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.registry import Registry
from tandem_services.router.shared_state import (
    FairBoard,
    QuarantineBoard,
    Report,
    SessionBindings,
    SessionName,
    UsageBoard,
)
from tandem_services.router.tickets import TicketBoard
from tandem_services.router.usage_counters import Ask, UsageLimits
from tandem_testing.router_builders import make_record
from tandem_testing.service_clock import ServiceClock

KEYS = Keys("default")
DEMAND = Demand(prompt_tokens=16, output_tokens=16, local_prefill_tokens=0)
CLEARED = IndexUpdate(UpdateKind.CLEARED)


class Answers:
    """Stands for the connection: one answer to everything, except to what is asked for the time."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def command(self, *args: object, within_s: float) -> object:
        if args[0] == "TIME":
            return [b"1700000000", b"0"]
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        pass


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
async def client(clock):
    client = RedisClient(
        RedisAddress(url="redis://nowhere"), timeout_s=5.0, breaker=CircuitBreaker(clock=clock, failures_to_open=100)
    )
    yield client
    await client.close()


def changes(client: RedisClient):
    return Registry(library=FunctionLibrary(client), keys=KEYS).changes(0)


def endings(client: RedisClient):
    return Registry(library=FunctionLibrary(client), keys=KEYS).endings(["w1@1"])


def heartbeat(client: RedisClient):
    registry = Registry(library=FunctionLibrary(client), keys=KEYS)
    return registry.heartbeat(make_record("w1"), known_generation=0, report_age_s=0.0)


def route(client: RedisClient):
    index = BlockIndex(library=FunctionLibrary(client), keys=KEYS)
    return index.route(model="m", demand=DEMAND, page_size=16, chain=b"", exclude=frozenset(), seed=1)


def apply(client: RedisClient):
    index = BlockIndex(library=FunctionLibrary(client), keys=KEYS)
    return index.apply("w1@1", [CLEARED], page_size=16, builds_on=-1, revision=1)


def usage(client: RedisClient):
    return UsageBoard(library=FunctionLibrary(client), keys=KEYS).take("t", UsageLimits(), Ask())


def fairness(client: RedisClient):
    return FairBoard(library=FunctionLibrary(client), keys=KEYS).sync(Report(gateway="g", charges=()))


def ticket(client: RedisClient):
    return TicketBoard(client=client, keys=KEYS).take("0" * 32)


def quarantine(client: RedisClient):
    return QuarantineBoard(client=client, keys=KEYS).digests()


def clearing(client: RedisClient):
    return QuarantineBoard(client=client, keys=KEYS).clear("aa")


FUNCTIONS = {
    changes: "changes",
    endings: "endings",
    heartbeat: "heartbeat",
    route: "route_and_reserve",
    apply: "apply_kv_events",
    usage: "usage_take",
    fairness: "fair_sync",
}


@pytest.mark.parametrize("ask", FUNCTIONS, ids=FUNCTIONS.values())
@pytest.mark.parametrize(
    "answer", [None, 7, [b"a"], b"", b"\xc1", msgspec.msgpack.encode({"status": "?"}), b"\xa1\xff"]
)
async def test_answer_of_the_wrong_shape_is_none_and_named_in_the_log(ask, answer, client, caplog):
    """It was not logged, as when Redis is away; that of `apply_kv_events` ended the worker's feed of its index."""
    client._line = Answers(answer)
    with pytest.raises(UnreadableReplyError):
        await ask(client)
    (record,) = caplog.records
    assert f"the answer of {FUNCTIONS[ask]} cannot be read: " in record.message


@pytest.mark.parametrize("counter", ["nan", "1e999", "a lot"])
async def test_fairness_reply_with_non_numeric_counters_is_unreadable(counter, client, caplog):
    client._line = Answers(msgspec.msgpack.encode({"floor": counter, "values": [], "wishes": [], "places": 0}))
    with pytest.raises(UnreadableReplyError, match="fair_sync"):
        await fairness(client)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("ask", "answer", "named"),
    [
        (ticket, b"\xc1", "a ticket cannot be read"),
        (ticket, 7, "a ticket cannot be read: it is int"),
        (quarantine, b"text", f"ZRANGE for {KEYS.quarantine} cannot be read"),
        (quarantine, None, f"ZRANGE for {KEYS.quarantine} cannot be read"),
        (clearing, b"text", f"ZREM for {KEYS.quarantine} cannot be read"),
    ],
)
async def test_unreadable_value_in_redis_is_named_in_log(ask, answer, named, client, caplog):
    """It was not logged; a quarantine that could not be read was an empty one, and forgotten here as well."""
    client._line = Answers(answer)
    with pytest.raises(UnreadableReplyError):
        await ask(client)
    (record,) = caplog.records
    assert named in record.message


@pytest.mark.parametrize("answer", [b"{", b"\xff", 7])
async def test_unreadable_session_binding_is_a_logged_miss(answer, client, caplog):
    client._line = Answers(answer)
    sessions = SessionBindings(client=client, keys=KEYS)
    assert await sessions.find(SessionName(id="chat")) is None
    (record,) = caplog.records
    assert "the binding of a session cannot be read: " in record.message
    assert KEYS.session("") in record.message


async def test_each_kind_of_unreadable_answer_has_a_line_a_minute(client, clock, caplog):
    client._line = Answers(b"\xc1")
    for _ in range(3):
        for ask in (changes, usage):
            with pytest.raises(UnreadableReplyError):
                await ask(client)
    assert len(caplog.records) == 2
    clock.advance(WARN_EVERY_S)
    with pytest.raises(UnreadableReplyError):
        await changes(client)
    assert "(2 similar since the last line)" in caplog.records[-1].message


async def test_key_of_the_wrong_type_is_named_in_the_log(client, caplog):
    client._line = Answers(ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"))
    with pytest.raises(RedisUnavailableError):
        await ticket(client)
    (record,) = caplog.records
    assert f"GETDEL {KEYS.ticket('0' * 32)}: ResponseError: WRONGTYPE" in record.message
