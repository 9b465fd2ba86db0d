"""Flags of `tandem simulate`, in groups by what they are about."""

import argparse
from pathlib import Path

from tandem_engine.flags import positive_int
from tandem_services.cli.numbers import fraction, positive_float
from tandem_services.cli.shared_flags import add_local_prefill, add_queue, add_slo

SCALERS = ("internal", "hpa", "static")


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
        help="internal (the operator's controller), hpa (each role in proportion to its metric), static (constant); "
        f"default: {','.join(SCALERS)}. Requires an --slo-* bound",
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
