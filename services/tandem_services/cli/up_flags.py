"""Flags of `tandem up` beside those of the engine, in groups by what they are about."""

import argparse
from pathlib import Path

from tandem_engine.addresses import LOOPBACK
from tandem_engine.flags import host_address, non_negative_int
from tandem_services.cli.numbers import port_number, positive_float
from tandem_services.cli.shared_flags import (
    add_allowed_hosts,
    add_api_keys,
    add_body_memory,
    add_cluster,
    add_console,
    add_local_prefill,
    add_log_format,
    add_model,
    add_output_parsers,
    add_redis,
    add_router_policy,
    add_special_tokens,
    add_tracing,
)


def add_up_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    add_model(model)
    add_output_parsers(model)
    _add_workers(parser.add_argument_group("workers"))
    _add_api(parser.add_argument_group("API"))
    routing = parser.add_argument_group("routing")
    add_local_prefill(routing)
    add_router_policy(routing)
    redis = parser.add_argument_group("Redis")
    add_redis(redis, required=False)
    add_cluster(redis)
    _add_start(parser.add_argument_group("start"))
    observability = parser.add_argument_group("logs and traces")
    add_log_format(observability)
    add_tracing(observability)


def _add_workers(group: argparse._ArgumentGroup) -> None:
    for name, default, what in (
        ("prefill", 1, "prefill workers"),
        ("decode", 1, "decode workers"),
        ("both", 0, "workers that do both"),
    ):
        group.add_argument(
            f"--{name}", type=non_negative_int, default=default, metavar="N", help=f"{what} (default: {default})"
        )


def _add_api(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        type=host_address,
        default=LOOPBACK,
        help="address of the API; workers use the loopback address of its family (default: %(default)s)",
    )
    group.add_argument(
        "--port", type=port_number, default=8000, help="port of the API; 0 picks a free one (default: 8000)"
    )
    add_allowed_hosts(group, what="requests may be for")
    add_api_keys(group)
    add_special_tokens(group)
    add_body_memory(group)
    add_console(group)


def _add_start(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--run-dir", type=Path, metavar="DIR", help="keys and logs (default: .tandem/PORT)")
    group.add_argument(
        "--ready-timeout",
        type=positive_float,
        default=120.0,
        metavar="S",
        help="give up starting after this (default: 120)",
    )
