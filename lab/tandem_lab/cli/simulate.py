"""`tandem simulate`: policies side by side on one trace, with the real router and modelled workers."""

import argparse
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import non_negative_int, positive_int
from tandem_lab.cli.bench import add_slo, slo_of
from tandem_services.cli.flags import add_local_prefill, add_queue, fraction, percentile, positive_float
from tandem_services.common.errors import StartupError

if TYPE_CHECKING:
    from tandem_lab.simulate.fleet import FleetShape
    from tandem_lab.simulate.gateway import GatewayShape
    from tandem_lab.simulate.prefix_fetch import ServiceTimes
    from tandem_lab.simulate.report import Report, ScalingReport
    from tandem_lab.simulate.requests import SimulatedRequest, Tenants
    from tandem_lab.simulate.run import CandidateLimit, ScalingSimulation, Simulation
    from tandem_services.common.redis_client import RedisAddress
    from tandem_services.router.policies import PolicyNames


SCALERS = ("internal", "slo", "hpa", "static")


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    _add_load(parser)
    _add_workers(parser)
    _add_gateways(parser)
    _add_scaling(parser)
    _add_report(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--trace", type=Path, required=True, metavar="FILE", help="trace: Mooncake .jsonl or Azure .csv")
    load.add_argument("--num-prompts", type=positive_int, metavar="N", help="the first N requests (default: all)")
    load.add_argument(
        "--skip-prompts",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="leave out the first N requests of the trace; --num-prompts counts from there (default: 0)",
    )
    load.add_argument(
        "--trace-speed",
        type=positive_float,
        default=1.0,
        metavar="F",
        help="divisor of the gaps between arrivals (default: 1)",
    )
    load.add_argument(
        "--policy",
        action="append",
        metavar="LIST",
        help="policies to compare, separated by commas: locality, round_robin, least_loaded, power_of_two, session; or "
        "prefill=POLICY,decode=POLICY as one; repeatable (default: locality,round_robin,least_loaded,power_of_two)",
    )
    load.add_argument(
        "--candidates",
        default="few",
        metavar="LIST",
        help="workers that a decision prices: few, as the product does in a fleet of more than 24, or all; few,all "
        "compares both (default: few)",
    )
    load.add_argument("--seed", type=int, default=0, help="seed of every random choice (default: 0)")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--workers",
        default="8",
        metavar="N",
        help="N workers with both roles, or prefill=N,decode=N[,both=N] (default: 8)",
    )
    cache = workers.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache-share",
        type=fraction,
        default=0.1,
        metavar="F",
        help="KV of all workers that compute prompts, as a share of the trace's distinct blocks (default: 0.1)",
    )
    cache.add_argument("--cache-blocks", type=positive_int, metavar="N", help="KV of each worker in 512-token blocks")
    workers.add_argument(
        "--prefill-rate", type=positive_float, default=10_000.0, metavar="R", help="prompt tokens/s (default: 10000)"
    )
    workers.add_argument(
        "--decode-step-ms",
        default="1:10,64:30,256:80",
        metavar="N:MS,…",
        help="step time by sequences, linear in between (default: 1:10,64:30,256:80)",
    )
    workers.add_argument(
        "--chunked-prefill-size",
        type=positive_int,
        default=2048,
        metavar="N",
        help="prompt tokens per step (default: 2048)",
    )
    workers.add_argument(
        "--max-running-requests", type=positive_int, default=256, metavar="N", help="rows of each worker (default: 256)"
    )
    workers.add_argument(
        "--context-length", type=positive_int, default=131_072, metavar="N", help="longest sequence (default: 131072)"
    )
    workers.add_argument(
        "--token-kib", type=positive_float, default=128.0, metavar="KIB", help="KV of one token in KiB (default: 128)"
    )
    workers.add_argument(
        "--transfer-gb-per-s",
        type=positive_float,
        default=10.0,
        metavar="GB",
        help="bandwidth of each link in GB/s (default: 10)",
    )
    add_local_prefill(workers)


