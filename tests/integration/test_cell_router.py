"""A gateway's router over two cells, each with a real Redis: where requests go, and when they return."""

import asyncio
import time
from contextlib import asynccontextmanager
from random import Random

import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.router.cells import neighbour_cell
from tandem_services.router.cells.cell_router import CellRouter
from tandem_services.router.cells.neighbour_cell import CellSummary, NeighbourCell
from tandem_services.router.cells.places import CellPlace
from tandem_services.router.decision import NoWorkersError, OtherCell, Source
from tandem_services.router.redis_functions import CONSTANTS, library_source
from tandem_services.router.registry import WorkerState, model_digest
from tandem_services.router.router import Router, RouterConfig
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import (
    LASTING,
    MODEL,
    PAGE,
    PATIENT_S,
    Fleet,
    chain_of,
    make_load,
    make_query,
    make_record,
    make_view,
)
from tandem_testing.waiting import until

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PATIENCE_S = 60.0
HOME, WEST, EAST = "home", "west", "east"
FULL = make_load(sequences=64)


@pytest.fixture(autouse=True)
def _summaries_count_however_late_the_next_one_comes(monkeypatch) -> None:
    monkeypatch.setattr(neighbour_cell, "SUMMARY_S", PATIENT_S)


def query(first: int = 0, **changes):
    return make_query(tuple(range(first, first + 4 * PAGE)), **changes)


@pytest.fixture
def servers():
    started = [RedisServer.start() for _ in range(2)]
    yield started
    for server in started:
        server.resume()
        server.stop()


def place_of(name: str, server: RedisServer) -> CellPlace:
    return CellPlace(name=name, url=server.url)


@asynccontextmanager
async def cells(servers, *, others=(WEST,), start_timeout_s: float = 30.0, needs_prefill: bool = False):
    """The home cell on the first server and the others on the second, each with a fleet; and a router at home."""
    home, other = servers
    config = RouterConfig(
        redis=RedisAddress(url=home.url),
        cluster=HOME,
        routing_timeout_s=PATIENT_S,
        background_timeout_s=PATIENT_S,
        start_timeout_s=start_timeout_s,
    )
    router = CellRouter(
        config,
        [place_of(name, other) for name in others],
        model=MODEL,
        worker_wait_s=1.0,
        needs_prefill=needs_prefill,
        clock=MonotonicClock(),
        random=Random(1),
        source=library_source({**CONSTANTS, **LASTING}),
        open_wait_s=PATIENT_S,
    )
    fleets = {HOME: Fleet(home, cluster=HOME, **LASTING)}
    fleets |= {name: Fleet(other, cluster=name, **LASTING) for name in others}
    try:
        yield router, fleets
    finally:
        await router.stop()
        for fleet in fleets.values():
            await fleet.close()


async def populate(fleets, **loads) -> None:
    """A worker per cell that does both, named after it. `loads` by cell; None: it has no worker."""
    for name, fleet in fleets.items():
        load = loads.get(name, make_load())
        if load is not None:
            await fleet.beat(make_record(f"{name}-0", load=load))


async def chosen(router: CellRouter, **changes) -> tuple[str, str]:
    """Cell and reason of a request that is released at once."""
    choice = await router.choose(query(**changes))
    await router.release(choice)
    assert choice.decode.worker_id == f"{HOME if choice.cell is None else choice.cell.name}-0"
    return (HOME, "") if choice.cell is None else (choice.cell.name, choice.cell.reason)


async def test_own_cell_with_capacity_gets_all_requests(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets)
        await router.start()
        assert {await chosen(router, first=number) for number in range(20)} == {(HOME, "")}
        assert [cell.awake for cell in router.figures()] == [False]
        assert {worker.worker_id for worker in router.workers()} == {"home-0"}


async def test_full_cell_sends_requests_to_another(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL)
        await router.start()
        assert await chosen(router) == (WEST, "full")
        await fleets[HOME].beat(make_record("home-0"))
        assert await chosen(router) == (HOME, "")


