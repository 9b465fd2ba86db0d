"""`tandem-engine`: the engine's own commands. People use `tandem`, which starts these as processes.

serve    one engine process for a worker service; with --tensor-parallel-size it starts its further ranks
follow   the ranks of a further machine of an engine with --nnodes
kernels  compile, list or delete kernels of engines on a CPU; print the kind of CPU that they are for
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.cgroups import usable_cpus
from tandem_engine.base.environment import read_environment, set_default
from tandem_engine.base.errors import ConfigError, EngineError
from tandem_engine.base.extras import lacking
from tandem_engine.base.freed_memory import lasting
from tandem_engine.base.linux import allow_many_descriptors, keep_files_private
from tandem_engine.base.logs import LogFormat, configure_logging
from tandem_engine.base.progress import START, Phase
from tandem_engine.base.thread_pools import ENGINE_THREADS, THREADS_PER_CPU, require_threads
from tandem_engine.config import Role
from tandem_engine.config.flags import (
    add_engine_flags,
    engine_config,
    host_address,
    non_negative_int,
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem-engine", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_follow(commands)
    _add_rank(commands)
    _add_kernels(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("serve", help="run one engine process", allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="PATH", help="checkpoint directory")
    parser.add_argument("--role", choices=[role.value for role in Role], default=Role.BOTH.value)
    parser.add_argument("--worker-id", required=True, metavar="ID", help="stable name of the worker")
    parser.add_argument("--incarnation", required=True, metavar="ID@N", help="this process of that worker")
    parser.add_argument("--request-port", type=non_negative_int, default=0, metavar="PORT", help="0 picks a free one")
    parser.add_argument("--peer-port", type=non_negative_int, default=0, metavar="PORT", help="0 picks a free one")
    _add_process_flags(parser)
    parser.add_argument(
        "--report-ended", action="store_true", help="report traced requests to the worker service when they finish"
    )
    parser.add_argument("--progress-file", type=Path, help=argparse.SUPPRESS)
    add_engine_flags(parser)
    parser.set_defaults(run=_serve)


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", type=host_address, default=LOOPBACK, help="address that gateways, peers and other nodes reach"
    )
    parser.add_argument("--control", metavar="ENDPOINT", help="ipc:// endpoint of the worker service")
    parser.add_argument("--curve-keys", type=Path, metavar="FILE", help="key file of the deployment")
    _add_log_format(parser)


def _add_log_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-format", choices=[each.value for each in LogFormat], default=LogFormat.PLAIN.value)


def _serve(args: argparse.Namespace) -> int:
    keep_files_private()
    allow_many_descriptors()
    require_threads(ENGINE_THREADS + THREADS_PER_CPU * (args.threads or usable_cpus()))
    configure_logging(LogFormat(args.log_format), level=read_environment().level)
    START.report_to(args.progress_file)
    START.report(Phase.IMPORTS)
    _leave_cores()
    with lasting():
        from tandem_engine.engine.process import ProcessConfig, serve

    return serve(
        ProcessConfig(
            engine=engine_config(args),
            worker_id=args.worker_id,
            incarnation=args.incarnation,
            host=args.host,
            request_port=args.request_port,
            peer_port=args.peer_port,
            control=args.control,
            curve_keys=args.curve_keys,
            report_ended=args.report_ended,
        )
    )


def _add_follow(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("follow", help="ranks of a further machine of one engine", allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="PATH", help="checkpoint directory")
    parser.add_argument("--role", choices=[role.value for role in Role], default=Role.BOTH.value)
    _add_process_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=_follow)


def _leave_cores() -> None:
    """Leave cores to other engines of the machine, before torch and numpy are imported.

    OpenMP threads that spin for work take cores from them. So do the threads of numpy's library, for 0.06 s at each
    start, and no step computes with it.
    """
    set_default("OMP_WAIT_POLICY", "PASSIVE")
    set_default("OPENBLAS_NUM_THREADS", "1")


def _follow(args: argparse.Namespace) -> int:
    keep_files_private()
    allow_many_descriptors()
    require_threads(ENGINE_THREADS + THREADS_PER_CPU * (args.threads or usable_cpus()))
    configure_logging(LogFormat(args.log_format), level=read_environment().level)
    _leave_cores()
    with lasting():
        from tandem_engine.engine.launch import NodeConfig, follow

    return follow(
        NodeConfig(engine=engine_config(args), host=args.host, control=args.control, curve_keys=args.curve_keys)
    )


def _add_rank(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("rank", help="a further rank of an engine; started by its rank 0", allow_abbrev=False)
    _add_log_format(parser)
    parser.set_defaults(run=_rank)


def _rank(args: argparse.Namespace) -> int:
    keep_files_private()
    allow_many_descriptors()
    require_threads(ENGINE_THREADS)
    configure_logging(LogFormat(args.log_format), level=read_environment().level)
    with lasting():
        from tandem_engine.engine.launch import run_rank

    # All else is in the order that comes on standard input.
    return run_rank(sys.stdin.buffer)


def _add_kernels(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("kernels", help="compile, list or delete kernels of a CPU", allow_abbrev=False)
    parser.add_argument("action", choices=("build", "list", "prune", "target"))
    parser.add_argument("--model", metavar="PATH", help="checkpoint directory; for build and list")
    parser.add_argument("--role", choices=[role.value for role in Role], default=Role.BOTH.value)
    parser.add_argument("--missing", action="store_true", help="list only those that are in no file")
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help="build in one process, and not in one for each CPU: numbers in symbols are the same each time",
    )
    add_engine_flags(parser)
    parser.set_defaults(run=_kernels)


def _kernels(args: argparse.Namespace) -> int:
    if args.action == "target":
        from tandem_engine.kernels.cpu.target import target

        print(target().name)
        return 0
    from tandem_engine.engine import kernel_commands

    if args.action == "prune":
        for name in kernel_commands.delete_unused():
            print(f"deleted  {name}")
        return 0
    if args.model is None:
        raise ConfigError(f"kernels {args.action} requires --model")
    if args.action == "build":
        print(kernel_commands.build(engine_config(args), reproducible=args.reproducible))
        return 0
    states = kernel_commands.listed(engine_config(args))
    for name, present in states:
        if not (present and args.missing):
            print(f"{'present' if present else 'missing'}  {name}")
    return 0 if all(present for _, present in states) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    configure_logging(LogFormat.PLAIN, level=read_environment().level)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"tandem-engine: error: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"tandem-engine: error: {error}", file=sys.stderr)
        return 3
    except (ModuleNotFoundError, OSError) as error:
        sentence = lacking(error)
        if sentence is None:
            raise
        print(f"tandem-engine: error: {sentence}", file=sys.stderr)
        return 3


def exit_now(status: int) -> NoReturn:
    """End the process without torch's destructors, which take seconds; everything of ours is closed by now."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    exit_now(main())
