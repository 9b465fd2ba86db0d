"""A short trace through the real router in Redis: repeatable, complete, and better with locality."""

import json

import msgspec
import pytest

from tandem_engine.config import Role
from tandem_lab.bench.load import Slo
from tandem_lab.simulate.fleet import FleetShape
from tandem_lab.simulate.replay import Outcome, replay
from tandem_lab.simulate.report import Report
from tandem_lab.simulate.requests import simulated_requests
from tandem_lab.simulate.run import CandidateLimit, Simulation
from tandem_lab.traces import TRACE_BLOCK, TraceRow
from tandem_services.cli.main import main
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.decision import Placement
from tandem_services.router.policies import PolicyNames

TURNS, CONVERSATIONS = 4, 13


def conversations() -> list[TraceRow]:
    """Each turn repeats the one before it and adds three blocks; all conversations share block 0."""
    rows = []
    for turn in range(TURNS):
        for number in range(CONVERSATIONS):
            own = range(1 + number * 100, 1 + number * 100 + 3 * (turn + 1))
            blocks = (0, *own)
            at = turn * 30.0 + number * 1.7
            rows.append(
                TraceRow(at=at, prompt_tokens=len(blocks) * TRACE_BLOCK, output_tokens=20 + number, blocks=blocks)
            )
    return rows


REQUESTS = simulated_requests(conversations(), limit=None, speed=1.0)
BLOCKS = sum(len(request.chain) for request in REQUESTS)


def simulation(
    *policies: str, seed: int = 0, candidates: tuple[CandidateLimit, ...] = (CandidateLimit.FEW,), **shape: int
) -> Simulation:
    counts = shape or {"both": 3}
    return Simulation(
        requests=REQUESTS,
        shape=FleetShape(**counts, cache_blocks=500, block_tokens=TRACE_BLOCK),
        policies={name: PolicyNames.parse(name) for name in policies},
        local_prefill_tokens=2048,
        seed=seed,
        slo=Slo(ttft_ms=10_000),
        candidates=candidates,
    )


async def report_of(server, *policies: str, **settings) -> Report:
    server.command("FLUSHALL")
    return await simulation(*policies, **settings).run(RedisAddress(url=server.url), lambda _: None)


async def replayed(server, shape: FleetShape) -> Outcome:
    server.command("FLUSHALL")
    return await replay(
        REQUESTS,
        shape,
        redis=RedisAddress(url=server.url),
        cluster="replayed",
        policies=PolicyNames(),
        local_prefill_tokens=0,
        seed=0,
        on_served=lambda: None,
    )


async def test_simulated_policies_serve_all_and_locality_hits_most(server):
    report = await report_of(server, "locality", "round_robin", "least_loaded", "power_of_two", "session")
    assert all(each.requests == len(REQUESTS) and each.refused == 0 for each in report.policies.values())
    by_hand = sum(1 + 3 * turn for turn in range(TURNS)) * CONVERSATIONS - 1
    assert report.trace.infinite_cache_hit_rate == pytest.approx(by_hand / BLOCKS)
    assert report.trace.pooled_lru_hit_rate == report.trace.infinite_cache_hit_rate
    locality, others = report.policies["locality"], [report.policies[n] for n in ("round_robin", "power_of_two")]
    assert locality.of_pooled_lru > 0.9
    assert all(locality.block_hit_rate > other.block_hit_rate + 0.1 for other in others)
    assert locality.goodput_requests_per_s == pytest.approx(len(REQUESTS) / locality.simulated_s)
    assert report.policies["round_robin"].balance.requests == pytest.approx(18 * 3 / len(REQUESTS))


async def test_equal_seeds_give_equal_reports(server):
    first, second = [(await report_of(server, "locality", "power_of_two")).policies for _ in range(2)]
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    other = (await report_of(server, "locality", "power_of_two", seed=5)).policies
    assert other["power_of_two"] != first["power_of_two"]


async def test_worker_with_large_cache_hits_like_infinite_cache(server):
    report = await report_of(server, "locality", both=1)
    assert report.policies["locality"].block_hit_rate == report.trace.infinite_cache_hit_rate


async def test_simulated_handoffs_release_all_load(server):
    shape = FleetShape(prefill=2, decode=2, cache_blocks=500, block_tokens=TRACE_BLOCK)
    outcome = await replayed(server, shape)
    assert outcome.placements == {Placement.PAIR: len(REQUESTS)}
    assert outcome.local_choices == 0
    assert len(outcome.served) == len(REQUESTS)
    assert all(each.request.at < each.first < each.last for each in outcome.served)
    for worker in outcome.workers:
        assert worker.outstanding == 0
        assert worker.cache.room == worker.cache.capacity
        assert worker.done.output_tokens == 0 or worker.role is Role.DECODE
    assert sum(worker.done.output_tokens for worker in outcome.workers) == sum(r.output_tokens for r in REQUESTS)