async def test_full_cells_leave_the_request_with_their_own(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL, west=FULL)
        await router.start()
        assert await chosen(router) == (HOME, "")
        assert [cell.awake for cell in router.figures()] == [False]


async def test_prompt_waits_for_the_worker_that_has_its_prefix(servers):
    """Another cell computed it again, and the next turn of the conversation found less at home."""
    known, new = tuple(range(8_000)), tuple(range(100_000, 108_000))
    async with cells(servers) as (router, fleets):
        busy = make_record("home-0", load=make_load(queue_tokens=2_000), context_length=32_768)
        await fleets[HOME].beat(busy)
        await fleets[HOME].cache(busy, chain_of(known))
        await fleets[WEST].beat(make_record("west-0", context_length=32_768))
        await router.start()
        places = []
        for tokens in (known, new):
            choice = await router.choose(make_query(tokens))
            places.append(choice.decode.worker_id)
            await router.release(choice)
        assert places == ["home-0", "west-0"]
        assert router._others[0].may_take(len(known)), "it has capacity for others"


async def test_place_that_becomes_free_in_a_full_cell_is_found_before_the_next_second(servers, monkeypatch):
    monkeypatch.setattr(neighbour_cell, "PASSED_OVER_S", 0.0)
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL, west=FULL)
        await router.start()
        router._looking.cancel()
        await fleets[WEST].beat(make_record("west-0"))
        assert await chosen(router) == (HOME, "")
        await router._background.settle()
        assert await chosen(router) == (WEST, "full")


async def test_full_cell_is_not_looked_at_for_each_request_that_waits(servers, monkeypatch):
    monkeypatch.setattr(neighbour_cell, "PASSED_OVER_S", PATIENT_S)
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL, west=FULL)
        await router.start()
        for number in range(10):
            assert await chosen(router, first=number) == (HOME, "")
        assert not router._background._tasks


async def test_cell_without_room_for_a_prompt_is_asked_for_shorter_ones(servers, monkeypatch):
    """Its summary promises room, and not enough for this prompt."""
    monkeypatch.setattr(neighbour_cell, "PASSED_OVER_S", PATIENT_S)
    async with cells(servers) as (router, fleets):
        for name, load in ((HOME, FULL), (WEST, make_load(room_tokens=9_000))):
            await fleets[name].beat(make_record(f"{name}-0", load=load, context_length=32_768))
        await router.start()
        assert await chosen(router, max_tokens=16) == (WEST, "full")
        long = make_query(tuple(range(20_000)), max_tokens=512)
        choice = await router.choose(long)
        await router.release(choice)
        assert choice.cell is None
        assert not router._others[0].may_take(20_000)
        assert await chosen(router, max_tokens=16) == (WEST, "full")


async def test_request_that_a_cell_cannot_serve_says_nothing_of_others(servers, monkeypatch):
    monkeypatch.setattr(neighbour_cell, "PASSED_OVER_S", PATIENT_S)
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL)
        await router.start()
        with pytest.raises(NoWorkersError):
            await router.choose(query(compat_hash="gone"))
        beside = await router.choose(query(only=frozenset({"home-0@1"})))
        assert beside.cell is None, "full, and the only one that it may have"
        await router.release(beside)
        assert await chosen(router) == (WEST, "full")


async def test_choices_of_one_prompt_meet_in_another_cell(servers):
    async with cells(servers, others=(WEST, EAST)) as (router, fleets):
        await populate(fleets, home=FULL)
        await router.start()
        first = await router.choose(query())
        second = await router.choose(query(only=frozenset({first.decode.incarnation})))
        assert (second.decode, second.cell) == (first.decode, OtherCell(first.cell.name, "kept"))
        for choice in (first, second):
            await router.release(choice)
        assert all(cell.may_take(1) for cell in router._others)


@pytest.mark.parametrize(("needs_prefill", "place"), [(True, (WEST, "no_worker")), (False, (HOME, ""))])
async def test_cell_without_prefill_workers_serves_if_it_may(servers, needs_prefill, place):
    async with cells(servers, needs_prefill=needs_prefill) as (router, fleets):
        await fleets[HOME].beat(make_record("home-0", Role.DECODE))
        await fleets[WEST].beat(make_record("west-0"))
        await router.start()
        assert await chosen(router) == place