def _add_gateways(parser: argparse.ArgumentParser) -> None:
    gateways = parser.add_argument_group("gateways", "their queue is that of the product; flags as of tandem gateway")
    gateways.add_argument(
        "--gateways",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of gateways, which get requests in turn (default: 1)",
    )
    gateways.add_argument(
        "--cells",
        type=positive_int,
        default=1,
        metavar="N",
        help="divide workers and gateways among N cells, each of which serves the requests of its gateways, and those "
        "that other cells have no capacity for (default: 1)",
    )
    apart = gateways.add_mutually_exclusive_group()
    apart.add_argument(
        "--sessions-apart",
        action="store_true",
        help="send all requests of a conversation to one gateway, as a load balancer that hashes them does (default: "
        "gateways get requests in turn)",
    )
    apart.add_argument(
        "--tenants-apart",
        action="store_true",
        help="send all requests of a tenant to one gateway (default: gateways get requests in turn)",
    )
    add_queue(gateways)
    gateways.add_argument(
        "--from-zero-timeout",
        type=positive_float,
        default=10.0,
        metavar="S",
        help="maximum wait of a new choice while no worker can serve it, in seconds (default: 10)",
    )
    gateways.add_argument(
        "--api-keys",
        type=Path,
        metavar="PATH",
        help="key file with the tenants of the trace: weights, priorities and caches; rate limits are not modeled "
        "(default: every tenant has weight 1, and all share one cache)",
    )


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    scaling = parser.add_argument_group(
        "autoscaling", "compare scalers instead of policies; --workers prefill=N,decode=N is the initial fleet"
    )
    scaling.add_argument(
        "--autoscale",
        nargs="?",
        const=",".join(SCALERS),
        metavar="LIST",
        help="internal (the operator's controller, by queues), slo (the same, by the --slo-ttft-ms and --slo-itl-ms "
        "bounds), hpa (each role in proportion to its metric), static (constant); "
        f"default: {','.join(SCALERS)}. Requires an --slo-* bound",
    )
    scaling.add_argument(
        "--slo-percentile",
        type=percentile,
        default=0.95,
        metavar="P",
        help="share of requests that slo is to keep within the bounds (default: 0.95)",
    )
    scaling.add_argument(
        "--max-workers",
        type=positive_int,
        default=16,
        metavar="N",
        help="maximum number of workers of each role (default: 16)",
    )
    scaling.add_argument(
        "--worker-start-s",
        type=positive_float,
        default=60.0,
        metavar="S",
        help="seconds until a new worker serves (default: 60)",
    )
    scaling.add_argument(
        "--scale-period-s", type=positive_float, default=5.0, metavar="S", help="seconds between decisions (default: 5)"
    )
    scaling.add_argument(
        "--target-queue-s",
        type=positive_float,
        default=1.0,
        metavar="S",
        help="target wait of queued prompts in seconds (default: 1)",
    )
    scaling.add_argument(
        "--gpu-budget",
        type=positive_int,
        metavar="N",
        help="maximum number of workers of both roles together (default: no limit)",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    report = parser.add_argument_group("report")
    add_slo(report)
    report.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    report.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object to FILE too")
    report.add_argument("--plot", type=Path, metavar="FILE", help="write the results as SVG")


def simulation_of(args: argparse.Namespace) -> "Simulation":
    """Policies side by side. Raises `ConfigError`."""
    from tandem_lab.simulate.cells import checked_cells
    from tandem_lab.simulate.requests import simulated_requests
    from tandem_lab.simulate.run import Simulation
    from tandem_lab.traces import read_trace

    policies = _policies(args.policy)
    times = _times(args)
    counts = _worker_counts(args.workers)
    gateways, tenants = _gateways(args), _tenants(args.api_keys)
    requests = simulated_requests(
        islice(read_trace(args.trace), args.skip_prompts, None),
        limit=args.num_prompts,
        speed=args.trace_speed,
        tenants=tenants,
        apart=args.tenants_apart,
        sessions_apart=args.sessions_apart,
    )
    if not requests:
        left = f" after --skip-prompts {args.skip_prompts}" if args.skip_prompts else ""
        raise ConfigError(f"--trace {args.trace}: no requests in it{left}")
    return Simulation(
        requests=requests,
        shape=_shape(args, counts, times, requests),
        policies=policies,
        local_prefill_tokens=args.local_prefill_tokens,
        seed=args.seed,
        slo=slo_of(args),
        gateways=gateways,
        candidates=_candidates(args.candidates),
        cells=checked_cells(args.cells, gateways=args.gateways, workers=counts, scaled=args.autoscale is not None),
    )


def _candidates(text: str) -> "tuple[CandidateLimit, ...]":
    from tandem_lab.simulate.run import CandidateLimit

    try:
        return tuple(dict.fromkeys(CandidateLimit(name) for name in text.split(",")))
    except ValueError:
        raise ConfigError(f"--candidates takes few, all or few,all, got {text[:100]!r}") from None


def _gateways(args: argparse.Namespace) -> "GatewayShape":
    from tandem_lab.simulate.gateway import MAX_GATEWAYS, GatewayShape
    from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy

    if args.gateways > MAX_GATEWAYS:
        raise ConfigError(f"--gateways: there must be 1 to {MAX_GATEWAYS} gateways, got {args.gateways}")
    policy = AdmissionPolicy(room_s=args.queue_timeout, worker_s=args.from_zero_timeout)
    return GatewayShape(gateways=args.gateways, seats=args.max_waiting_requests, policy=policy)


def _tenants(path: Path | None) -> "Tenants":
    from tandem_lab.simulate.requests import Tenants
    from tandem_services.gateway.access.keys import KeyFileError, read_keys

    try:
        return Tenants() if path is None else Tenants(read_keys(path))
    except KeyFileError as error:
        raise ConfigError(f"--api-keys: {error}") from error


def _policies(lists: Sequence[str] | None) -> "dict[str, PolicyNames]":
    from tandem_services.router.policies import PolicyNames

    names = []
    for text in lists or ["locality,round_robin,least_loaded,power_of_two"]:
        names += [text] if "=" in text else text.split(",")
    return {name: PolicyNames.parse(name, flag="--policy") for name in names}


def _worker_counts(text: str) -> dict[str, int]:
    """`8` or `prefill=4,decode=4`."""
    counts = {}
    for part in text.split(",") if "=" in text else [f"both={text}"]:
        role, _, count = part.partition("=")
        if role not in ("both", "prefill", "decode") or role in counts or not count.isdecimal():
            raise ConfigError(f"--workers {text[:100]!r}: expected a number, or prefill=N,decode=N[,both=N]")
        counts[role] = int(count)
    return counts


def _times(args: argparse.Namespace) -> "ServiceTimes":
    from tandem_lab.simulate.prefix_fetch import ServiceTimes

    return ServiceTimes(
        prefill_rate=args.prefill_rate,
        chunk_tokens=args.chunked_prefill_size,
        decode_steps=_decode_steps(args.decode_step_ms),
        token_bytes=args.token_kib * 1024,
        transfer_rate=args.transfer_gb_per_s * 1e9,
    )


def _decode_steps(text: str) -> tuple[tuple[int, float], ...]:
    steps = []
    for part in text.split(","):
        size, _, ms = part.partition(":")
        try:
            steps.append((positive_int(size), positive_float(ms) / 1e3))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"--decode-step-ms {part[:100]!r}: expected SEQUENCES:MS, e.g. 64:30") from error
    return tuple(steps)


