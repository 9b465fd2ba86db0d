"""Every call that the product makes to Redis: each function of its library, and each command.

async with every_call_noted(fleet) as calls:
    await every_call(fleet)
assert functions_of(calls) == registered_functions()
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tandem_services.common.redis_client import Argument, RedisClient, Reply
from tandem_services.router.cells.neighbour_cell import CellSummary
from tandem_services.router.cost import Demand
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary, library_source
from tandem_services.router.registered_adapters import AdapterBoard
from tandem_services.router.registry import LeaseStatus, model_digest
from tandem_services.router.shared_state import (
    Charge,
    FairBoard,
    QuarantineBoard,
    Report,
    SessionBinding,
    SessionBindings,
    SessionName,
    UsageBoard,
)
from tandem_services.router.starting import StartingBoard, StartingWorker
from tandem_services.router.tickets import Ticket, TicketBoard
from tandem_services.router.usage_counters import Ask, Refused, UsageLimits
from tandem_testing.router_builders import MODEL, PAGE, Fleet, chain_of, make_choice, make_query, make_record

Call = tuple[Argument, ...]
REDIS_PAGE = Path(__file__).parents[3] / "docs" / "redis.md"
KEYLESS = {"FUNCTION", "PING", "TIME"}
WITH_ONE_KEY = {"GET", "GETDEL", "PEXPIRE", "SET", "TYPE", "UNLINK", "ZADD", "ZRANGE", "ZREM", "ZREMRANGEBYRANK"}


def documented_rules(cluster: str = "default") -> tuple[str, ...]:
    """Of the user with the least rights, as ACL SETUSER takes them, without name and password."""
    _, _, example = REDIS_PAGE.read_text("utf-8").partition("ACL SETUSER tandem on >secret ")
    rules = example.partition("\n\n")[0].replace("{default}", f"{{{cluster}}}").split()
    assert rules[0] == "resetkeys", "the ACL example has moved"
    assert len(rules) > 20, "the ACL example is no longer whole"
    return tuple(rules)


@contextlib.contextmanager
def every_call_noted() -> Iterator[list[Call]]:
    """The commands of all clients of this process, in order."""
    calls: list[Call] = []
    send = RedisClient.command

    async def noted(client: RedisClient, *args: Argument) -> Reply:
        calls.append(args)
        return await send(client, *args)

    with mock.patch.object(RedisClient, "command", noted):
        yield calls


def keys_of(call: Call) -> tuple[str, ...]:
    """Raises `ValueError` for a command that this module does not know."""
    name = str(call[0])
    if name == "FCALL":
        return tuple(map(str, call[3 : 3 + int(call[2])]))
    if name in WITH_ONE_KEY:
        return (str(call[1]),)
    if name in KEYLESS:
        return ()
    raise ValueError(f"{name}: which of its arguments are keys?")


def functions_of(calls: list[Call]) -> set[str]:
    """Without the digest of the library."""
    return {str(call[1]).split("_", 2)[2] for call in calls if call[0] == "FCALL"}


def registered_functions() -> set[str]:
    return set(re.findall(r"^register\('(\w+)'", library_source().text, re.MULTILINE))


async def every_call(fleet: Fleet) -> None:
    """Raises `AssertionError`, or what the client raises, where one does not do its work."""
    await fleet.client.require(wait_s=0)
    await _registry_and_index(fleet)
    await _boards(fleet.client, fleet.keys)
    await _functions_of_gateways(FunctionLibrary(fleet.client), fleet.keys)


async def _registry_and_index(fleet: Fleet) -> None:
    record, prompt = make_record("w1"), tuple(range(128))
    assert (await fleet.beat(record)).status is LeaseStatus.RENEWED
    await fleet.cache(record, chain_of(prompt[:64]), in_host=1)
    routed = await fleet.index.route(
        model=MODEL,
        demand=Demand(prompt_tokens=len(prompt), output_tokens=1, local_prefill_tokens=16),
        page_size=PAGE,
        chain=b"".join(chain_of(prompt)),
        exclude=frozenset(),
        seed=1,
    )
    assert routed is not None
    assert routed.matched_tokens == 64
    await fleet.index.release(routed.reservation)
    summary = await FunctionLibrary(fleet.client).ask(
        "cell_summary", fleet.keys.shared, fleet.keys.prefix, model_digest(MODEL), shape=CellSummary
    )
    assert summary.decode.workers == 1
    assert [one.view.incarnation for one in (await fleet.snapshot()).workers] == ["w1@1"]
    library, keys = fleet.registry.library, fleet.keys
    summary = await library.ask("cell_summary", keys.shared, keys.prefix, model_digest(MODEL), shape=CellSummary)
    assert summary.decode.workers == 1
    await fleet.registry.deregister("w1@1")
    assert (await fleet.registry.endings(["w1@1"])).ended == {"w1@1"}


async def _boards(client: RedisClient, keys: Keys) -> None:
    board = QuarantineBoard(client=client, keys=keys)
    await board.put("aa", ttl_s=60, capacity=8)
    assert list(await board.digests()) == ["aa"]
    assert await board.clear("aa") == 1
    await board.clear()
    name, bound = SessionName(id="s"), SessionBinding(incarnation="w1@1", tokens=3)
    sessions = SessionBindings(client=client, keys=keys)
    assert await sessions.open(name, ttl_s=60)
    await sessions.put(name, bound, ttl_s=60)
    await sessions.update(name, bound, ttl_s=60)
    assert await sessions.forget(name) == bound
    tickets, choice = TicketBoard(client=client, keys=keys), make_choice("r", make_record("w1").view)
    ticket = Ticket.of(choice, make_query((1, 2)))
    await tickets.issue("t", ticket)
    assert await tickets.take("t") == ticket


async def _functions_of_gateways(library: FunctionLibrary, keys: Keys) -> None:
    limits = UsageLimits(requests=1, tokens=9, concurrency=1)
    usage = UsageBoard(library=library, keys=keys)
    taken = await usage.take("t", limits, Ask(requests=1, tokens=9, lease="r"))
    assert (taken.refused, taken.requests, taken.tokens) == (Refused.NOTHING, 1, 9)
    await usage.renew("t", ["r"])
    await usage.settle("t", second=taken.second, tokens=-9, lease="r")
    report = Report(gateway="g", charges=[Charge(tenant="t", cost=1.5, waits=True)], left=2, wanted=1)
    standing = await FairBoard(library=library, keys=keys).sync(report)
    assert (standing.values, standing.places) == ({"t": 1.5}, 1)
    assert await AdapterBoard(library=library, keys=keys).sync([("a", "", "text")]) == {"a": "text"}
    starting = StartingBoard(library=library, keys=keys)
    worker = StartingWorker(worker_id="w2", incarnation="w2@1", role="both", model=MODEL, phase="weights")
    await starting.report(worker)
    assert await starting.read() == (worker,)
    await starting.forget("w2")