async def test_cancelled_request_leaves_nothing_reserved(servers, monkeypatch):
    """Its client has gone while another cell was asked."""
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL)
        await router.start()
        asked = asyncio.Event()

        async def hang(*_: object, **__: object) -> None:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(NeighbourCell, "choose", hang)
        choosing = asyncio.create_task(router.choose(query()))
        await asked.wait()
        assert router.home._own.sequences("home-0@1") == 1
        choosing.cancel()
        await asyncio.gather(choosing, return_exceptions=True)
        await router._background.settle()
        assert router.home._own.sequences("home-0@1") == 0


async def test_cell_without_workers_sends_requests_to_another(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=None)
        await router.start()
        assert await chosen(router) == (WEST, "no_worker")
        await until(lambda: bool(router.offered()), PATIENCE_S, "workers of the other cell are known")
        assert router.prefill_rate(MODEL) > 0.0


async def test_draining_cell_sends_requests_to_another(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets)
        await router.start()
        await fleets[HOME].beat(make_record("home-0", state=WorkerState.DRAINING))
        await router.home.refresh()
        assert await chosen(router) == (WEST, "no_worker")


async def test_lost_redis_sends_requests_to_another_until_it_is_back(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets)
        await router.start()
        servers[0].kill()
        await until(lambda: _goes_to(router, (WEST, "no_redis")), PATIENCE_S, "the other cell serves")
        assert {await chosen(router, first=number) for number in range(20)} == {(WEST, "no_redis")}
        servers[0].restart()
        await fleets[HOME].beat(make_record("home-0"))
        await until(lambda: _goes_to(router, (HOME, "")), PATIENCE_S, "the own cell serves again")


async def _goes_to(router: CellRouter, place: tuple[str, str]) -> bool:
    return await chosen(router) == place


async def test_all_redis_lost_routes_by_the_last_view(servers, monkeypatch):
    monkeypatch.setattr(neighbour_cell, "SUMMARY_S", 0.5)
    async with cells(servers) as (router, fleets):
        await populate(fleets)
        await router.start()
        for server in servers:
            server.kill()
        await until(lambda: not router.figures()[0].reachable, PATIENCE_S, "the other cell is away")
        for number in range(10):
            choice = await router.choose(query(number))
            assert (choice.source, choice.cell) == (Source.LOCAL, None)
            await router.release(choice)


async def test_workers_of_the_own_cell_decide_what_a_gateway_encodes(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL)
        await fleets[WEST].beat(make_record("west-1"))
        await router.start()
        await router.release(await router.choose(query()))
        assert {worker.worker_id for worker in router.offered()} == {"home-0", "west-0", "west-1"}
        assert [worker.worker_id for worker in router.ready()] == ["home-0"]


async def test_no_worker_anywhere_is_an_error(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=None, west=None)
        await router.start()
        with pytest.raises(NoWorkersError):
            await router.choose(query())


async def test_gateway_starts_without_its_own_redis(servers):
    async with cells(servers, start_timeout_s=0.0) as (router, fleets):
        await populate(fleets)
        servers[0].kill()
        await router.start()
        assert await chosen(router) == (WEST, "no_worker")
        servers[0].restart()
        await fleets[HOME].beat(make_record("home-0"))
        await until(lambda: _goes_to(router, (HOME, "")), PATIENCE_S, "the own cell serves")


async def test_gateway_without_any_redis_does_not_start(servers):
    async with cells(servers, start_timeout_s=0.0) as (router, _):
        for server in servers:
            server.kill()
        with pytest.raises(RedisUnavailableError):
            await router.start()


