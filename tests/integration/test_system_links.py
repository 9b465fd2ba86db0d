"""Two prefill and two decode workers measure their links, and the router uses what they measure."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.ipc.keys import KeyPair
from tandem_services.cli.main import main
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.cost import Demand
from tandem_services.router.deployment import Deployment
from tandem_services.router.index import BlockIndex
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.registry import Registry, WorkerRecord
from tandem_services.router.views.fleet_reader import FleetReader
from tandem_testing.router_builders import PAGE, PATIENT_S, chain_of, make_link
from tandem_testing.system import System
from tandem_testing.system_client import SystemClient
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

MEASURED_S = 150.0
INDEXED_S = 120.0


async def test_every_pair_is_measured_and_the_operator_sees_it(fleet, capsys):
    for worker_id, url in fleet.system.workers.items():
        peers = "decode" if worker_id.startswith("prefill") else "prefill"
        links: list[dict[str, Any]] = []

        async def measured(url: str = url, peers: str = peers, links: list[dict[str, Any]] = links) -> bool:
            links[:] = (await fleet.get(f"{url}/links"))["links"]
            # One that was killed by an earlier test may still be among them.
            known = sorted(link["peer"].partition("@")[0] for link in links) == [f"{peers}-0", f"{peers}-1"]
            # A request's push has measured the rate alone, perhaps before the self-test could.
            return known and all(min(link.get("bytes_per_s", 0.0), link.get("latency_s", 0.0)) > 0 for link in links)

        await until(measured, MEASURED_S, f"{worker_id} has measured its links", links.copy)
        assert await fleet.metric("tandem_link_bytes_per_second", url) > 0
        assert await asyncio.to_thread(main, ["ctl", url, "links"]) == 0
        header, *rows = capsys.readouterr().out.splitlines()
        assert header.startswith("PEER")
        assert [row.split()[0].partition("@")[0] for row in rows] == [f"{peers}-0", f"{peers}-1"]
        assert {row.split()[4] for row in rows} == {"shm"}


async def test_short_uncached_suffix_is_prefilled_on_decode_worker(fleet, reference):
    prompt = tuple(Random("a short rest").choices(range(20, 900), k=40 * PAGE))
    first = await fleet.complete(prompt)
    (attempt,) = await fleet.attempts(first["id"])
    assert attempt["placement"] == "pair"

    longer = (*prompt, 33)
    async with SystemClient(system=reference.system) as alone:
        expected = (await alone.complete(longer, max_tokens=16))["choices"][0]["text"]

    async def local() -> bool:
        answer = await fleet.complete(longer, max_tokens=16)
        assert answer["choices"][0]["text"] == expected
        (attempt,) = await fleet.attempts(answer["id"])
        return bool(attempt["placement"] == "local" and attempt["prefill"] is None)

    await until(local, INDEXED_S, "the decode worker computes one token itself")
    assert await fleet.metric('tandem_gateway_placements_total{placement="local"}') > 0


class ForeignWorker:
    """A prefill worker that exists in the registry alone: a hundred times as fast as any, behind links as it says."""

    def __init__(self, system: System, client: RedisClient, cluster: str) -> None:
        library, deployment = FunctionLibrary(client), Deployment.of(KeyPair.load(system.run_dir / "keys.json"))
        keys = Keys(cluster, deployment.namespace)
        self.registry = Registry(library=library, keys=keys, deployment=deployment)
        self.index = BlockIndex(library=library, keys=keys)

    async def beat(self, *, bytes_per_s: float) -> WorkerRecord:
        """One heartbeat with that figure for every link."""
        records = (await FleetReader(registry=self.registry, clock=MonotonicClock()).snapshot()).workers
        like = next(record for record in records if record.view.worker_id == "prefill-0")
        links = tuple(
            make_link(record, bytes_per_s) for record in records if record.view.worker_id.startswith("decode")
        )
        record = replace(
            like,
            view=replace(like.view, worker_id="foreign", incarnation="foreign@1"),
            load=replace(like.load, prefill_rate=1e6, queue_tokens=0.0, transfer_rate=bytes_per_s),
            links=links,
        )
        await self.registry.heartbeat(record, known_generation=0, report_age_s=0.0)
        return record

    async def chosen(self, like: WorkerRecord, prompt: tuple[int, ...]) -> str | None:
        """The prefill worker that the router would choose now."""
        demand = Demand(prompt_tokens=len(prompt), output_tokens=8, local_prefill_tokens=0)
        routed = await self.index.route(
            model=like.view.model,
            demand=demand,
            page_size=like.view.page_size,
            chain=b"".join(chain_of(prompt)),
            exclude=frozenset(),
            seed=1,
        )
        assert routed is not None
        await self.index.release(routed.reservation)
        return routed.prefill


@contextlib.asynccontextmanager
async def foreign_worker(system: System) -> AsyncIterator[ForeignWorker]:
    service = next(process for process in system.processes() if process.flag("--health-port"))
    client = RedisClient(RedisAddress(url=str(service.flag("--redis-url"))), timeout_s=PATIENT_S)
    foreign = ForeignWorker(system, client, str(service.flag("--cluster")))
    try:
        yield foreign
    finally:
        await foreign.registry.deregister("foreign@1")
        await client.close()


async def test_fast_worker_with_slow_links_is_avoided(fleet: SystemClient):
    random = Random("slow links")
    async with foreign_worker(fleet.system) as foreign:
        fast = await foreign.beat(bytes_per_s=1e12)
        prompt = tuple(random.choices(range(20, 900), k=400))
        assert await foreign.chosen(fast, prompt) == "foreign@1"
        for _ in range(4):
            slow = await foreign.beat(bytes_per_s=1e5)
            assert await foreign.chosen(slow, prompt) != "foreign@1"
            answer = await fleet.complete(tuple(random.choices(range(20, 900), k=400)))
            (attempt,) = await fleet.attempts(answer["id"])
            assert attempt["prefill"] != "foreign@1"