async def test_burst_on_one_prefix_makes_a_second_worker_fetch_it(server):
    server.command("FLUSHALL")
    shared, tail = range(40), 20
    prompts = [(0.0, tuple(shared))]
    prompts += [(30.0, (*shared, *range(first, first + tail))) for first in range(100, 100 + 16 * tail, tail)]
    rows = [
        TraceRow(at=at, prompt_tokens=len(blocks) * TRACE_BLOCK, output_tokens=10, blocks=blocks)
        for at, blocks in prompts
    ]
    outcome = await replay(
        simulated_requests(rows, limit=None, speed=1.0),
        FleetShape(both=2, cache_blocks=2000, block_tokens=TRACE_BLOCK),
        redis=RedisAddress(url=server.url),
        cluster="burst",
        policies=PolicyNames(),
        local_prefill_tokens=0,
        seed=0,
        on_served=lambda: None,
    )
    assert len(outcome.served) == len(rows)
    assert sorted(worker.fetches.blocks for worker in outcome.workers) == [0, len(shared)]
    # No worker has computed the shared blocks again.
    assert sum(worker.done.hit_blocks for worker in outcome.workers) == 16 * len(shared)
    for worker in outcome.workers:
        assert worker.done.requests > 4
        assert worker.outstanding == 0
        assert worker.cache.room == worker.cache.capacity


async def test_prompt_longer_than_any_worker_holds_is_rejected(server):
    shape = FleetShape(both=2, cache_blocks=8, block_tokens=TRACE_BLOCK, context_length=4096)
    outcome = await replayed(server, shape)
    fitting = [request for request in REQUESTS if request.prompt_tokens < 4096 and len(request.blocks) < 8]
    assert len(outcome.refused) == len(REQUESTS) - len(fitting) > 0
    assert outcome.refusals == {"context_length": len(outcome.refused)}
    assert len(outcome.served) == len(fitting) > 0


def write_trace(path, rows: list[TraceRow]) -> None:
    lines = [
        {
            "timestamp": int(row.at * 1000),
            "input_length": row.prompt_tokens,
            "output_length": row.output_tokens,
            "hash_ids": row.blocks,
        }
        for row in rows
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


@pytest.mark.usefixtures("server")
def test_command_prints_and_writes_one_report(tmp_path, capsys):
    trace, out, svg = tmp_path / "trace.jsonl", tmp_path / "out.json", tmp_path / "plot.svg"
    write_trace(trace, conversations())
    argv = ["simulate", "--trace", str(trace), "--workers", "2", "--cache-blocks", "300", "--json"]
    argv += ["--policy", "locality", "--policy", "prefill=locality,decode=round_robin"]
    assert main([*argv, "--out", str(out), "--plot", str(svg)]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads(out.read_text())
    assert list(json.loads(printed)["policies"]) == ["locality", "prefill=locality,decode=round_robin"]
    assert svg.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--workers", "none"], "--workers 'none'"),
        (["--workers", "prefill=2"], "at least one worker must decode"),
        (["--workers", "decode=2"], "decode workers need prefill workers"),
        (["--workers", "0"], "1 to 16384 workers"),
        (["--policy", "localty"], "no policy 'localty'"),
        (["--decode-step-ms", "64"], "--decode-step-ms '64'"),
        (["--cache-share", "0"], "--cache-blocks"),
        (["--plot", "absent/plot.svg"], "absent does not exist"),
    ],
)
def test_bad_flag_is_named_before_anything_starts(tmp_path, capsys, flags, reason):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, conversations())
    assert main(["simulate", "--trace", str(trace), *flags]) == 2
    assert reason in capsys.readouterr().err


def test_bad_line_of_the_trace_is_named_with_its_number(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, conversations())
    with trace.open("a") as file:
        file.write('{"timestamp": 1, "input_length": 10}\n')
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert f"line {len(REQUESTS) + 1}: " in capsys.readouterr().err


BOTH_LIMITS = (CandidateLimit.FEW, CandidateLimit.ALL)


async def test_few_candidates_keep_hit_rate_in_large_fleet(server):
    report = await report_of(server, "locality", candidates=BOTH_LIMITS, both=30)
    few, all_workers = report.policies["locality, few"], report.policies["locality, all"]
    assert few.block_hit_rate > 0.0
    assert few.block_hit_rate >= 0.985 * all_workers.block_hit_rate


async def test_few_candidates_of_a_large_fleet_are_repeatable(server):
    first, second = [await report_of(server, "locality", both=30) for _ in range(2)]
    assert first.policies == second.policies


async def test_all_workers_of_a_small_fleet_are_candidates(server):
    report = await report_of(server, "locality", candidates=BOTH_LIMITS)
    assert report.policies["locality, few"] == report.policies["locality, all"]


def test_unknown_limit_of_candidates_is_rejected(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n')
    assert main(["simulate", "--trace", str(trace), "--cache-blocks", "9", "--candidates", "some"]) != 0
    assert "--candidates takes few, all or few,all, got 'some'" in capsys.readouterr().err