async def test_prompts_with_one_beginning_go_to_one_other_cell(servers):
    async with cells(servers, others=(WEST, EAST)) as (router, fleets):
        await populate(fleets, home=FULL)
        await router.start()
        places = [{(await chosen(router, first=1_000 * start))[0] for _ in range(3)} for start in range(12)]
        assert all(len(found) == 1 for found in places)
        assert set().union(*places) == {WEST, EAST}


async def test_weights_of_a_stream_decide_before_the_cell(servers):
    """What an output began with continues it, so its own cell is no choice."""
    async with cells(servers) as (router, fleets):
        await fleets[HOME].beat(make_record("home-0", compat_hash="new"))
        await fleets[WEST].beat(make_record("west-0", compat_hash="old"))
        await router.start()
        choice = await router.choose(query(compat_hash="old"))
        assert (choice.decode.worker_id, choice.cell) == ("west-0", OtherCell(WEST, "no_worker"))
        await router.release(choice)


async def test_session_is_kept_in_the_cell_where_it_began(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets)
        await router.start()
        choice = await router.stay(query(), "west-0@1")
        assert (choice.decode.worker_id, choice.cell) == ("west-0", OtherCell(WEST, "kept"))
        await router.release(choice)
        with pytest.raises(NoWorkersError):
            await router.stay(query(), "gone-0@1")


async def test_session_of_a_lost_worker_opens_no_other_cell(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets)
        await router.start()
        router.mark_dead("home-0@1")
        with pytest.raises(NoWorkersError):
            await router.stay(query(), "home-0@1")
        assert not router.figures()[0].awake


async def test_sequence_moves_within_its_cell_alone(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=None)
        await fleets[WEST].beat(make_record("west-1"))
        await router.start()
        leaving = await router.choose(query())
        moved = await router.relocate(query(), leaving.decode)
        assert moved.decode.worker_id != leaving.decode.worker_id
        assert moved.cell == OtherCell(WEST, "kept")
        for choice in (leaving, moved):
            await router.release(choice)


async def test_sequence_of_an_unknown_worker_moves_nowhere(servers):
    """Its cell is not known, and others cannot take its KV."""
    async with cells(servers) as (router, fleets):
        await populate(fleets)
        await router.start()
        with pytest.raises(NoWorkersError):
            await router.relocate(query(), make_view("gone"))


async def test_view_stays_open_while_the_own_cell_lacks_workers(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=None)
        await router.start()
        await until(lambda: router.figures()[0].awake, PATIENCE_S, "the view is opened ahead")
        router._others[0]._used_at = float("-inf")
        await router.look()
        assert router.figures()[0].awake


async def test_view_that_cannot_be_opened_leaves_no_connection(servers, monkeypatch):
    stopped, stop = [], Router.stop

    async def counted(router: Router) -> None:
        stopped.append(router)
        await stop(router)

    async def fail(_: Router) -> None:
        raise ValueError("broken")

    async with cells(servers) as (router, fleets):
        await populate(fleets)
        await router.start()
        monkeypatch.setattr(Router, "stop", counted)
        router._others[0].begin = fail
        assert await router._others[0].open() is None
        assert len(stopped) == 1


async def test_view_of_another_cell_is_closed_when_unused(servers, monkeypatch):
    monkeypatch.setattr(neighbour_cell, "IDLE_S", 0.0)
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL)
        await router.start()
        held = await router.choose(query())
        await router.look()
        assert [cell.awake for cell in router.figures()] == [True]
        await router.release(held)
        await router.look()
        assert [cell.awake for cell in router.figures()] == [False]
        assert await chosen(router) == (WEST, "full")


async def test_dead_worker_of_another_cell_is_not_chosen(servers):
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=None)
        await fleets[WEST].beat(make_record("west-1"))
        await router.start()
        await router.release(await router.choose(query()))
        router.mark_dead("west-0@1")
        for number in range(10):
            choice = await router.choose(query(number))
            await router.release(choice)
            assert choice.decode.worker_id == "west-1"