def _shape(
    args: argparse.Namespace, counts: dict[str, int], times: "ServiceTimes", requests: "Sequence[SimulatedRequest]"
) -> "FleetShape":
    from tandem_lab.simulate.fleet import FleetShape
    from tandem_lab.simulate.run import distinct_blocks
    from tandem_lab.traces import TRACE_BLOCK

    computing = counts.get("both", 0) + counts.get("prefill", 0)
    shared = int(distinct_blocks(requests) * args.cache_share) // max(1, computing)
    return FleetShape(
        **counts,
        cache_blocks=shared if args.cache_blocks is None else args.cache_blocks,
        block_tokens=TRACE_BLOCK,
        max_sequences=args.max_running_requests,
        context_length=args.context_length,
        times=times,
    )


def scaling_of(args: argparse.Namespace, simulation: "Simulation") -> "ScalingSimulation":
    """Scalers side by side, on what `simulation` has. Raises `ConfigError`."""
    from tandem_lab.simulate.autoscaling import Hpa, Law, Scaler, ScalingCosts, Static, config_of_objectives
    from tandem_lab.simulate.replay import Scaled
    from tandem_lab.simulate.run import ScalingSimulation
    from tandem_operator.scaling.load import Targets
    from tandem_operator.scaling.policy import RoleBounds, ScalingConfig

    if simulation.slo is None:
        raise ConfigError("--autoscale: needs a bound to attain, e.g. --slo-ttft-ms 5000")
    if simulation.shape.both:
        raise ConfigError("--autoscale: --workers must say prefill=N,decode=N, the roles that are scaled")
    targets = Targets(queue_seconds=args.target_queue_s, kv_usage=0.85, clear_seconds=args.worker_start_s)
    role = RoleBounds(least=1, most=args.max_workers, targets=targets, gpus=1)
    config = ScalingConfig(prefill=role, decode=role, gpu_budget=args.gpu_budget)
    by_latency = config_of_objectives(config, simulation.slo, args.slo_percentile)
    known: dict[str, Callable[[], Scaler]] = {
        "internal": lambda: Law(config),
        "slo": lambda: Law(by_latency),
        "hpa": lambda: Hpa(config),
        "static": Static,
    }
    names = args.autoscale.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"--autoscale {name[:100]!r}: choose among {', '.join(known)}")
    costs = ScalingCosts(period_s=args.scale_period_s, start_s=args.worker_start_s)
    scalers = {name: Scaled(scaler=known[name], costs=costs) for name in names}
    return ScalingSimulation(simulation=simulation, scalers=scalers, slo=simulation.slo)


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
    from tandem_lab.simulate.report import plot, table

    simulation = simulation_of(args)
    for path in (args.out, args.plot):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    if args.autoscale is not None:
        return _run_scalers(args, simulation)
    report = _replayed(simulation, tuple(simulation.names()), quiet=args.json, requests=len(simulation.requests))
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
    from tandem_lab.simulate.report import scaling_plot, scaling_table

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
