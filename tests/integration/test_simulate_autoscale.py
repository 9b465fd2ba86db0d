"""Workers that come and go under the real router: complete, repeatable, and worth what they cost."""

import json

import pytest

from tandem_lab.bench.load import Slo
from tandem_lab.simulate.autoscaling import Law, ScalingCosts, Static, config_of_objectives
from tandem_lab.simulate.fleet import FleetShape
from tandem_lab.simulate.prefix_fetch import ServiceTimes
from tandem_lab.simulate.replay import Scaled
from tandem_lab.simulate.report import ScalingReport
from tandem_lab.simulate.requests import simulated_requests
from tandem_lab.simulate.run import ScalingSimulation, Simulation
from tandem_lab.traces import TRACE_BLOCK, TraceRow
from tandem_operator.scaling.load import Targets
from tandem_operator.scaling.policy import RoleBounds, ScalingConfig
from tandem_services.cli.main import main
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.policies import PolicyNames
from tandem_services.router.router import Router


def a_busy_time() -> list[TraceRow]:
    """Quiet, then three times what two workers can compute, then quiet again."""
    rows, at = [], 0.0
    for number in range(150):
        at += 0.9 if 15 <= number < 130 else 5.0
        blocks = tuple(range(number * 10, number * 10 + 6))
        rows.append(TraceRow(at=at, prompt_tokens=6 * TRACE_BLOCK, output_tokens=30, blocks=blocks))
    return rows


REQUESTS = simulated_requests(a_busy_time(), limit=None, speed=1.0)
SLO = Slo(ttft_ms=8000)


def scaling(least: int = 1, **changes) -> ScalingSimulation:
    role = RoleBounds(least=least, most=12, targets=Targets(queue_seconds=1.0, kv_usage=0.85), gpus=1)
    config = ScalingConfig(prefill=role, decode=role, **{"scale_down_window_s": 30.0, **changes})
    costs = ScalingCosts(start_s=10.0)
    shape = FleetShape(
        prefill=2,
        decode=1,
        cache_blocks=500,
        block_tokens=TRACE_BLOCK,
        times=ServiceTimes(prefill_rate=1000.0),
    )
    return ScalingSimulation(
        simulation=Simulation(
            requests=REQUESTS,
            shape=shape,
            policies={"locality": PolicyNames()},
            local_prefill_tokens=0,
            seed=0,
        ),
        scalers={
            "internal": Scaled(scaler=lambda: Law(config), costs=costs),
            "slo": Scaled(scaler=lambda: Law(config_of_objectives(config, SLO, 0.9)), costs=costs),
            "static": Scaled(scaler=Static, costs=costs),
        },
        slo=SLO,
    )


async def report_of(server, simulation: ScalingSimulation) -> ScalingReport:
    server.command("FLUSHALL")
    return await simulation.run(RedisAddress(url=server.url), lambda _: None)


async def test_simulated_autoscaling_follows_load_and_is_deterministic(server):
    report = await report_of(server, scaling())
    internal, static = report.scalers["internal"], report.scalers["static"]
    assert internal.requests == static.requests == len(REQUESTS)
    assert internal.refused == 0
    assert static.refusals == {"no_room": static.refused}, "who has waited for a minute is refused, as by a gateway"
    assert static.refused > 0
    assert internal.slo_attainment > static.slo_attainment + 0.2
    assert report.scalers["slo"].slo_attainment > static.slo_attainment + 0.2
    assert report.over_hpa == {}
    assert internal.workers_most > 3
    assert static.workers_most == 3
    assert internal.scalings < 30
    assert internal.worker_hours < internal.workers_most * report.simulated_s / 3600, "it goes down again"
    assert (await report_of(server, scaling())).scalers == report.scalers


async def test_from_zero_requests_wait_for_the_first_pair(server, monkeypatch):
    """Also where Redis answers late, as on a machine with much to do: that ends no run."""
    refresh, paused = Router.refresh, []

    async def late(router: Router) -> None:
        if not paused:
            paused.append(server.command("CLIENT", "PAUSE", "1500"))
        await refresh(router)

    monkeypatch.setattr(Router, "refresh", late)
    simulation = scaling(least=0, idle_s_to_zero=30.0)
    report = (await report_of(server, simulation)).scalers["internal"]
    assert (report.requests, report.refused) == (len(REQUESTS), 0)
    assert paused == ["+OK\r\n"]


@pytest.mark.parametrize(
    ("flags", "error_message"),
    [
        (["--autoscale"], "needs a bound to attain"),
        (["--skip-prompts", "1"], "no requests in it after --skip-prompts 1"),
        (["--autoscale", "keda", "--slo-ttft-ms", "1", "--workers", "prefill=1,decode=1"], "choose among internal"),
        (["--autoscale", "--slo-ttft-ms", "1", "--workers", "4"], "must say prefill=N,decode=N"),
    ],
)
def test_incomparable_scalers_are_rejected_at_start(flags, error_message, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}) + "\n")
    assert main(["simulate", "--trace", str(trace), "--cache-blocks", "10", *flags]) == 2
    assert error_message in capsys.readouterr().err


def test_command_prints_a_table_and_draws_a_plot(tmp_path, capsys):
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "scalers.svg"
    rows = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 4, "hash_ids": [2 * n, 2 * n + 1]}
        for n in range(30)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--workers", "prefill=1,decode=1", "--autoscale", "--slo-ttft-ms", "500", "--cache-blocks", "100"]
    assert main(["simulate", "--trace", str(trace), *flags, "--skip-prompts", "10", "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "20 requests in" in shown
    assert "SLO attainment" in shown
    assert "worker hours / hpa" in shown
    assert "internal" in shown
    assert plot.read_text().startswith("<svg")
