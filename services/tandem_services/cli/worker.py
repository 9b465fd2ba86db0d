"""`tandem worker`: one worker of a deployment; `tandem up` and the worker pods start this."""

import argparse
import os
import platform
from pathlib import Path

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.freed_memory import lasting
from tandem_engine.base.linux import allow_many_descriptors, keep_files_private
from tandem_engine.base.thread_pools import require_threads
from tandem_engine.config import Role
from tandem_engine.config.flags import add_engine_flags, engine_argv, engine_config, host_address
from tandem_services.cli.entry import teach
from tandem_services.cli.flags import (
    WORKER_DRAIN_S,
    add_allowed_hosts,
    add_deployment,
    add_log_format,
    add_model,
    add_tracing,
    model_folder,
    non_negative_float,
    port_number,
    positive_float,
    require_adapters,
    served_names,
    tracing_of,
)
from tandem_services.common.settings import read_settings

THREADS = 9
"""That a worker's service starts; its engine counts its own."""

COMMON = (
    *("--model", "--role", "--redis-url", "--cluster", "--curve-keys", "--worker-id", "--host", "--health-port"),
    *("--dtype", "--device", "--context-length", "--kv-cache-gib", "--config", "--print-config"),
)
"""Flags that `--help` shows."""

EXAMPLES = """\
examples:
  tandem worker --role prefill --redis-url redis://127.0.0.1:6379
  tandem worker --role decode --model ~/llama --dtype bfloat16 --host 10.0.0.7 --curve-keys keys.json
  tandem worker … --tp 16 --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.7:5757 --host 10.0.0.7    and on 10.0.0.8
  tandem worker … --tp 16 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.7:5757 --host 10.0.0.8
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "worker",
        help="run one worker: prefill, decode or both",
        description="Load a checkpoint, register in Redis and serve requests that gateways send. The engine runs in a "
        "child process; this one registers it, sends heartbeats, publishes KV events and serves health checks.",
        epilog=EXAMPLES,
    )
    add_model(parser.add_argument_group("model"))
    _add_worker(parser.add_argument_group("worker"))
    _add_addresses(parser.add_argument_group("addresses"))
    add_deployment(parser)
    observability = parser.add_argument_group("logs and traces")
    add_log_format(observability)
    add_tracing(observability)
    add_engine_flags(parser)
    teach(parser, common=COMMON, check=check, check_flags=check_flags)
    parser.set_defaults(run=run, peer_group=read_settings().peer_group)


def _add_worker(group: argparse._ArgumentGroup) -> None:
    settings = read_settings()
    group.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.BOTH.value,
        help="role in routing (default: both)",
    )
    group.add_argument(
        "--worker-id",
        default=settings.worker_id,
        metavar="ID",
        help="stable name, unique in the deployment (TANDEM_WORKER_ID; default: host name and pid)",
    )
    group.add_argument(
        "--standby",
        action="store_true",
        default=settings.standby,
        help="serve only requests that name this worker, such as a canary. It becomes routable with `tandem ctl … "
        "offer`, after other workers of its --peer-group have become routable, or after a minute in which no other "
        "worker serves the model (TANDEM_STANDBY)",
    )
    group.add_argument(
        "--await-links",
        type=non_negative_float,
        default=0.0,
        metavar="S",
        help="maximum delay of /ready until the links to present peers are measured, in seconds; the worker accepts "
        "requests in the meantime (default: 0, no delay)",
    )
    group.add_argument(
        "--drain-timeout",
        type=positive_float,
        default=WORKER_DRAIN_S,
        metavar="S",
        help="seconds that running requests have to migrate or finish after SIGTERM; the rest is computed again on "
        "other workers. Keep it some seconds below the pod's grace period (default: %(default)g)",
    )
    group.add_argument("--progress-file", type=Path, help=argparse.SUPPRESS)


def _add_addresses(group: argparse._ArgumentGroup) -> None:
    settings = read_settings()
    group.add_argument(
        "--host",
        type=host_address,
        default=settings.host or LOOPBACK,
        help="IPv4 or IPv6 address that gateways and peers reach (TANDEM_HOST; default: 127.0.0.1)",
    )
    for name, side in (("request", "gateways"), ("peer", "other workers")):
        group.add_argument(
            f"--{name}-port",
            type=port_number,
            default=0,
            metavar="PORT",
            help=f"port of that address for {side}; 0 picks a free one",
        )
    group.add_argument(
        "--health-port",
        type=port_number,
        default=0,
        metavar="PORT",
        help="port of /live, /ready, /metrics and commands; 0 picks a free one",
    )
    group.add_argument(
        "--health-host",
        type=host_address,
        default=settings.health_host or LOOPBACK,
        metavar="HOST",
        help="address of --health-port; 0.0.0.0 (IPv4) or :: (IPv6 and IPv4) for probes and Prometheus on other "
        "machines (TANDEM_HEALTH_HOST; default: 127.0.0.1)",
    )
    group.add_argument(
        "--allow-remote-orders",
        action="store_true",
        help="accept commands (drain, role, pause, reload …) without a token from any client of the port; "
        "by default commands need the token that `tandem ctl` reads or derives from --curve-keys",
    )
    add_allowed_hosts(group, what="commands may be sent to")


def check(args: argparse.Namespace) -> Path:
    """Refuse impossible combinations before a process is started; returns the model's folder. Raises `ConfigError`."""
    folder = model_folder(args.model)
    args.model = str(folder)
    check_flags(args)
    require_adapters(engine_config(args).adapters, served_names(args, folder))
    return folder


def check_flags(args: argparse.Namespace) -> None:
    """Refuse impossible combinations of flags, without a look at the model. Raises `ConfigError`."""
    engine_config(args)
    tracing_of(args)


def run(args: argparse.Namespace) -> int:
    from tandem_engine.base.logs import LogFormat, configure_logging

    with lasting():
        from tandem_services.common.redis_client import RedisAddress
        from tandem_services.worker.config import WorkerConfig
        from tandem_services.worker.main import run_worker

    keep_files_private()
    allow_many_descriptors()
    require_threads(THREADS)
    configure_logging(LogFormat(args.log_format), level=read_settings().log_level)
    folder = check(args)
    return run_worker(
        WorkerConfig(
            model_path=args.model,
            model_name=served_names(args, folder)[0],
            role=Role(args.role),
            worker_id=args.worker_id or f"{platform.node()}-{os.getpid()}",
            redis=RedisAddress(url=args.redis_url, password_file=args.redis_password_file),
            cluster=args.cluster,
            host=args.host,
            request_port=args.request_port,
            peer_port=args.peer_port,
            curve_keys=args.curve_keys,
            health_host=args.health_host,
            health_port=args.health_port,
            remote_orders=args.allow_remote_orders,
            allowed_hosts=tuple(args.allowed_hosts),
            drain_timeout_s=args.drain_timeout,
            standby=args.standby,
            await_links_s=args.await_links,
            tracing=tracing_of(args),
            log_format=LogFormat(args.log_format),
            engine_flags=tuple(engine_argv(args)),
            progress_file=args.progress_file,
            node_rank=args.node_rank,
        )
    )
