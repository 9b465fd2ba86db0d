"""What workers that start report in a real Redis: read while people look or requests wait, and never trusted."""

from dataclasses import replace

import msgspec
import pytest

from tandem_engine.config import Role
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import MAX_STARTING
from tandem_services.router.redis_functions import CONSTANTS, FunctionLibrary, library_source
from tandem_services.router.starting import StartingBoard, StartReport
from tandem_testing.console_builders import starting
from tandem_testing.router_builders import LASTING, make_record, patient_router
from tandem_testing.waiting import until

NOW = 1_000_000_000
PATIENCE_S = 60.0


def board_of(fleet, *, now: int = NOW) -> StartingBoard:
    """`now`: the time of its functions, in milliseconds, instead of Redis's own."""
    library = FunctionLibrary(
        fleet.client, library_source({**CONSTANTS, **LASTING}, clock=f"local function now_ms() return {now} end")
    )
    return StartingBoard(library=library, keys=fleet.keys)


async def test_starting_workers_are_read_until_they_have_started(fleet):
    board = board_of(fleet)
    await board.report(starting("b", done=1))
    await board.report(starting("a"))
    await board.report(starting("b", done=2))
    assert await board.read() == (starting("a"), starting("b", done=2))
    await board.forget("a")
    assert await board.read() == (starting("b", done=2),)


async def test_report_that_is_not_repeated_is_forgotten(fleet):
    lasting = LASTING["STARTING_MS"]
    await board_of(fleet).report(starting("a"))
    await board_of(fleet, now=NOW + lasting).report(starting("b"))
    later = board_of(fleet, now=NOW + lasting + 1)
    assert await later.read() == (starting("b"),)
    assert await fleet.client.command("HLEN", fleet.keys.starting) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"a": "garbage"},
        {"a": f"{'9' * 15} {{}}"},
        {"a": "-1 {}"},
        {"a": "1 " + "x" * 100_000},
        {f"w{i}": "1 x" for i in range(MAX_STARTING + 1)},
    ],
    ids=["text", "future", "negative", "long", "many"],
)
async def test_malformed_report_is_removed_and_others_stay(fleet, values):  # [redis-values-untrusted]
    board = board_of(fleet)
    for name, value in values.items():
        await fleet.client.command("HSET", fleet.keys.starting, name, value)
    await board.report(starting("z"))
    assert await board.read() == (starting("z"),)
    assert await fleet.client.command("HLEN", fleet.keys.starting) == 1


async def test_report_with_other_fields_is_left_out(fleet):  # [redis-values-untrusted]
    board = board_of(fleet)
    await fleet.client.command("SET", fleet.keys.starting, "a string")
    assert await board.read() == ()
    await fleet.client.command("HSET", fleet.keys.starting, "bytes", f"{NOW} ".encode() + b"\xff\xfe")
    for name, changes in (("a", {"done": -1}), ("b", {"seconds": float("inf")}), ("c", {"phase": "x" * 300})):
        await board.report(msgspec.structs.replace(starting(name), **changes))
    await board.report(starting("z"))
    assert await board.read() == (starting("z"),)


async def test_report_that_is_not_signed_by_the_deployment_is_left_out(fleet):  # [redis-values-untrusted]
    """Neither one of another secret, nor one that is signed for another role, nor one without a proof."""
    board = replace(board_of(fleet), deployment=Deployment(b"s" * 32))
    await replace(board, deployment=Deployment(b"other" * 8)).report(starting("a"))
    await board.report(starting("b"))
    [signed] = await board.read()
    assert signed == starting("b")
    proof = board.deployment.start_proof("b@1", role=signed.role, model=signed.model)
    forged = [
        StartReport(**msgspec.structs.asdict(starting("b", role=Role.DECODE)), proof=proof),
        StartReport(**msgspec.structs.asdict(starting("c")), proof=proof),
        starting("d"),
        StartReport(**(msgspec.structs.asdict(starting("b")) | {"worker_id": "e"}), proof=proof),
    ]
    for report in forged:
        text = f"{NOW} ".encode() + msgspec.json.encode(report)
        await fleet.client.command("HSET", fleet.keys.starting, report.worker_id, text)
    assert await board.read() == ()


async def test_router_reads_starting_workers_while_requests_wait(fleet, router):
    await StartingBoard(library=fleet.registry.library, keys=fleet.keys).report(starting("a"))

    async def seen() -> bool:
        return router.starting() == (starting("a"),)

    assert router.starting() == ()
    await until(seen, PATIENCE_S, "the router has read who starts")


async def test_router_reads_starting_workers_while_people_look(fleet, router):
    await StartingBoard(library=fleet.registry.library, keys=fleet.keys).report(starting("a"))

    async def seen() -> bool:
        return router.fleet().starting == (starting("a"),)

    assert router.fleet().starting == ()
    await until(seen, PATIENCE_S, "the router has read who starts")


async def test_first_worker_is_seen_before_the_next_heartbeat(server, fleet, monkeypatch):
    """Whatever came before the first worker waited for the next regular view, half a second on average."""
    monkeypatch.setattr("tandem_services.router.router.HEARTBEAT_S", 2 * PATIENCE_S)
    gateway = patient_router(server)
    await gateway.start()
    await fleet.beat(make_record("a"))
    await until(lambda: bool(gateway.workers()), PATIENCE_S, "no worker in the view")
    await gateway.stop()
