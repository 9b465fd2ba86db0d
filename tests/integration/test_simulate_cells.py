"""Cells in the simulator: which cell serves what, with the product's routers in one Redis."""

import json
from collections import Counter

import msgspec
import pytest

from tandem_lab.simulate import fleet
from tandem_lab.simulate.fleet import FleetShape
from tandem_lab.simulate.gateway import GatewayShape
from tandem_lab.simulate.replay import Outcome, replay
from tandem_lab.simulate.report import policy_report
from tandem_lab.simulate.requests import SimulatedRequest, simulated_requests
from tandem_lab.traces import TRACE_BLOCK, TraceRow
from tandem_services.cli.main import main
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.policies import PolicyNames
from tandem_services.router.registry import Registry


def rows(count: int, *, gap_s: float) -> list[TraceRow]:
    """Prompts without a common beginning."""
    prompts = [tuple(range(number * 10, number * 10 + 4)) for number in range(count)]
    return [
        TraceRow(at=number * gap_s, prompt_tokens=4 * TRACE_BLOCK, output_tokens=50, blocks=blocks)
        for number, blocks in enumerate(prompts)
    ]


async def replayed(server, requests: list[SimulatedRequest], *, cells: int = 2, rows_each: int = 256) -> Outcome:
    server.command("FLUSHALL")
    return await replay(
        requests,
        FleetShape(both=4, cache_blocks=400, block_tokens=TRACE_BLOCK, max_sequences=rows_each),
        redis=RedisAddress(url=server.url),
        cluster="cells",
        policies=PolicyNames(),
        local_prefill_tokens=0,
        seed=0,
        on_served=lambda: None,
        gateways=GatewayShape(gateways=2),
        cells=cells,
    )


def served_by_cell(outcome: Outcome) -> dict[str, int]:
    counts: dict[str, int] = {}
    for worker in outcome.workers:
        cell = worker.name.partition("-")[0]
        counts[cell] = counts.get(cell, 0) + worker.done.requests
    return counts


async def test_each_cell_serves_the_requests_of_its_gateways(server):
    requests = simulated_requests(rows(12, gap_s=5.0), limit=None, speed=1.0)
    outcome = await replayed(server, requests)
    assert served_by_cell(outcome) == {"c00": 6, "c01": 6}
    assert outcome.in_other_cells == outcome.local_choices == 0
    assert policy_report(outcome, pooled=0.0, slo=None, cells=2).in_other_cells == 0


async def test_requests_that_a_cell_cannot_take_are_served_by_another(server):
    """All come to one gateway at once, whose cell has room for two."""
    requests = simulated_requests(rows(4, gap_s=0.0), limit=None, speed=1.0, apart=True)
    outcome = await replayed(server, requests, rows_each=1)
    assert served_by_cell(outcome) == {"c00": 2, "c01": 2}
    assert outcome.in_other_cells == 2
    assert len(outcome.served) == len(requests)


async def test_cells_are_repeatable(server):
    requests = simulated_requests(rows(20, gap_s=0.2), limit=None, speed=1.0)
    reports = [
        policy_report(await replayed(server, requests, rows_each=2), pooled=0.0, slo=None, cells=2) for _ in range(2)
    ]
    assert msgspec.json.encode(reports[0]) == msgspec.json.encode(reports[1])


async def test_workers_of_many_cells_beat_only_with_news(server, monkeypatch):
    """Each of twenty cells of 500 workers was taken for a small fleet, all of which beat each second."""
    beats = Counter[int]()
    heartbeat = Registry.heartbeat

    async def counted(registry: Registry, *args: object, **kwargs: object) -> object:
        beats[fleet.ALL_BEAT] += 1
        return await heartbeat(registry, *args, **kwargs)

    monkeypatch.setattr(Registry, "heartbeat", counted)
    requests = simulated_requests(rows(2, gap_s=30.0), limit=None, speed=1.0)
    for most in (3, 4):
        monkeypatch.setattr(fleet, "ALL_BEAT", most)
        assert len((await replayed(server, requests)).served) == 2
    assert beats[3] < beats[4] / 3


async def test_one_cell_reports_no_others(server):
    requests = simulated_requests(rows(4, gap_s=5.0), limit=None, speed=1.0)
    outcome = await replayed(server, requests, cells=1)
    assert policy_report(outcome, pooled=0.0, slo=None).in_other_cells is None


def test_conversations_stay_with_one_gateway_where_they_are_apart():
    turns = [tuple(range(first, first + length)) for length in (2, 4, 6) for first in (0, 100, 200)]
    trace = [
        TraceRow(at=float(number), prompt_tokens=len(blocks) * TRACE_BLOCK, output_tokens=1, blocks=blocks)
        for number, blocks in enumerate(turns)
    ]
    requests = simulated_requests(trace, limit=None, speed=1.0, sessions_apart=True)
    gateways = {request.session: set() for request in requests}
    for request in requests:
        gateways[request.session].add(request.gateway)
    assert sorted(map(sorted, gateways.values())) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cells", "2"], "each cell needs a gateway; add --gateways 2 or more"),
        (["--cells", "3", "--gateways", "3"], "--workers has 8 (both), which is no multiple of 3"),
        (["--cells", "2", "--gateways", "2", "--autoscale", "--slo-ttft-ms", "1"], "leave out --autoscale"),
        (["--cells", "0"], "--cells"),
    ],
)
def test_cells_that_cannot_be_simulated_are_refused(tmp_path, capsys, flags, message):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}) + "\n")
    try:
        status = main(["simulate", "--trace", str(trace), "--cache-blocks", "9", *flags])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err
