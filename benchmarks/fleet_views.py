"""What heartbeats and views of the fleet cost Redis, for `router_redis.py --views`.

Each figure is given twice: `us`, microseconds of the functions by the clock of Redis (`INFO commandstats`), and
`cpu_us`, CPU of Redis, network and protocol included, which is comparable on a busy machine. Sweeps, which one call a
second makes, are left out of the calls and measured by themselves.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.keys import HEARTBEAT_S, MAX_DESCRIBED, MAX_WORKERS, Keys
from tandem_services.router.redis_functions import CONSTANTS, FunctionLibrary, library_source
from tandem_services.router.registry import Registry, WorkerRecord, model_digest
from tandem_services.router.views.fleet_reader import LISTED_A_SECOND, FleetReader
from tandem_testing.redis_server import RedisServer
from tandem_testing.service_clock import ServiceClock

HOUR_MS = 3_600_000
LASTING = {"LEASE_MS": HOUR_MS, "FENCE_AFTER_MS": 2 * HOUR_MS, "DESCRIBED_TTL_MS": HOUR_MS}
JOINS = 16
AT_ONCE = 64


class Spent(NamedTuple):
    """By Redis, since its start or since another moment."""

    us: float
    cpu_us: float
    calls: int

    def __sub__(self, earlier: "Spent") -> "Spent":
        return Spent(self.us - earlier.us, self.cpu_us - earlier.cpu_us, self.calls - earlier.calls)

    def over(self, parts: float) -> dict[str, float]:
        """For each of so many equal parts."""
        return {"us": round(self.us / parts, 1), "cpu_us": round(self.cpu_us / parts, 1)}


class FleetCosts(NamedTuple):
    """Of one size of the fleet."""

    workers: int
    costs: dict[str, dict[str, float]]
    """`us` and `cpu_us` by what was done."""
    first_view_calls: int


class Views:
    """A fleet on an empty Redis, whose leases outlast the measurement."""

    def __init__(self, server: RedisServer, records: list[WorkerRecord]) -> None:
        self.server, self.records, self.generation = server, records, 0
        self.client = RedisClient(RedisAddress(url=server.url), timeout_s=300)
        self.registry, self.sweeping = self._registry(HOUR_MS), self._registry(0)

    def _registry(self, sweep_every_ms: int) -> Registry:
        source = library_source({**CONSTANTS, **LASTING, "SWEEP_EVERY_MS": sweep_every_ms})
        return Registry(library=FunctionLibrary(self.client, source), keys=Keys("bench"))

    async def beats(
        self, *, describe: bool, known: bool, registry: Registry | None = None, most: int = MAX_WORKERS
    ) -> None:
        """One of each worker, of `most` at most. `known`: they know all others."""
        for first in range(0, min(len(self.records), most), AT_ONCE):
            some = self.records[first : first + AT_ONCE]
            generation = self.generation if known else 0
            beats = (
                (registry or self.registry).heartbeat(
                    record, known_generation=generation, report_age_s=0.2, describe=describe
                )
                for record in some
            )
            self.generation = max(reply.generation for reply in await asyncio.gather(*beats))

    async def nothing(self) -> None:
        """Calls of a function that has nothing to do."""
        keys = Keys("bench").usage_of("unused-tenant")
        for _ in range(len(self.records)):
            await self.registry.library.call("usage_settle", keys, 0, 0, "")

    async def summaries(self) -> None:
        """What gateways of other cells read of this fleet every second, by as many gateways as `AT_ONCE`."""
        keys, model = Keys("bench"), model_digest(self.records[0].view.model)
        for _ in range(AT_ONCE):
            await self.registry.library.call("cell_summary", keys.shared, keys.prefix, model)

    async def whole_view(self) -> None:
        """Every worker described, as each gateway read it every second."""
        changes = await self.registry.changes(0)
        names = sorted(changes.listed or ())
        for first in range(0, len(names), MAX_DESCRIBED):
            await self.registry.changes(changes.generation, described=names[first : first + MAX_DESCRIBED])

    async def spent(self, work: Callable[[], Awaitable[object]]) -> Spent:
        before = await self._counted()
        await work()
        return await self._counted() - before

    async def _counted(self) -> Spent:
        text = await asyncio.to_thread(self.server.command, "INFO", "all")
        lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        calls = dict(field.split("=") for field in lines["cmdstat_fcall"].split(","))
        cpu_s = float(lines["used_cpu_user"]) + float(lines["used_cpu_sys"])
        return Spent(float(calls["usec"]), cpu_s * 1e6, int(calls["calls"]))


async def measure_views(
    server: RedisServer, records: list[WorkerRecord], joining: list[WorkerRecord], *, rounds: int
) -> FleetCosts:
    """Per heartbeat, and per gateway and second."""
    await asyncio.to_thread(server.command, "FLUSHALL")
    fleet = Views(server, records)
    await fleet.beats(describe=True, known=True)
    await fleet.sweeping.library.load()
    clock = ServiceClock()
    reader = FleetReader(registry=fleet.registry, clock=clock)
    seconds = max(16, int(2 * len(records) / LISTED_A_SECOND))

    async def one_second_each() -> None:
        for _ in range(seconds):
            clock.advance(HEARTBEAT_S)
            await reader.snapshot()

    async def joins() -> None:
        for record in joining:
            await fleet.registry.heartbeat(record, known_generation=fleet.generation, report_age_s=0.2)
            await reader.snapshot()

    async def least(work: Callable[[], Awaitable[object]], parts: int = 0) -> dict[str, float]:
        """Of the round that was disturbed the least; for each call, or of `parts`."""
        spent = min([await fleet.spent(work) for _ in range(rounds)])
        return spent.over(parts or spent.calls)

    first = await fleet.spent(reader.snapshot)
    beat = await least(lambda: fleet.beats(describe=False, known=True))
    swept = await least(lambda: fleet.beats(describe=False, known=True, registry=fleet.sweeping, most=AT_ONCE))
    costs = {
        "empty_call": await least(fleet.nothing),
        "heartbeat": beat,
        "heartbeat_with_description": await least(lambda: fleet.beats(describe=True, known=True)),
        "heartbeat_with_all_members": await least(lambda: fleet.beats(describe=True, known=False, most=AT_ONCE)),
        "sweep": {name: round(swept[name] - beat[name], 1) for name in beat},
        "summary": await least(fleet.summaries),
        "view_per_gateway_second": await least(one_second_each, seconds),
        "whole_view": await least(fleet.whole_view, 1),
        "first_view": first.over(1),
        "join_and_view": (await fleet.spent(joins)).over(len(joining)),
    }
    await fleet.client.close()
    return FleetCosts(workers=len(records), costs=costs, first_view_calls=first.calls)