async def test_missing_password_file_keeps_a_cell_away(servers, tmp_path):
    file = tmp_path / "password"
    place = CellPlace(name=WEST, url=servers[1].url, password_file=file)
    async with cells(servers) as (router, fleets):
        await populate(fleets, home=FULL)
        for cell in router._others:
            cell.place = place
        await router.start()
        assert [cell.reachable for cell in router.figures()] == [False]
        servers[1].command("CONFIG", "SET", "requirepass", "secret")
        file.write_text("secret")
        await until(lambda: router.figures()[0].reachable, PATIENCE_S, "the cell is reached")
        assert await chosen(router) == (WEST, "full")


@pytest.mark.parametrize(
    ("records", "prefill", "decode"),
    [
        ([], 0, 0),
        ([make_record("a")], 1, 1),
        ([make_record("p", Role.PREFILL), make_record("d", Role.DECODE), make_record("e", Role.DECODE)], 1, 2),
        ([make_record("a"), make_record("b", compat_hash="other")], 2, 2),
        ([make_record("a", state=WorkerState.DRAINING)], 0, 0),
    ],
)
async def test_summary_counts_workers_that_may_be_chosen(server, records, prefill, decode):
    async with Fleet.of(server, **LASTING) as fleet:
        for record in records:
            await fleet.beat(record)
        summary = await summary_of(fleet)
        assert (summary.prefill.workers, summary.decode.workers) == (prefill, decode)
        assert summary.has_room is (decode > 0)


async def summary_of(fleet: Fleet) -> CellSummary:
    library, keys = fleet.registry.library, fleet.keys
    return await library.ask("cell_summary", keys.shared, keys.prefix, model_digest(MODEL), shape=CellSummary)


async def test_summary_of_a_full_fleet_has_no_room(server):
    async with Fleet.of(server, **LASTING) as fleet:
        await fleet.beat(make_record("a", load=FULL))
        assert not (await summary_of(fleet)).has_room
        await fleet.beat(make_record("b"))
        assert (await summary_of(fleet)).has_room


async def test_summary_of_a_fleet_that_died_has_no_workers(server):
    async with Fleet.of(server, LEASE_MS=50, FENCE_AFTER_MS=3_600_000) as fleet:
        await fleet.beat(make_record("a"))
        await asyncio.sleep(0.1)
        assert (await summary_of(fleet)).decode.workers == 0


async def test_summary_drops_ranks_that_workers_did_not_write(server):
    async with Fleet.of(server, **LASTING) as fleet:
        await fleet.beat(make_record("a"))
        kinds = f"{fleet.keys.prefix}kinds:{model_digest(MODEL).hex()}"
        server.command("SET", kinds, "nonsense")
        assert (await summary_of(fleet)).decode.workers == 0
        await fleet.beat(make_record("a"))
        assert (await summary_of(fleet)).decode.workers == 1


async def test_summary_counts_the_kinds_that_were_described_last(server):
    """As decisions do: those of weights that came and went are looked at no more."""
    async with Fleet.of(server, **LASTING) as fleet:
        await fleet.beat(make_record("a"))
        kinds = f"{fleet.keys.prefix}kinds:{model_digest(MODEL).hex()}"
        before = int(time.time() * 1000) - 60_000
        server.command("ZADD", kinds, *(word for number in range(16) for word in (str(before), f"{number:016d}")))
        assert (await summary_of(fleet)).decode.workers == 1


async def test_summary_costs_the_same_in_any_fleet(server):
    """Counted in commands, which are all that grows."""
    counts = []
    for workers in (4, 200):
        async with Fleet.of(server, **LASTING) as fleet:
            for number in range(workers):
                await fleet.beat(make_record(f"w{number}"))
            server.command("CONFIG", "RESETSTAT")
            await summary_of(fleet)
            counts.append(_calls(server))
    assert counts[0] == counts[1]


def _calls(server: RedisServer) -> int:
    lines = server.command("INFO", "commandstats").splitlines()
    stats = {
        line.partition(":")[0]: line.partition("calls=")[2].partition(",")[0] for line in lines if "calls=" in line
    }
    return sum(int(count) for name, count in stats.items() if name not in {"cmdstat_config|resetstat", "cmdstat_info"})
