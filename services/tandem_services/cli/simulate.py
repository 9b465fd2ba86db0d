"""`tandem simulate`: policies side by side on one trace, with the real router and modelled workers."""

import argparse
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tandem_engine.errors import ConfigError
from tandem_services.cli.simulate_flags import add_simulate_flags
from tandem_services.cli.simulated_system import scaling_of, simulation_of
from tandem_services.common.errors import StartupError

if TYPE_CHECKING:
    from tandem_services.common.redis_client import RedisAddress
    from tandem_services.simulate.report import Report
    from tandem_services.simulate.run import Simulation
    from tandem_services.simulate.scaling_report import ScalingReport

R_co = TypeVar("R_co", covariant=True)
R_report = TypeVar("R_report", "Report", "ScalingReport")

EXAMPLES = """\
examples:
  tandem simulate --trace conversation_trace.jsonl --workers 8 --cache-share 0.1
  tandem simulate --trace conversation_trace.jsonl --workers prefill=4,decode=4 --slo-ttft-ms 2000 --slo-itl-ms 50
  tandem simulate --trace conv.csv --workers 4 --policy locality --prefill-rate 8000 --decode-step-ms 1:12,64:35
  tandem simulate --trace conversation_trace.jsonl --workers 8 --policy locality,round_robin --plot policies.svg
  tandem simulate --trace conversation_trace.jsonl --workers prefill=4,decode=4 --policy prefill=locality,decode=session
  tandem simulate --trace conversation_trace.jsonl --workers prefill=2,decode=2 --autoscale --slo-ttft-ms 5000

Real: the gateway's queue, and the router with its index, prices, reservations and policies, in a separate Redis with
simulated time. Modeled: workers, with the rates that workers publish. Use those of a running deployment (redis-cli
--scan --pattern 'tandem:{default}:*worker:NAME' lists the hash with prefill_tokens_per_s, decode_step_s, token_bytes
and transfer_bytes_per_s). Nothing sleeps; equal inputs and seeds give equal results.

Results: "of pooled LRU" is the block hit rate over that of one cache as large as all workers' together, which no router
can exceed by much; "busiest/mean" is 1 for evenly distributed work. docs/simulate.md describes the model.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "simulate",
        help="replay a request trace against queue and router with modeled workers",
        description="Replay a trace (Mooncake .jsonl or Azure .csv) in simulated time and compare routing policies by "
        "hit rate, TTFT, ITL, goodput and balance.",
        epilog=EXAMPLES,
    )
    add_simulate_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Everything that can be wrong with the input is found before Redis is started."""
    from tandem_services.simulate.figures import plot, table

    simulation = simulation_of(args)
    for path in (args.out, args.plot):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    if args.autoscale is not None:
        return _run_scalers(args, simulation)
    report = _replayed(simulation, tuple(simulation.policies), quiet=args.json, requests=len(simulation.requests))
    title = f"{args.trace.name}, {args.workers} workers, {report.trace.cache_blocks} blocks of KV"
    _deliver(args, report, table=table, plot=lambda found: plot(found, title))
    return 0


def _deliver(
    args: argparse.Namespace, report: R_report, *, table: Callable[[R_report], str], plot: Callable[[R_report], str]
) -> None:
    """Into the files that were named, and to standard output."""
    text = _json(report)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        args.plot.write_text(plot(report), encoding="utf-8")
    print(text if args.json else table(report))


def _run_scalers(args: argparse.Namespace, simulation: "Simulation") -> int:
    from tandem_services.simulate.scaling_report import scaling_plot, scaling_table

    scaling = scaling_of(args, simulation)
    report = _replayed(scaling, tuple(scaling.scalers), quiet=args.json, requests=len(simulation.requests))
    title = f"{args.trace.name}, beginning with {args.workers}, a worker starts in {args.worker_start_s:g} s"
    _deliver(args, report, table=scaling_table, plot=lambda found: scaling_plot(found, title))
    return 0


class _Runs(Protocol[R_co]):
    """A simulation of either kind."""

    def run(self, redis: "RedisAddress", on_served: Callable[[str], None]) -> Coroutine[Any, Any, R_co]: ...


def _replayed(simulation: "_Runs[R_co]", names: Sequence[str], *, quiet: bool, requests: int) -> R_co:
    """With a Redis of its own, which ends with it."""
    import uvloop
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tandem_services.cli.processes import Supervisor
    from tandem_services.cli.redis_process import start_redis
    from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    supervisor = Supervisor()
    with (
        TemporaryDirectory(prefix="tandem-simulate-") as folder,
        Progress(*columns, console=Console(stderr=True), disable=quiet) as progress,
    ):
        tasks = {name: progress.add_task(name, total=requests) for name in names}
        try:
            url = start_redis(supervisor, Path(folder))
            return uvloop.run(simulation.run(RedisAddress(url=url), lambda name: progress.advance(tasks[name])))
        except RedisUnavailableError as error:
            raise StartupError(f"the simulation's own Redis failed: {error}") from error
        finally:
            supervisor.stop(grace=5.0)


def _json(report: "Report | ScalingReport") -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
